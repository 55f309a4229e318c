//! A chat template and a conversation of any bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;

// The program has no library to depend on.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../engine-core/cli/src/template/mod.rs"]
mod template;

use template::{ChatTemplate, Conversation};

fuzz_target!(|data: &[u8]| {
    let parts = formats_fuzz::parts(data);
    let part = |name| formats_fuzz::part(&parts, name).and_then(|bytes| std::str::from_utf8(bytes).ok());
    let Some(source) = part("template") else { return };
    let Ok(template) = ChatTemplate::new(source, "<s>", "</s>") else { return };
    let Some(conversation) = part("conversation") else { return };
    let Ok(json) = serde_json::from_str::<serde_json::Value>(conversation) else { return };
    let Ok(conversation) = Conversation::from_json(&json) else { return };
    for answer in [false, true] {
        if let Err(error) = template.render(&conversation, answer) {
            assert!(!error.to_string().is_empty());
        }
    }
});
