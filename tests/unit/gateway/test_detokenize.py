# SPDX-License-Identifier: Apache-2.0
"""The table of token bytes decodes like the tokenizer, for ids in any order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from penstock.gateway.detokenize import make_decoder
from penstock.gateway.renderer import Renderer
from penstock.types import FinishReason

ADDED = ["<|end|>", "<think>", "日本", " é "]


def byte_level() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(letters)}
    tokenizer: Any = Tokenizer(BPE(vocab=vocab | {"Ġt": 256}, merges=[("Ġ", "t")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(ADDED[:2])
    tokenizer.add_tokens(ADDED[2:])
    return tokenizer


def test_bytes_in_any_order_decode_as_the_tokenizer_does() -> None:
    tokenizer = byte_level()
    decode = make_decoder(tokenizer)
    num_ids, draw = tokenizer.get_vocab_size(), random.Random(0)
    for _ in range(500):
        ids = [draw.randrange(num_ids + 2) for _ in range(draw.randrange(12))]
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_other_decoders_are_left_to_the_tokenizer() -> None:
    tokenizer: Any = Tokenizer(BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    assert make_decoder(tokenizer)([0, 1, 0]) == "aĠa"


def run_by_run(renderer: Renderer, ids: Sequence[int], special: Mapping[int, str]) -> str:
    """What `decode_escaped` promises, in its simplest form."""
    parts: list[str] = []
    for content, run in groupby(ids, special.get):
        if content is None:
            parts.append(renderer.escape_untrusted(renderer.decode(list(run))))
        else:
            parts += [content for _ in run]
    return "".join(parts)


def test_ids_in_any_order_are_escaped_run_by_run() -> None:
    """Of ordinary tokens that spell special ones too, whole or in part, on either side of one."""
    tokenizer = byte_level()
    special = {tokenizer.token_to_id(token): token for token in ADDED[:2]}
    spelled = [tokenizer.token_to_id(letter) for letter in "<|end|>think"]
    ids = [*special, *spelled, *range(250, tokenizer.get_vocab_size())]
    fused = byte_level()
    fused.decoder = decoders.Fuse()
    for renderer in (Renderer(tokenizer, ""), Renderer(fused, "")):
        draw = random.Random(0)
        for _ in range(2_000):
            some = draw.choices(ids, k=draw.randrange(24))
            assert renderer.decode_escaped(some) == run_by_run(renderer, some, special)


class CountingRenderer(Renderer):
    num_ids_decoded = 0

    def decode_escaped(self, ids: Sequence[int]) -> str:
        self.num_ids_decoded += len(ids)
        return super().decode_escaped(ids)


def test_an_answer_with_special_tokens_is_escaped_once() -> None:
    tokenizer = byte_level()
    end, think = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>")
    for last in (end, think, 5):
        renderer = CountingRenderer(tokenizer, "", stop_ids=frozenset({end}))
        renderer.decode_answer([think, 5] * 100 + [last], FinishReason.STOP)
        assert renderer.num_ids_decoded <= 201


def test_an_answer_decoded_once_reads_as_one_decoded_in_every_way() -> None:
    tokenizer = byte_level()
    end, think = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<think>")
    spelled = tokenizer.encode("<|", add_special_tokens=False).ids
    for stop_ids in (frozenset({end}), frozenset({5}), frozenset({think}), frozenset[int]()):
        renderer = Renderer(tokenizer, "", stop_ids=stop_ids)
        for ids in ([], [end], [5, 6, end], [5, end, 6], [6, 5], [think, 6, end], [6, think]):
            for middle in (ids, [*spelled, *ids]):
                for finish in (FinishReason.STOP, FinishReason.LENGTH):
                    texts = renderer.decode_answer(middle, finish)
                    own = middle[:-1] if renderer.has_end_token(middle, finish) else middle
                    assert texts.escaped == renderer.decode_escaped(middle)
                    assert texts.visible == renderer.decode_visible(middle)
                    assert texts.without_end == renderer.decode_escaped(own)
