# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer that is small and real, and three kinds of chat templates.

Its tokens overlap, so a model may sample ids that a tokenizer would not produce for the same text,
or half of a character.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from penstock.gateway.renderer import Renderer

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
WINDOW = 100_000
CORPUS = [
    "The weather in Paris is rainy today, and the sun shines tomorrow.",
    '<tool_call>\n{"name": "look", "arguments": {"place": "Paris"}}\n</tool_call>',
    "user assistant system tool think about the question and answer it: été, größe, 雨 🌧️",
    "1234567890 10 20 30 40 50 60 70 80 90\n\n  \n",
]

_BODY = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set at = namespace(last_user=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set at.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.reasoning_content %}
{%- set content = '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' + content %}
{%- endif %}
HOOK
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
_STRIP = """{%- if loop.index0 < at.last_user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}"""
_TRIM = "{%- set content = content | trim %}"
TEMPLATES = {
    "append-only": _BODY.replace("HOOK\n", ""),
    "strips-thinking": _BODY.replace("HOOK", _STRIP),
    "rewrites": _BODY.replace("HOOK", _TRIM),
}


@cache
def tokenizer() -> Tokenizer:
    made: Any = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer: Any = BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[START, END, PAD],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return made


def renderer(kind: str) -> Renderer:
    return Renderer(
        tokenizer(),
        TEMPLATES[kind],
        stop_ids=frozenset({id_of(END)}),
        special_tokens={"eos_token": END},
        window=WINDOW,
    )


def id_of(token: str) -> int:
    found = tokenizer().token_to_id(token)
    assert found is not None
    return found


@cache
def _pieces() -> dict[bytes, int]:
    """Every ordinary token by its bytes."""
    letters = {letter: bytes([at]) for at, letter in _byte_alphabet().items()}
    return {
        b"".join(letters[letter] for letter in piece): token
        for piece, token in tokenizer().get_vocab().items()
        if all(letter in letters for letter in piece) and piece not in (START, END, PAD, "<think>")
    }


def _byte_alphabet() -> dict[int, str]:
    """The letter that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [at for at in range(256) if at not in plain]
    return {at: chr(at) for at in plain} | {at: chr(256 + n) for n, at in enumerate(others)}


def split_anyhow(text: str | bytes, rng: random.Random) -> list[int]:
    """Ids of a text as a model might sample them: any pieces that fit, longest or not."""
    raw = text.encode() if isinstance(text, str) else text
    pieces = _pieces()
    ids: list[int] = []
    at = 0
    while at < len(raw):
        sizes = [size for size in range(1, 9) if raw[at : at + size] in pieces]
        size = rng.choice([size for size in sizes if at + size <= len(raw)])
        ids.append(pieces[raw[at : at + size]])
        at += size
    return ids
