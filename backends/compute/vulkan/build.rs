//! Compiles the shaders (WGSL) to SPIR-V, once per weight type and mode, and writes the table that names them.
//!
//! A shader of `shaders/` is preceded by the snippets it names in its first lines (`//! with: bindings, numbers`) and, per
//! variant, by constants. Everything runs in this program: no compiler of the system is needed.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use naga::back::spv;
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Weight types that the shaders know, in the order of `Format` in `src/kernels.rs`.
const FORMATS: &[&str] = &["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"];
/// What a product is for, in the order of `Mode` in `src/kernels.rs`.
const MODES: &[&str] = &["linear", "gate", "up", "down"];
/// Weight types whose codes can be multiplied with codes of activations.
const CODED: &[&str] = &["q8_0", "q4_0", "q4_1"];
/// Tokens that one workgroup of a product works on.
const TILES: &[u32] = &[1, 4];

/// A shader and the constants of one variant.
struct Variant {
    name: String,
    file: &'static str,
    constants: String,
    /// Whether it needs the device's own dot product of packed bytes.
    dot: bool,
}

fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    let plain = [
        "add_partials",
        "append",
        "attention",
        "combine",
        "count",
        "elementwise",
        "norm",
        "pack_mask",
        "quantise",
        "quantise_codes",
        "rope",
        "route",
    ];
    for file in plain {
        all.push(Variant { name: file.into(), file, constants: String::new(), dot: false });
    }
    for (code, format) in FORMATS.iter().enumerate() {
        let format_of = format!("const FORMAT: u32 = {code}u;\n");
        all.push(Variant {
            name: format!("embed_{format}"),
            file: "embed",
            constants: format_of.clone(),
            dot: false,
        });
        for experts in [false, true] {
            let of = if experts { "_experts" } else { "" };
            let constants = format!("{format_of}const EXPERTS: bool = {experts};\n");
            all.push(Variant {
                name: format!("down_neurons_{format}{of}"),
                file: "down_neurons",
                constants: constants.clone(),
                dot: false,
            });
            for (mode_code, mode) in
                MODES.iter().enumerate().filter(|(_, mode)| !experts || **mode != "linear")
            {
                // Each token of a mixture has experts of its own.
                for tile in TILES.iter().filter(|tile| !experts || **tile == 1) {
                    for dot in [false, true] {
                        if dot && (*mode == "down" || !CODED.contains(format)) {
                            continue;
                        }
                        let suffix = if dot { "_dot" } else { "" };
                        all.push(Variant {
                            name: format!("product_{format}_{mode}_{tile}{suffix}{of}"),
                            file: "product",
                            constants: format!(
                                "{constants}const MODE: u32 = {mode_code}u;\nconst TILE: u32 = {tile}u;\nconst DOT: bool = {dot};\n"
                            ),
                            dot,
                        });
                    }
                }
            }
        }
    }
    all
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=shaders");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut table = String::from("/// Every shader by name, as SPIR-V words in the target's byte order.\n");
    let _ = writeln!(table, "pub(crate) const SHADERS: &[(&str, &[u8])] = &[");
    for variant in variants() {
        let words = compile(&variant).map_err(|e| format!("shader {}: {e}", variant.name))?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let file = format!("{}.spv", variant.name);
        std::fs::write(out.join(&file), bytes)?;
        let _ = writeln!(
            table,
            "    ({:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}\"))),",
            variant.name
        );
    }
    table.push_str("];\n");
    std::fs::write(out.join("shaders.rs"), table)?;
    Ok(())
}

fn source(variant: &Variant) -> Result<String, Box<dyn Error>> {
    let folder = Path::new("shaders");
    let main = std::fs::read_to_string(folder.join(format!("{}.wgsl", variant.file)))?;
    let mut text = variant.constants.clone();
    let with = main.lines().find_map(|line| line.strip_prefix("// with: ")).unwrap_or_default();
    for snippet in with.split(", ").filter(|s| !s.is_empty()) {
        text.push_str(&std::fs::read_to_string(folder.join(format!("with/{snippet}.wgsl")))?);
    }
    text.push_str(&main);
    Ok(text)
}

fn compile(variant: &Variant) -> Result<Vec<u32>, Box<dyn Error>> {
    let text = source(variant)?;
    let module = naga::front::wgsl::parse_str(&text).map_err(|e| e.emit_to_string(&text))?;
    let info = Validator::new(
        ValidationFlags::all(),
        Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    )
    .validate(&module)
    .map_err(|e| e.emit_to_string(&text))?;
    let mut capabilities = vec![spv::Capability::Shader];
    if variant.dot {
        capabilities.extend([spv::Capability::DotProduct, spv::Capability::DotProductInput4x8BitPacked]);
    }
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        // Nothing that a device may lack, where the variant is not for those that have it: bytes are taken apart with shifts.
        capabilities: Some(capabilities.into_iter().collect()),
        // Indices are computed from shapes that were checked when the list was prepared.
        bounds_check_policies: naga::proc::BoundsCheckPolicies::default(),
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        use_storage_input_output_16: false,
        emit_int_div_checks: false,
        fake_missing_bindings: false,
        binding_map: bindings(&module),
        ..spv::Options::default()
    };
    let pipeline =
        spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".into() };
    Ok(spv::write_vec(&module, &info, &options, Some(&pipeline))?)
}

/// Bindings as the text has them.
fn bindings(module: &naga::Module) -> spv::BindingMap {
    let mut map = spv::BindingMap::default();
    for (_, global) in module.global_variables.iter() {
        if let Some(binding) = global.binding {
            let target = spv::BindingInfo {
                descriptor_set: binding.group,
                binding: binding.binding,
                binding_array_size: None,
            };
            map.insert(binding, target);
        }
    }
    map
}
