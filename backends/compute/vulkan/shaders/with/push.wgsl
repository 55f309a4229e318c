// What every dispatch is told: where each binding's operand begins (in words of 4 bytes; weights in bytes), and numbers
// whose meaning each shader says.
struct Push {
    base: vec4<u32>,
    base_more: vec4<u32>,
    n0: vec4<u32>,
    n1: vec4<u32>,
    n2: vec4<u32>,
    n3: vec4<u32>,
    n4: vec4<u32>,
    n5: vec4<u32>,
}
var<immediate> p: Push;

