# SPDX-License-Identifier: Apache-2.0
"""The versions of a process reward model: numbered folders, 1, 2, 3, … in one folder.

Owns their numbers and what is recorded with each. A version appears complete, under a new number,
and never changes; so a scorer can look for a newer one at any time. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.durable import sync, write_durably
from penstock.errors import ConfigError
from penstock.trainer.prm.report import Agreement
from penstock.trainer.prm.step_text import require_digest

CARD = "prm.json"


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded with a version."""

    text_digest: str
    """Of the function that built the texts it was trained on."""
    base: str
    """The model that got the head."""
    labellers: tuple[str, ...]
    labels_digest: str
    """Of the file with the labels."""
    max_tokens: int
    offset: float
    num_steps: int
    """Steps it was trained on."""
    agreement: Agreement
    """With held-out labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    number: int
    folder: Path
    card: Card


def numbers(folder: Path) -> list[int]:
    """Numbers of the versions in this folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def newest(folder: Path) -> ModelVersion:
    """The version to score with; ConfigError if there is none, or it was made with other texts."""
    found = numbers(folder)
    if not found:
        raise ConfigError(
            f"{folder} has no process reward model (no folder 1, 2, …); make one: penstock prm "
            f"train LABELS --model MODEL --out {folder}"
        )
    return open_version(folder, found[-1])


def open_version(folder: Path, number: int) -> ModelVersion:
    path = folder / str(number)
    try:
        card = msgspec.json.decode((path / CARD).read_bytes(), type=Card)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path / CARD} cannot be read ({error}); remove this version, or train it again"
        ) from None
    require_digest(card.text_digest, f"process reward model {path}", "label and train it again")
    return ModelVersion(number=number, folder=path, card=card)


@contextmanager
def new_version(folder: Path) -> Generator[Path]:
    """A folder to write the next version into; it gets its number when the block ends well."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        yield made
        for path in (*made.iterdir(), made):
            sync(path)
        number = (numbers(folder) or [0])[-1] + 1
        os.rename(made, folder / str(number))
        sync(folder)


def write_card(folder: Path, card: Card) -> None:
    write_durably(folder / CARD, msgspec.json.format(msgspec.json.encode(card)) + b"\n")
