//! Runs the built program: what it prints where, how it ends, and what it makes of wrong input.
//!
//! The plug-ins must lie beside it (`cargo build --release` puts them there): tests that need them fail otherwise.

#![forbid(unsafe_code)]

mod answers;
mod bad_files;
mod bad_plugins;
mod chat;
mod convert;
mod diverge;
mod generation;
mod interrupt;
mod limits;
mod linked_in;
mod misbehaving;
mod overrides;
mod prepare;
mod processor;
mod program;
mod surface;
mod templates;

use libtest_mimic::{Arguments, Trial};

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    let all = [
        surface::tests(),
        generation::tests(),
        chat::tests(),
        bad_files::tests(),
        bad_plugins::tests(),
        linked_in::tests(),
        limits::tests(),
        misbehaving::tests(),
        overrides::tests(),
        processor::tests(),
        diverge::tests(),
        convert::tests(),
        prepare::tests(),
        interrupt::tests(),
        templates::tests(),
    ];
    let trials: Vec<Trial> = all
        .into_iter()
        .flatten()
        .map(|(name, test)| {
            Trial::test(name, move || {
                test();
                Ok(())
            })
        })
        .chain(
            chat::tests_with_models()
                .into_iter()
                .chain(templates::tests_with_models())
                .chain(answers::tests_with_models())
                .map(|(name, model, test)| {
                    let path = program::shared_model(model);
                    let kind = if path.is_none() {
                        format!("needs ../shared/models/{model}")
                    } else {
                        String::new()
                    };
                    let ignored = path.is_none();
                    let run = move || {
                        test(&path.unwrap_or_default());
                        Ok(())
                    };
                    Trial::test(name, run).with_ignored_flag(ignored).with_kind(kind)
                }),
        )
        .chain(
            processor::tests_where_allowed()
                .into_iter()
                .chain(convert::tests_with_python())
                .chain(misbehaving::tests_with_fixtures())
                .chain(interrupt::tests_with_terminal())
                .chain(answers::tests_with_python())
                .map(|(name, lacking, test)| {
                    let run = move || {
                        test();
                        Ok(())
                    };
                    let ignored = lacking.is_some();
                    Trial::test(name, run).with_ignored_flag(ignored).with_kind(lacking.unwrap_or_default())
                }),
        )
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A test that needs a model which is not part of the sources: its name, the model's file, the test.
type ModelTest = (&'static str, &'static str, fn(&str));

/// A test that needs something of the system: its name, what is lacking, the test.
type SystemTest = (&'static str, Option<String>, fn());

/// A test by its name.
type Test = (&'static str, fn());
