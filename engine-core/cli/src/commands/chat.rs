//! `chat`: turns of a conversation, through the model's chat template.

use super::run;
use crate::args::{ChatArgs, Global};
use crate::failure::WithHint;
use crate::interrupt::Interrupt;
use crate::model::Running;
use crate::settings::Settings;
use crate::template::{ChatTemplate, Conversation, Message};
use crate::{output, prompt};
use anyhow::{Context, Result, anyhow};
use engine_runtime::{FinishReason, GenerateOptions, Generation, Session};
use formats::Tokenizer;
use std::io::{BufRead, IsTerminal};
use std::process::ExitCode;

pub(super) fn chat(global: &Global, args: &ChatArgs) -> Result<ExitCode> {
    let settings = Settings::resolve(global, &args.engine, &args.size, Some(&args.sampling))?;
    let interrupt = Interrupt::install()?;
    let running = Running::load(&args.model, &settings)?;
    let template = template(&running, args)?;
    let mut chat = Chat {
        session: running.engine.session()?,
        options: run::generate_options(&settings, args.max_tokens, true),
        start: start(args)?,
        conversation: Conversation::default(),
        json: args.json,
        running: &running,
        template,
        interrupt,
    };
    chat.reset();
    if let Some(text) = &args.prompt {
        return Ok(run::exit_code(&chat.turn(Some(text))?));
    }
    if args.messages.is_some()
        && chat.conversation.messages.last().is_some_and(|message| message.role() == "user")
    {
        return Ok(run::exit_code(&chat.turn(None)?));
    }
    chat.converse()
}

/// The template of `--template`, else the model's own.
fn template(running: &Running, args: &ChatArgs) -> Result<ChatTemplate> {
    let tokenizer = running.tokenizer()?;
    let source = match (&args.template, tokenizer.chat_template()) {
        (Some(path), _) => prompt::read_text(path)?,
        (None, Some(text)) => text.to_owned(),
        (None, None) => {
            return Err(anyhow!("{} has no chat template", args.model.model.display()))
                .hint("give one with --template FILE, or continue plain text with `thermocline run`");
        }
    };
    let text = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let special = tokenizer.special_ids();
    ChatTemplate::new(&source, &text(special.bos), &text(special.eos))
        .hint("--template FILE replaces the model's own template")
}

/// What a conversation starts with.
fn start(args: &ChatArgs) -> Result<Conversation> {
    let mut start = Conversation::default();
    if let Some(path) = &args.messages {
        let at = || format!("messages of {}", path.display());
        let value: serde_json::Value = serde_json::from_str(&prompt::read_text(path)?).with_context(at)?;
        start = Conversation::from_json(&value).with_context(at)?;
    }
    let system = args.system.iter().map(|text| Message::new("system", text));
    start.messages.splice(..0, system);
    Ok(start)
}

/// Ids of a rendered prompt with exactly one BOS in front where the model or the template wants one.
fn prompt_ids(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let mut ids = tokenizer.encode(text, false, true)?;
    let Some(bos) = tokenizer.special_ids().bos else { return Ok(ids) };
    let written = ids.iter().take_while(|id| **id == bos).count();
    let wanted = usize::from(written > 0 || tokenizer.adds_bos());
    ids.splice(..written, std::iter::repeat_n(bos, wanted));
    Ok(ids)
}

/// A conversation under way.
struct Chat<'a> {
    running: &'a Running,
    template: ChatTemplate,
    session: Session,
    options: GenerateOptions,
    start: Conversation,
    conversation: Conversation,
    json: bool,
    interrupt: Interrupt,
}

impl Chat<'_> {
    /// Back to how the conversation started.
    fn reset(&mut self) {
        self.conversation = self.start.clone();
    }

    /// One turn: what is said (if anything more is), and the model's answer. What the KV cache holds already of the
    /// conversation is not computed again. A turn that fails leaves the conversation as it was.
    fn turn(&mut self, said: Option<&str>) -> Result<Generation> {
        let before = self.conversation.messages.len();
        self.conversation.messages.extend(said.map(|text| Message::new("user", text)));
        let answered = self.answer();
        match &answered {
            Ok(generation) => self.conversation.messages.push(Message::new("assistant", &generation.text)),
            Err(_) => self.conversation.messages.truncate(before),
        }
        answered
    }

    fn answer(&mut self) -> Result<Generation> {
        let text = self.template.render(&self.conversation, true)?;
        tracing::debug!("prompt: {text:?}");
        let ids = prompt_ids(self.running.tokenizer()?, &text)?;
        let kept = self.session.reuse_prefix(&ids);
        tracing::debug!("{kept} of {} tokens are in the KV cache already", ids.len());
        let (session, rest) = (&mut self.session, &ids[kept..]);
        let mut generation =
            run::stream(self.running, session, rest, &self.options, &self.interrupt, !self.json)
                .hint("where the context is full, /reset starts over; --context makes it longer")?;
        generation.prompt_ids = ids;
        if self.json {
            output::json_line(&run::report(self.running, &generation))?;
        } else {
            output::line("")?;
        }
        if generation.finish_reason == FinishReason::Length {
            let why = run::cut(self.running, &generation, self.options.max_tokens);
            tracing::warn!("the answer was cut: {why}");
        }
        run::summarise(self.running, &generation, self.options.max_tokens);
        Ok(generation)
    }

    /// Lines of standard input, until they end.
    fn converse(&mut self) -> Result<ExitCode> {
        let interactive = std::io::stdin().is_terminal();
        if interactive {
            output::note("/exit ends, /reset starts over, a backslash at the end of a line continues it.\n");
        }
        let mut said = String::new();
        loop {
            if interactive {
                output::note(if said.is_empty() { "> " } else { ". " });
            }
            let mut bytes = Vec::new();
            let read = std::io::stdin().lock().read_until(b'\n', &mut bytes);
            if read.context("cannot read standard input")? == 0 {
                if !said.trim().is_empty() {
                    self.say(&said, interactive)?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            let line = String::from_utf8_lossy(&bytes);
            if matches!(line, std::borrow::Cow::Owned(_)) {
                tracing::warn!("the line is not valid UTF-8; U+FFFD stands for what is not");
            }
            let line = line.trim_end_matches(['\n', '\r']);
            if let Some(part) = line.strip_suffix('\\') {
                said.push_str(part);
                said.push('\n');
                continue;
            }
            said.push_str(line);
            match std::mem::take(&mut said).trim() {
                "" => {}
                "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
                "/reset" => {
                    self.reset();
                    tracing::info!("the conversation starts over");
                }
                command if command.starts_with('/') && interactive => {
                    output::note(&format!("there is no {command}; there are /exit and /reset\n"));
                }
                text => self.say(text, interactive)?,
            }
        }
    }

    /// A turn; at a terminal its failure does not end the conversation.
    fn say(&mut self, text: &str, interactive: bool) -> Result<()> {
        match self.turn(Some(text)) {
            Ok(_) => Ok(()),
            Err(error) if interactive && !crate::failure::is_output_closed(&error) => {
                if let (Some(message), _) = crate::failure::describe(&error) {
                    output::note(&format!("{message}\n"));
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
