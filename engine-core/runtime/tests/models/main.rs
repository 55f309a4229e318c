//! Real models through loaded plug-ins: reference logits, the same answer everywhere, traps that need arithmetic.
//!
//! The plug-ins are those beside this test program (`cargo build --release` makes them). Trials that need
//! `../shared/models` are ignored with that reason where it is absent.

mod answers;
mod architectures;
mod exact;
mod experts;
mod hybrid;
mod mixture;
mod powerinfer;
mod reference;
mod stack;
mod synth;
mod synthetic;
mod traps;
mod vulkan;
mod wrapped;

use libtest_mimic::{Arguments, Trial};

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> = Vec::new();
    trials.extend(reference::trials());
    trials.extend(answers::trials());
    trials.extend(traps::trials());
    trials.extend(synthetic::trials());
    trials.extend(architectures::trials());
    trials.extend(experts::trials());
    trials.extend(powerinfer::trials());
    trials.extend(synth::trials());
    trials.extend(exact::trials());
    trials.extend(mixture::trials());
    trials.extend(vulkan::trials());
    trials.extend(hybrid::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}
