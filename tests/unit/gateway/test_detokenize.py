# SPDX-License-Identifier: Apache-2.0
"""The table of token bytes says what the tokenizer says, for ids in any order."""

from __future__ import annotations

import random
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
