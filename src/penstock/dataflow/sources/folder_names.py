# SPDX-License-Identifier: Apache-2.0
"""A data set folder leads nowhere else: it may be of any author, and its rows
become prompts.

Owns which names and links a folder may contain. Decided before `datasets` sees the folder: its
links stay inside, and its card and its states name only what is below it. The library reads what
they name, on this machine and elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import urlsplit

import yaml

from penstock.config.yaml_positions import compose, events
from penstock.dataflow.sources.tables import import_data_package
from penstock.durable import read_regular
from penstock.errors import ConfigError

SPLITS = "dataset_dict.json"
"""What `DatasetDict.save_to_disk` writes beside the folder of each split."""
STATE = "state.json"
"""What `save_to_disk` writes beside the files of one split."""
MAX_FILE_BYTES = 16 << 20
_CARD = "README.md"
_CARD_OF_YAML = ".huggingface.yaml"
_FILE_KEYS = ("data_files", "data_dir")
"""Keys of a card with paths, patterns or URLs."""


def refuse_ways_out(folder: Path) -> None:
    """ConfigError if what is read from this folder could lie elsewhere."""
    root = folder.resolve()
    allowed = (root, *_blobs_of(root))
    for above, folders, files in os.walk(root):
        for path in (Path(above, name) for name in (*folders, *files)):
            if path.is_symlink() and not any(map(path.resolve().is_relative_to, allowed)):
                raise ConfigError(
                    f"{path} is a link out of the folder {folder}; remove it, or copy there "
                    "what it leads to"
                )
    for path, name in _names(root):
        if not _stays_below(name):
            raise ConfigError(
                f"{path} names {name!r}, which is not in the folder {folder}; copy the file there "
                "and name it by its path in the folder"
            )


def _blobs_of(root: Path) -> Iterator[Path]:
    """Where the links of a snapshot lead, in the cache of the Hub."""
    for path in (root, *root.parents):
        if path.parent.name == "snapshots" and path.parents[1].name.startswith("datasets--"):
            yield path.parents[1] / "blobs"


def _stays_below(name: str) -> bool:
    path = PurePosixPath(name)
    is_url = "::" in name or bool(urlsplit(name).scheme)
    return not (is_url or path.is_absolute() or ".." in path.parts)


def _names(root: Path) -> Iterator[tuple[Path, str]]:
    """What the files of the folder name, with the file."""
    for path in (root / _CARD, root / _CARD_OF_YAML):
        if path.exists():
            yield from ((path, name) for name in _named_by_card(path))
    splits = _json(root / SPLITS).get("splits", [])
    yield from ((root / SPLITS, name) for name in splits)
    for path in (root / STATE, *(root / name / STATE for name in splits if _stays_below(name))):
        yield from ((path, file["filename"]) for file in _json(path).get("_data_files", []))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(_text(path)) if path.exists() else {}


def _text(path: Path) -> str:
    return read_regular(path, MAX_FILE_BYTES, follow_links=True).decode()


def _named_by_card(path: Path) -> Iterator[str]:
    text = _text(path)
    if path.name == _CARD:
        block = import_data_package("huggingface_hub.repocard", str(path)).REGEX_YAML_BLOCK
        found = block.search(text)
        text = found[2] if found else ""
    for event in events(text):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{path} has an alias of YAML, *{event.anchor}; write the value out")
    root = compose(text)
    return _texts(root, is_named=False) if root else iter(())


def _texts(node: yaml.Node, *, is_named: bool) -> Iterator[str]:
    """Every text below a key that names files."""
    if isinstance(node, yaml.ScalarNode):
        if is_named:
            yield node.value
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _texts(item, is_named=is_named)
    else:
        for key, value in cast(yaml.MappingNode, node).value:
            yield from _texts(value, is_named=is_named or key.value in _FILE_KEYS)
