"""Makes expected.json: what transformers renders of conversations.json by the templates here and those of real models.

    pip install transformers jinja2 gguf && python make_expected.py MODELS > expected.json

MODELS is a folder with SmolLM2, Qwen2.5-Coder and Gemma 3 as GGUF files (see models/README.md); their templates are read
from the files, here and in the test, and are not kept. The five templates here were written for this test.
"""

import json
import os
import sys

import gguf
import jinja2
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = os.path.dirname(os.path.abspath(__file__))
REAL = ["SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "gemma-3-270m-q4_k_m.gguf"]
OWN = ["llama3-style", "mistral-style", "gemma-style", "chatml-tools", "language"]


def template_of(path):
    field = gguf.GGUFReader(path).get_field("tokenizer.chat_template")
    return field.contents() if field else None


def render(template, conversation):
    try:
        texts, _ = render_jinja_template(
            conversations=[conversation["messages"]], tools=conversation.get("tools"), chat_template=template,
            add_generation_prompt=conversation["add_generation_prompt"], bos_token="<s>", eos_token="</s>",
            **conversation.get("variables", {}))
        return {"text": texts[0]}
    except jinja2.exceptions.UndefinedError:
        return {"fails": True}
    except jinja2.exceptions.TemplateError as error:
        return {"refused": str(error)}
    except (TypeError, KeyError, AttributeError):
        return {"fails": True}


def main():
    conversations = json.load(open(os.path.join(HERE, "conversations.json")))
    templates = {name: open(os.path.join(HERE, name + ".jinja")).read() for name in OWN}
    for file in REAL:
        template = template_of(os.path.join(sys.argv[1], file))
        if template:
            templates[file] = template
    origin = f"make_expected.py with transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    rendered = {name: [render(template, c) for c in conversations] for name, template in templates.items()}
    json.dump({"origin": origin, "rendered": rendered}, sys.stdout, ensure_ascii=False, indent=1)
    print()


main()
