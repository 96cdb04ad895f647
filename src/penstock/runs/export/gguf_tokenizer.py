# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json as the vocabulary of a GGUF file.

llama.cpp implements byte-level BPE and knows by name how each family cuts text before merging; the
name is found by comparing the rules themselves. A tokenizer that it would run differently is
refused: wrong tokens make a worse model without any error. Tokenizers with one token per character,
as tiny models have, are BPE without merges; there, characters outside of the vocabulary differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import WeightsError
from penstock.gateway.tokenizer_files import read_object, read_special_tokens, read_template

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FAMILIES: dict[tuple[str, ...], str] = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_WORDS + r"\p{N}" + _REST, "bytes"): "qwen2",
    (_WORDS + r"\p{N}{1,3}" + _REST, "bytes"): "llama-bpe",
}
"""Steps before merging, and what llama.cpp calls them."""
_ALWAYS_SPLIT = {"Regex": "[\\s\\S]"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
MAX_IDS = 4 << 20
"""Types of tokens in a GGUF file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    family: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special: dict[str, int]
    """Ids by name: bos, eos, pad, unk."""
    template: str


def read_vocabulary(folder: Path, num_ids: int) -> Vocabulary:
    """The vocabulary of a model folder, filled up to the rows of its embedding."""
    tokenizer = read_object(folder / "tokenizer.json")
    model: dict[str, Any] = tokenizer.get("model") or {}
    family = _family(tokenizer, model, folder)
    tokens: dict[int, tuple[str, int]] = {at: (text, NORMAL) for text, at in model["vocab"].items()}
    for added in tokenizer.get("added_tokens") or ():
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if num_ids > MAX_IDS:
        raise WeightsError(f"{folder}: vocab_size is {num_ids}; up to {MAX_IDS} are exported")
    if max(tokens, default=0) >= num_ids:
        raise WeightsError(
            f"{folder}: the tokenizer has id {max(tokens)}, and the embedding only {num_ids} rows; "
            "the tokenizer belongs to another model"
        )
    listed = [tokens.get(at, (f"[PAD{at}]", UNUSED)) for at in range(num_ids)]
    config = read_object(folder / "tokenizer_config.json")
    ids = {text: at for at, (text, _) in tokens.items()}
    names = read_special_tokens(config)
    return Vocabulary(
        family=family,
        tokens=tuple(text for text, _ in listed),
        types=tuple(kind for _, kind in listed),
        merges=_merges(model),
        special={name.removesuffix("_token"): ids[t] for name, t in names.items() if t in ids},
        template=read_template(folder, config),
    )


def _merges(model: dict[str, Any]) -> tuple[str, ...]:
    """Both forms of the file. llama.cpp wants a merge; one of long tokens never applies."""
    merges: list[Any] = model.get("merges") or []
    if not merges:
        return ("<none> <none>",)
    return tuple(one if isinstance(one, str) else " ".join(one) for one in merges)


def _family(tokenizer: dict[str, Any], model: dict[str, Any], folder: Path) -> str:
    before = _part(tokenizer, "pre_tokenizer")
    kind = model.get("type")
    if kind == "WordLevel" and _is_by_character(before, tokenizer, model):
        return "gpt-2"
    normalizer = _part(tokenizer, "normalizer").get("type")
    is_plain = not any(model.get(key) for key in ("byte_fallback", "dropout")) and normalizer in (
        None,
        "NFC",
    )
    if kind == "BPE" and is_plain:
        parts: list[dict[str, Any]] = before.get("pretokenizers", [before])
        if (family := _FAMILIES.get(tuple(map(_step, parts)))) is not None:
            return family
    raise WeightsError(
        f"{folder}: its tokenizer ({kind}, {json.dumps(before)[:200]}) is none that llama.cpp is "
        "known to run alike (byte-level BPE of GPT-2, SmolLM, Qwen and Llama 3); export a Hugging "
        "Face folder and convert it with llama.cpp's own script"
    )


def _part(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the file; empty if it is missing or null."""
    return values.get(name) or {}


def _step(part: dict[str, Any]) -> str:
    if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
        return "ByteLevel" if part.get("use_regex", True) else "bytes"
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return "Digits"
    if part.get("type") == "Split" and part.get("behavior") == "Isolated":
        return str(_part(part, "pattern").get("Regex", ""))
    return json.dumps(part)


def _is_by_character(
    before: dict[str, Any], tokenizer: dict[str, Any], model: dict[str, Any]
) -> bool:
    special = {added["content"] for added in tokenizer.get("added_tokens") or ()}
    plain = [text for text in model["vocab"] if text not in special]
    is_split = before.get("type") == "Split" and before.get("pattern") == _ALWAYS_SPLIT
    is_ascii = all(len(text) == 1 and "!" <= text <= "~" for text in plain)
    return is_split and is_ascii and tokenizer.get("normalizer") is None
