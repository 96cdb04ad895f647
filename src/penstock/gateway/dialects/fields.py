# SPDX-License-Identifier: Apache-2.0
"""Request fields shared by several dialects: sampling, tools, output formats, thinking, and
unsupported fields that are rejected because ignoring them would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from penstock.errors import BadRequest
from penstock.gateway.dialects.limits import check_name, check_tools, checked_schema
from penstock.types import JsonObject
from penstock.wire.codec import encode_json

T = TypeVar("T")
ANY_OBJECT = '{"type":"object"}'

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's API and its common extensions that would change the answer and are not
implemented. The listed values, and null, have no effect and are accepted."""


def convert(fields: JsonObject, kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"request body is not a valid {kind.__name__}: {error}") from None


def reject_unsupported(
    fields: JsonObject, unsupported: Mapping[str, tuple[object, ...]] = UNSUPPORTED
) -> None:
    """Raise BadRequest for fields that would change the answer but are not supported."""
    named = [
        name
        for name in unsupported.keys() & fields.keys()
        if fields[name] is not None and fields[name] not in unsupported[name]
    ]
    if named:
        raise BadRequest(
            f"not supported by this gateway: {', '.join(sorted(named))}; remove from the request"
        )


def get_object(fields: JsonObject | None, name: str) -> JsonObject:
    """An object member; empty if missing or of another type."""
    value = (fields or {}).get(name)
    return cast(JsonObject, value) if isinstance(value, dict) else {}


# --- content ------------------------------------------------------------------------------------


def join_text(content: object, where: str, kinds: Sequence[str], separator: str = "") -> str:
    """Content as one string; text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast(list[Any], content) if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        fields: JsonObject = cast(JsonObject, part) if isinstance(part, dict) else {}
        text = fields.get("text")
        if not isinstance(text, str) or fields.get("type", kinds[0]) not in kinds:
            raise BadRequest(f"{where}: only text parts are supported")
        texts.append(text)
    return separator.join(texts)


def tool_call(id: object, name: object, arguments: object, where: str) -> JsonObject:
    """A past tool call in OpenAI's chat format."""
    check_name(name, f"{where}.name")
    text = arguments if isinstance(arguments, str) else encode_json(arguments or {}).decode()
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


# --- tools, formats, thinking -------------------------------------------------------------------


def read_tools(tools: Sequence[JsonObject] | None) -> Sequence[JsonObject]:
    """Check function tools; provider tools (search, files, computer use) are not supported."""
    for at, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise BadRequest(f'tools[{at}]: only tools of type "function" are supported')
        check_name(cast(JsonObject, function).get("name"), f"tools[{at}].function.name")
    check_tools(tools or ())
    return tools or ()


def select_tools(
    tools: Sequence[JsonObject], choice: object, *, is_parallel: bool | None = None
) -> Sequence[JsonObject]:
    """The tools shown to the model."""
    if choice not in (None, "auto", "none"):
        raise BadRequest('tool_choice: only "auto" and "none" are supported by this gateway')
    if tools and choice != "none" and is_parallel is False:
        raise BadRequest("parallel tool calls cannot be disabled on this gateway; omit the field")
    return () if choice == "none" else tools


def read_response_format(format: JsonObject | None) -> str | None:
    """`response_format` of Chat and Completions."""
    return read_format(format, get_object(format, "json_schema").get("schema"), "response_format")


def read_format(format: JsonObject | None, schema: object, where: str) -> str | None:
    """The JSON schema required by an output format; None for text."""
    kind = "text" if format is None else format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema":
        return checked_schema(schema, f"{where}.schema")
    raise BadRequest(f"{where}.type {kind!r} must be text, json_object or json_schema")


def read_thinking(template_fields: JsonObject | None, effort: str | None) -> bool | None:
    """Thinking on, off, or None for the default; effort levels are not supported."""
    if effort not in (None, "none"):
        raise BadRequest(
            f'reasoning effort {effort!r}: only "none" is supported by this gateway; to switch '
            'thinking on, send "chat_template_kwargs": {"enable_thinking": true}'
        )
    fields = template_fields or {}
    enabled = fields.get("enable_thinking")
    unknown = fields.keys() - {"enable_thinking"}
    if unknown or not isinstance(enabled, bool | None):
        raise BadRequest("chat_template_kwargs accepts only a boolean enable_thinking")
    return False if effort == "none" and enabled is None else enabled
