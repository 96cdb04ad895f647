# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a chat template does nothing but put fields of messages together.

Such a template needs no separate process, not even a stranger's: its work and its text grow with
the prompt, by less than its own short length. Owns the list of what it may use; anything else is
for `template_process`. It assigns nothing, calls nothing, formats nothing and has no loop in a
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, nodes

from penstock.gateway.tokenizer_files import SPECIAL_TOKENS

MAX_CHARS = 1024
MAX_TOKEN_CHARS = 256
"""Of all special tokens."""
MAX_PROMPT_BYTES = 64 << 10
"""Longer ones are rendered in the process: here the program waits."""
_MESSAGES = "messages"
_LOOP = frozenset({"first", "last", "index", "index0"})
_NAMES = frozenset({"add_generation_prompt", *SPECIAL_TOKENS})
Render = Callable[..., str]


def plain_template(source: str, special_tokens: Mapping[str, str]) -> Render | None:
    """Renders the template here; None if it is not plain. It may repeat special tokens for every
    message."""
    if len(source) > MAX_CHARS or sum(map(len, special_tokens.values())) > MAX_TOKEN_CHARS:
        return None
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        if not all(map(_is_plain, environment.parse(source).body)):
            return None
        template = environment.from_string(source)
    except Exception:  # whatever a template can make jinja2 raise: its process says what
        return None

    def render(**values: Any) -> str:
        try:
            return template.render(values)
        except TemplateError:
            raise
        except Exception as error:  # such as a message without text
            raise TemplateError(str(error) or type(error).__name__) from None

    return render


def _is_plain(node: nodes.Node, item: str = "") -> bool:
    """A statement. `item`: the name of a message, in the loop over all."""
    match node:
        case nodes.Output():
            return all(
                isinstance(part, nodes.TemplateData) or _is_text(part, item) for part in node.nodes
            )
        case nodes.If():
            parts = (*node.body, *node.elif_, *node.else_)
            return _is_condition(node.test, item) and all(_is_plain(part, item) for part in parts)
        case nodes.For(target=nodes.Name(name=name), iter=nodes.Name(name="messages"), test=None):
            is_simple = not (item or node.recursive or node.else_) and name not in _NAMES
            return (
                is_simple
                and name not in (_MESSAGES, "loop")
                and all(_is_plain(part, name) for part in node.body)
            )
        case _:
            return False


def _is_text(node: nodes.Node, item: str) -> bool:
    match node:
        case nodes.Const(value=str()):
            return True
        case nodes.Name(name=name):
            return name in _NAMES
        case nodes.Add(left=left, right=right):
            return _is_text(left, item) and _is_text(right, item)
        case nodes.Concat():
            return all(_is_text(part, item) for part in node.nodes)
        case nodes.Filter(name="trim", node=nodes.Node() as text, args=[], kwargs=[]):
            return _is_text(text, item)
        case _:
            return _is_field(node, item)


def _is_condition(node: nodes.Node, item: str) -> bool:
    match node:
        case nodes.Not(node=inner):
            return _is_condition(inner, item)
        case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
            return _is_condition(left, item) and _is_condition(right, item)
        case nodes.Compare(expr=left, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const())]):
            return _is_field(left, item) or _is_field_of_one(left)
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
            return bool(item) and attr in _LOOP
        case nodes.Name(name=name):
            return name in _NAMES
        case _:
            return _is_field(node, item)


def _is_field(node: nodes.Node, item: str) -> bool:
    """Of the loop's message."""
    match node:
        case nodes.Getattr(node=nodes.Name(name=name), attr=field):
            return name == item != "" and not hasattr(dict, field)
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str() as field)):
            return name == item != "" and not hasattr(dict, field)
        case _:
            return False


def _is_field_of_one(node: nodes.Node) -> bool:
    """Of a message that the template counts out, such as the first."""
    match node:
        case nodes.Getitem(
            node=nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=int())),
            arg=nodes.Const(value=str() as field),
        ):
            return not hasattr(dict, field)
        case _:
            return False
