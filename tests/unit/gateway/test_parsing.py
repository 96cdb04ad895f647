# SPDX-License-Identifier: Apache-2.0
"""Reasoning, text and tool calls, of complete and of streamed answers."""

from __future__ import annotations

import random

import pytest
from tests.unit.gateway.bpe import END, PAD, id_of, renderer, split_anyhow

from penstock.gateway.generation import TokenChunk
from penstock.gateway.model_calls import Delta
from penstock.gateway.parsing import (
    AnswerFormat,
    ParsedAnswer,
    ToolFormat,
    cut_at_stop,
    parse_answer,
    tool_format,
)
from penstock.gateway.stream_decoder import StreamDecoder
from penstock.types import PolicyName, Version

VERSION = Version(policy=PolicyName("policy"), incarnation=1, number=0)
HERMES = AnswerFormat(has_thinking=True, tools=ToolFormat.HERMES)
LLAMA = AnswerFormat(tools=ToolFormat.LLAMA)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'


def parts(text: str, answer_format: AnswerFormat) -> ParsedAnswer:
    return parse_answer(text, answer_format, str)


def calls(text: str, answer_format: AnswerFormat) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parts(text, answer_format).tool_calls]


def test_reasoning_is_split_off_where_the_template_knows_it() -> None:
    text = "<think>\nhm\n</think>\n\nyes "
    assert parts(text, HERMES) == ParsedAnswer(text="yes ", reasoning="hm")
    assert parts(text, AnswerFormat()) == ParsedAnswer(text=text)
    opened = AnswerFormat(has_thinking=True, is_thinking=True)
    assert parts("hm</think>yes", opened) == ParsedAnswer(text="yes", reasoning="hm")
    assert parts("hm, cut by leng", opened) == ParsedAnswer(text="", reasoning="hm, cut by leng")
    assert parts("so <think>no</think>", HERMES).reasoning == ""


def test_hermes_calls_keep_their_arguments_as_written() -> None:
    text = f"<think>x</think>I look.\n{CALL}\n{CALL}"
    found = parts(text, HERMES)
    assert (found.text, found.reasoning) == ("I look.", "x")
    assert calls(text, HERMES) == [("f", '{"a":  1}')] * 2
    assert [call.id for call in found.tool_calls] == ["0", "1"]
    assert parts(text, AnswerFormat(has_thinking=True)).tool_calls == (), "no tools were offered"


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{'name': 1}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + '{"name":' * 5_000 + "</tool_call>",
    ],
)
def test_invalid_calls_stay_text(block: str) -> None:
    assert parts(f"a {block} ", HERMES) == ParsedAnswer(text=f"a {block} ")
    assert calls(f"a {block}{CALL}", HERMES) == [("f", '{"a":  1}')]
    assert parts(block, LLAMA).tool_calls == ()


def test_llama_calls_are_the_complete_answer() -> None:
    one = '{"name": "f", "parameters": {"a": 1}}'
    assert calls(one, LLAMA) == [("f", '{"a": 1}')]
    assert calls(f" {one}; {one}\n", LLAMA) == [("f", '{"a": 1}')] * 2
    for text in (f"so {one}", f"{one} so", '{"a": 1}', "[" * 100_000):
        assert parts(text, LLAMA) == ParsedAnswer(text=text)


def test_the_form_of_tool_calls_is_read_from_the_template() -> None:
    assert tool_format("… <tool_call> …") is ToolFormat.HERMES
    assert tool_format('… {"name": …, "parameters": …} …') is ToolFormat.LLAMA
    assert tool_format("<tool_call><function=f>") is None
    assert tool_format("{{ messages }}") is None


ANSWERS = (
    "plain größe 🌧️ text \n",
    "<think>\n hm 雨 \n</think>\n\n yes, <b>  \n" + CALL + " ",
    "  <thin air",
    "<think>never closed  ",
    "a <tool_call>no json</tool_call> b",
    '  {"name": "f", "parameters": {}}',
    '{"no call',
    "one STOP two",
    "ends in ST",
    "xx yy xyz",
    "",
)


@pytest.mark.parametrize(
    "answer_format",
    [HERMES, LLAMA, AnswerFormat(), AnswerFormat(has_thinking=True, is_thinking=True)],
)
@pytest.mark.parametrize("stop", [(), ("STOP", "xyz"), ("yy x", "y")])
def test_deltas_are_a_prefix_of_the_answer(
    answer_format: AnswerFormat, stop: tuple[str, ...]
) -> None:
    rng = random.Random(5)
    template = renderer("append-only")
    for text in ANSWERS:
        for _ in range(5):
            ids = split_anyhow(text, rng)
            ids.insert(rng.randrange(len(ids) + 1), id_of(PAD))
            whole = parts(cut_at_stop(template.decode_visible(ids), stop), answer_format)
            heard: list[Delta] = []
            stream_decoder = StreamDecoder(template, answer_format, stop, heard.append)
            for token in (*ids, id_of(END)):
                stream_decoder.feed(
                    TokenChunk(sampled_ids=[token], logprobs=[0.0], version=VERSION)
                )
            told = "".join(delta.text for delta in heard)
            thought = "".join(delta.reasoning for delta in heard)
            assert whole.text.startswith(told) and whole.reasoning.startswith(thought)
            assert "\ufffd" not in told + thought


def test_certain_text_is_emitted_immediately() -> None:
    template = renderer("append-only")
    heard: list[Delta] = []
    stream_decoder = StreamDecoder(template, HERMES, ("STOP",), heard.append)
    for text in ("<think>", "so", " it", " is</th", "ink>\n", "I", " say ST", "O", "P"):
        ids = template.encode(text)
        stream_decoder.feed(TokenChunk(sampled_ids=ids, logprobs=[0.0] * len(ids), version=VERSION))
    assert [delta.reasoning for delta in heard if delta.reasoning] == ["so", " it", " is"]
    assert [delta.text for delta in heard if delta.text] == ["I", " say"]
