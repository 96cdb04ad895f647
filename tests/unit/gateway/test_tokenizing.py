# SPDX-License-Identifier: Apache-2.0
"""Text that is tokenized in pieces has the ids of the whole text, for each kind of tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.gateway.bpe import CORPUS
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from penstock.gateway import tokenizing
from penstock.gateway.tokenizing import MAX_KEPT, PieceEncoder

ADDED = ["<|a|>", "<|a|>b", "|>b<", "<x>", "\n<x>"]
"""Some begin in others, or where others end."""
PARTS = [*ADDED, "<|", "a|>", "b", " b", "\n", "  ", "Paris", "é", "e\u0301", "雨", "12", "<", "x>"]


def trained(pre_tokenizer: Any, *, normalizer: Any = None, **options: bool) -> Any:
    tokenizer: Any = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer: Any = BpeTrainer(
        vocab_size=400,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, **options) for t in ADDED[:3]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ADDED[3:]])
    tokenizer.add_tokens([AddedToken("Par", normalized=True)])
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACED = pre_tokenizers.ByteLevel(add_prefix_space=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first")


@pytest.mark.parametrize(
    ("tokenizer", "is_split"),
    [
        pytest.param(trained(BYTES), True, id="bytes"),
        pytest.param(trained(BYTES, normalizer=normalizers.NFC()), True, id="normalized"),
        pytest.param(trained(SPACED), True, id="spaced"),
        pytest.param(trained(DIGITS), True, id="digits"),
        pytest.param(trained(FIRST), False, id="first"),
        pytest.param(trained(BYTES, lstrip=True), False, id="takes spaces"),
        pytest.param(trained(BYTES, single_word=True), False, id="words"),
    ],
)
def test_pieces_have_the_ids_of_the_whole_text(tokenizer: Any, is_split: bool) -> None:
    draw = random.Random(0)
    encoder = PieceEncoder(tokenizer)
    for _ in range(1_000):
        text = "".join(draw.choices(PARTS, k=draw.randrange(10)))
        assert encoder.encode(text) == tokenizing.encode(tokenizer, text), text
    kept = encoder._known  # pyright: ignore[reportPrivateUsage]
    assert any("<x>" in piece for piece in kept) is not is_split


def test_what_is_kept_is_bounded() -> None:
    encoder = PieceEncoder(trained(BYTES))
    for number in range(MAX_KEPT + 10):
        encoder.encode(f"<x>{number}")
    assert len(encoder._known) <= MAX_KEPT  # pyright: ignore[reportPrivateUsage]
