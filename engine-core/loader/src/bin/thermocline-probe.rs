//! Tries one plug-in library on behalf of another process and reports what it is.

fn main() -> std::process::ExitCode {
    engine_loader::probe_main_if_requested();
    // Only reached where somebody starts it by hand.
    std::process::ExitCode::from(2)
}
