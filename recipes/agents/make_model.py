# SPDX-License-Identifier: Apache-2.0
"""A tiny random model that can call a tool: `python make_model.py FOLDER`.

It is `builtin:tiny-qwen3` with a chat template that shows tools. Two of its tokens, reserved until
now, are whole calls of `backwards`, so that even a model that writes at random calls it often.
"""

import json
import sys
from pathlib import Path

from penstock import init_model

CALLS = (
    '<tool_call>{"name": "backwards", "arguments": {"text": "abc"}}</tool_call>',
    '<tool_call>{"name": "backwards", "arguments": {"text": "hij"}}</tool_call>',
)
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }}: <tool_call>{% endfor %}
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string }}
{{- call.function.arguments | tojson if call.function.arguments is mapping }}
{{- '}</tool_call>' }}
{%- endfor %}{{ eos_token }}{% endfor %}"""


def make_model(folder: Path) -> Path:
    init_model("builtin:tiny-qwen3", folder, seed=0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for at, call in enumerate(CALLS):
        vocab[call] = vocab.pop(f"<reserved_{at}>")
    known = vocab.keys()
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] in known]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
