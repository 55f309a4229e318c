//! Chat templates: Jinja as model makers write it, rendered as they expect.
//!
//! The environment is that of Hugging Face's `apply_chat_template`: blocks are trimmed, `raise_exception`,
//! `strftime_now` and Python's `tojson` exist, Python's methods work on strings and dictionaries, and the `generation`
//! block (which only marks text for training) is transparent.

mod python;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, json};
use std::fmt;

/// Instructions that one rendering may take: a template is a stranger's program. What it joins, repeats and writes costs
/// fuel, too, one for every 64 bytes, so that no few instructions fill the memory.
const FUEL: u64 = 2_000_000;

/// Stack that one rendering may take (it is memory only where it is used): as many lists in lists as the fuel pays for are
/// dropped one in another.
const STACK: usize = 512 << 20;

/// Why a template or a message was refused.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum TemplateError {
    /// The template cannot be parsed, or uses what is not there.
    Template {
        /// With line where it is known.
        detail: String,
    },
    /// The template refused the conversation through `raise_exception`.
    Refused {
        /// Its own words.
        message: String,
    },
    /// A message has a form that cannot be rendered.
    Message {
        /// What, and what is wanted.
        detail: String,
    },
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateError::Template { detail } => write!(f, "chat template: {detail}"),
            TemplateError::Refused { message } => {
                write!(f, "the model's chat template refuses this conversation: {message}")
            }
            TemplateError::Message { detail } => write!(f, "message: {detail}"),
        }
    }
}

impl std::error::Error for TemplateError {}

/// One message of a conversation, its content always text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message(Map<String, serde_json::Value>);

impl Message {
    /// A message of this role.
    pub(crate) fn new(role: &str, content: impl Into<String>) -> Message {
        let mut map = Map::new();
        map.insert("role".into(), role.into());
        map.insert("content".into(), content.into().into());
        Message(map)
    }

    /// A message as chat APIs have it: content is text, a list of text parts (joined), null or missing (empty). Other
    /// keys, such as `tool_calls`, are kept for the template.
    ///
    /// # Errors
    /// [`TemplateError::Message`] where there is no role, or a part is not text.
    pub(crate) fn from_json(value: &serde_json::Value) -> Result<Message, TemplateError> {
        let fail = |detail: String| Err(TemplateError::Message { detail });
        let Some(map) = value.as_object() else {
            return fail(format!("{value} is no object with `role` and `content`"));
        };
        if !map.get("role").is_some_and(serde_json::Value::is_string) {
            return fail(format!("{value} has no `role`"));
        }
        let content = match map.get("content") {
            None | Some(serde_json::Value::Null) => String::new(),
            Some(serde_json::Value::String(text)) => text.clone(),
            Some(serde_json::Value::Array(parts)) => {
                let mut text = String::new();
                for part in parts {
                    match (
                        part.get("type").and_then(|t| t.as_str()),
                        part.get("text").and_then(|t| t.as_str()),
                    ) {
                        (Some("text"), Some(piece)) => text.push_str(piece),
                        (kind, _) => {
                            let kind = kind.unwrap_or("without a type");
                            return fail(format!(
                                "a part of type `{kind}` in `content`; only `text` parts are taken"
                            ));
                        }
                    }
                }
                text
            }
            Some(other) => return fail(format!("`content` is {other}; wanted text or a list of text parts")),
        };
        let mut map = map.clone();
        map.insert("content".into(), content.into());
        Ok(Message(map))
    }

    /// Who speaks.
    pub(crate) fn role(&self) -> &str {
        self.0.get("role").and_then(|role| role.as_str()).unwrap_or_default()
    }
}

/// What a template renders: messages, and what may stand beside them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    /// In order.
    pub(crate) messages: Vec<Message>,
    /// Functions that the model may call, as JSON schemas; nothing where none were named.
    tools: Option<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    variables: Map<String, serde_json::Value>,
}

impl Conversation {
    /// Of messages alone.
    pub(crate) fn new(messages: Vec<Message>) -> Conversation {
        Conversation { messages, ..Conversation::default() }
    }

    /// A list of messages, or an object as chat APIs take it: `messages`, and if wanted `tools` (a list of functions) and
    /// `chat_template_kwargs` (further variables of the template).
    ///
    /// # Errors
    /// [`TemplateError::Message`] where it has another form.
    pub(crate) fn from_json(value: &serde_json::Value) -> Result<Conversation, TemplateError> {
        let fail = |detail: &str| TemplateError::Message { detail: detail.to_owned() };
        let list = value.as_array().or_else(|| value.get("messages")?.as_array());
        let list = list.ok_or_else(|| fail("there is no list of messages, and no object with `messages`"))?;
        let messages = list.iter().map(Message::from_json).collect::<Result<_, _>>()?;
        let tools = value.get("tools").filter(|tools| !tools.is_null());
        if tools.is_some_and(|tools| !tools.is_array()) {
            return Err(fail("`tools` is no list of functions"));
        }
        let variables = match value.get("chat_template_kwargs") {
            None | Some(serde_json::Value::Null) => Map::new(),
            Some(serde_json::Value::Object(map)) => map.clone(),
            Some(_) => return Err(fail("`chat_template_kwargs` is no object")),
        };
        Ok(Conversation { messages, tools: tools.cloned(), variables })
    }
}

/// A template that was parsed and tried.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses a template and renders trial conversations, so that whatever it uses and this program lacks is found
    /// now. `bos` and `eos` are the texts of the model's tokens, empty where it has none.
    ///
    /// # Errors
    /// [`TemplateError::Template`] with line and feature.
    pub(crate) fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(template_error)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::print);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", python::strftime_now);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", python::string);
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(template_error)?;
        let template = ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned() };
        let (user, assistant) = (Message::new("user", "Hello"), Message::new("assistant", "Hello"));
        for trial in [
            vec![user.clone()],
            vec![Message::new("system", "Be brief."), user.clone()],
            vec![user.clone(), assistant, user.clone()],
        ] {
            match template.render(&Conversation::new(trial), true) {
                Ok(_) | Err(TemplateError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // With functions a template may want more than this trial has, but what is not there is not there.
        let tried = template.try_render(&with_function(user), true).map_err(lacking);
        match tried {
            Err(Some(error)) => Err(template_error(error)),
            Ok(_) | Err(None) => Ok(template),
        }
    }

    /// The prompt for a conversation; with `answer`, up to where the model's answer begins.
    ///
    /// # Errors
    /// [`TemplateError`].
    pub(crate) fn render(&self, conversation: &Conversation, answer: bool) -> Result<String, TemplateError> {
        self.try_render(conversation, answer).map_err(template_error)
    }

    fn try_render(&self, conversation: &Conversation, answer: bool) -> Result<String, Error> {
        let mut context = Map::new();
        // In this order: no variable hides what the template is rendered for.
        context.extend(conversation.variables.clone());
        let messages = conversation.messages.iter().map(|message| message.0.clone().into());
        for (name, value) in [
            ("messages", serde_json::Value::Array(messages.collect())),
            ("tools", conversation.tools.clone().unwrap_or_default()),
            ("documents", serde_json::Value::Null),
            ("add_generation_prompt", answer.into()),
            ("bos_token", self.bos.as_str().into()),
            ("eos_token", self.eos.as_str().into()),
        ] {
            context.insert(name.into(), value);
        }
        let template = self.environment.get_template(NAME)?;
        let render = || template.render(Value::from(Serde(&context)));
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, render);
            let thread = thread.map_err(|error| {
                Error::new(ErrorKind::InvalidOperation, format!("no thread to render in: {error}"))
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// A conversation in which a function is called.
fn with_function(user: Message) -> Conversation {
    let function = json!({"name": "f", "description": "Hello", "parameters": {"type": "object",
        "properties": {"a": {"type": "string", "description": "Hello"}}, "required": ["a"]}});
    let call =
        json!({"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}});
    let mut assistant = Message::new("assistant", "");
    assistant.0.insert("tool_calls".into(), json!([call]));
    let mut result = Message::new("tool", "Hello");
    result.0.insert("tool_call_id".into(), json!("abcdefghi"));
    Conversation {
        messages: vec![user, assistant, result],
        tools: Some(json!([{"type": "function", "function": function}])),
        ..Conversation::default()
    }
}

/// The error, where it says that something of the language is not there.
fn lacking(error: Error) -> Option<Error> {
    use ErrorKind::{UnknownFilter, UnknownFunction, UnknownMethod, UnknownTest};
    let kind = error.kind();
    matches!(kind, UnknownFilter | UnknownFunction | UnknownMethod | UnknownTest).then_some(error)
}

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn template_error(error: Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(here) = cause {
        if let Some(Raised(message)) = here.downcast_ref() {
            return TemplateError::Refused { message: message.clone() };
        }
        cause = here.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        let line = error.line().unwrap_or(0);
        let detail = format!(
            "line {line}: it ran out of fuel: it takes more than {FUEL} instructions, or makes more than {} MiB of text",
            (FUEL * 64) >> 20
        );
        return TemplateError::Template { detail };
    }
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let detail = error.detail().map_or(String::new(), |detail| format!(": {detail}"));
    TemplateError::Template { detail: format!("{line}{}{detail}", error.kind()) }
}

/// Turns `generation` blocks, which say what is trained on, into blocks that are always taken; white space control
/// stays as written.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        result.push_str(before);
        // Behind the opening: `{%}` opens a tag and does not close it.
        let Some(end) = tag[2..].find("%}").map(|at| at + 2) else {
            rest = tag;
            break;
        };
        let (inside, after) = (&tag[2..end], &tag[end + 2..]);
        match inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => {
                result.push_str(&format!("{{%{}%}}", inside.replacen("generation", "if true", 1)))
            }
            "endgeneration" => {
                result.push_str(&format!("{{%{}%}}", inside.replacen("endgeneration", "endif", 1)))
            }
            _ => result.push_str(&tag[..end + 2]),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> String {
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        template.render(&Conversation::new(vec![Message::new("user", " Hi <b> ")]), true).unwrap()
    }

    const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}\
        {{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    #[test]
    fn chatml() {
        assert_eq!(
            render(CHATML),
            "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\n Hi <b> <|im_end|>\n<|im_start|>assistant\n"
        );
    }

    /// Text, parts, null and missing content give the same prompt; an image is refused (facts: trap 18).
    #[test]
    fn trap_18_forms_of_content() {
        let template = ChatTemplate::new(CHATML, "", "").unwrap();
        let prompt = |value| {
            let conversation = Conversation::from_json(&json!([value])).unwrap();
            template.render(&conversation, true).unwrap()
        };
        let text = prompt(json!({"role": "user", "content": "ab"}));
        assert_eq!(
            text,
            prompt(
                json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
            )
        );
        let empty = prompt(json!({"role": "assistant", "content": ""}));
        assert_eq!(empty, prompt(json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]})));
        assert_eq!(empty, prompt(json!({"role": "assistant"})));
        for (wrong, wanted) in [
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "`image_url`"),
            (json!({"role": "user", "content": 3}), "`content` is 3"),
            (json!({"content": "x"}), "no `role`"),
            (json!("x"), "no object"),
        ] {
            let message = Message::from_json(&wrong).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
    }

    /// What templates use beyond plain Jinja (facts: trap 19).
    #[test]
    fn trap_19_what_templates_use() {
        for (source, wanted) in [
            (
                "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
                " Hi <b> ",
            ),
            (
                "{%- for m in messages -%}\n  {%- generation -%}  {{ m.content.strip() }}  {%- endgeneration -%}\n{%- endfor -%}",
                "Hi <b>",
            ),
            ("{{ messages | tojson }}", r#"[{"role": "user", "content": " Hi <b> "}]"#),
            (
                "{{ {'ä': [1, true, none]} | tojson(indent=2) }}",
                "{\n  \"ä\": [\n    1,\n    true,\n    null\n  ]\n}",
            ),
            ("{{ ['ä'] | tojson(ensure_ascii=true) }}", r#"["\u00e4"]"#),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
            ("{% for k, v in messages[0].items() %}{{ k }},{% endfor %}", "role,content,"),
            ("{% for k, v in messages[0] | items %}{{ k }},{% endfor %}", "role,content,"),
            (
                "{{ 'a-b'.split('-')[-1] }}{{ 'abc'.startswith('a') }}{{ messages[::-1][0].role }}",
                "bTrueuser",
            ),
            ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
            (
                "{{ bos_token }}{% if tools %}t{% endif %}{% if missing is defined %}d{% endif %}{{ eos_token }}",
                "<s></s>",
            ),
            (
                "{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{{ loop.index0 }}{% endfor %}",
                "10",
            ),
            ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('y') }}", "<y>"),
        ] {
            assert_eq!(render(source), wanted, "{source}");
        }
        let year = render("{{ strftime_now('%Y') }}");
        assert!(year.len() == 4 && year.parse::<u32>().is_ok(), "{year}");
        for format in ["%d %b %Y", "%Y-%m-%d", "%H:%M:%S", "%A, %-d %B"] {
            assert!(!render(&format!("{{{{ strftime_now('{format}') }}}}")).contains('%'));
        }
    }

    /// A list of two lists of two lists, forty times.
    const BOMB: &str =
        "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}";

    /// A list in a list, as often as a loop goes round.
    const DEEP: &str =
        "{% set n = namespace(x=1) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}";

    #[test]
    fn trap_19_what_is_missing_is_said_at_load() {
        for (source, wanted) in [
            ("a\n{{ messages | no_such_filter }}", "line 2"),
            ("a\n{{ no_such_function() }}", "line 2"),
            ("{% nosuchtag %}", "nosuchtag"),
            ("{%}{{ 1 }}", "line 1"), // found by fuzzing
            ("{% generation %", "line 1"),
            ("{{ '{:>99999999999}'.format('a') }}", "a field of width 99999999999"),
            (BOMB, "too many parts"),
            (DEEP, "too many parts"),
            ("{{ '%99999999999d' | format(1) }}", "fuel"),
            ("{{ 'aaaa' * 99999999999 }}", "fuel"),
            ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
            (
                "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
                "fuel",
            ),
            ("{% for m in messages %}", "line 1"),
            ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "fuel"),
            ("{{ strftime_now('%!') }}", "strftime_now"),
            ("{% if tools %}\n{{ tools | no_such_filter }}{% endif %}", "line 2"),
            (
                "{% for m in messages %}{% if m.tool_calls %}{{ m.role.no_such() }}{% endif %}{% endfor %}",
                "no_such",
            ),
        ] {
            let message = ChatTemplate::new(source, "", "").map(|_| ()).unwrap_err().to_string();
            assert!(
                message.starts_with("chat template: ") && message.contains(wanted),
                "{source}: {message}"
            );
        }
    }

    #[test]
    fn conversations_as_chat_apis_have_them() {
        let source = "{{ tools | tojson if tools }}{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let render = |value: serde_json::Value| {
            let conversation = Conversation::from_json(&value).map_err(|error| error.to_string())?;
            Ok::<_, String>(template.render(&conversation, true).unwrap())
        };
        let list = json!([{"role": "user", "content": "a"}]);
        assert_eq!(render(list.clone()).unwrap(), "a");
        let whole =
            json!({"messages": list, "tools": [1], "chat_template_kwargs": {"x": true, "messages": []}});
        assert_eq!(render(whole).unwrap(), "[1]Truea", "variables do not hide the messages");
        assert_eq!(render(json!({"messages": list, "tools": null})).unwrap(), "a");
        for (wrong, wanted) in [
            (json!("a"), "no list of messages"),
            (json!({"messages": "a"}), "no list of messages"),
            (json!({"messages": [], "tools": {}}), "`tools`"),
            (json!({"messages": [], "chat_template_kwargs": []}), "`chat_template_kwargs`"),
            (json!({"messages": [{}]}), "no `role`"),
        ] {
            let message = render(wrong).unwrap_err();
            assert!(message.contains(wanted), "{message}");
        }
    }

    /// The line and the reason of what fails in the middle of a conversation.
    #[test]
    fn a_rendering_that_fails_says_where() {
        let source =
            "{% for m in messages %}\n{% if m.role == 'x' %}\n{{ m.a.b.c }}{% endif %}\n{% endfor %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let error = template.render(&Conversation::new(vec![Message::new("x", "")]), true).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("chat template: line 3: undefined value"), "{text}");
    }

    #[test]
    fn the_template_may_refuse() {
        let source =
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let error = template.render(&Conversation::new(vec![Message::new("system", "x")]), true).unwrap_err();
        assert!(
            matches!(&error, TemplateError::Refused { message } if message == "no system role"),
            "{error}"
        );
    }
}
