# SPDX-License-Identifier: Apache-2.0
"""The resolved config as a run keeps it: its text, its digest, and what changed between two.

Owns the stored form, the meaning of "the same config", and the list of what may change on the way.
Reads and writes no file."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from penstock.config.base import KeyPath
from penstock.config.error_messages import path_text
from penstock.config.run import RunConfig
from penstock.config.store_password import without_password

_CONSTANT = '"constant"'
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def run_dir(config: RunConfig) -> Path:
    """The folder of this run."""
    return Path(config.output_dir) / config.name


def dump(config: RunConfig) -> str:
    """The resolved config as YAML; reading it gives an equal config, but for the password of its
    store."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(_open(config))))


def digest(config: RunConfig) -> str:
    """Equal for two configs that describe the same run: only what may change freely differs."""
    text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identity(config: RunConfig) -> dict[str, str]:
    """What a run is, by key: it cannot go on when one of these changes, unless somebody says so.
    A learning rate that falls is one over so many steps: with more of them, or fewer, every step
    has another."""
    facts = _facts(config)
    for path, shape in facts.items():
        if path[-2:] == ("training", "lr_scheduler_type") and shape != _CONSTANT:
            facts[path] = f"{shape} over {facts[(*path[:-1], 'steps')]} training.steps"
    return {path_text(path): text for path, text in facts.items() if not is_free(path)}


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Every key that changed, free or not; empty if none did."""
    before, after = (
        {path_text(path): text for path, text in _facts(config).items()} for config in (old, new)
    )
    return changed(before, after)


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What makes one identity differ from another: one `path.to.key: old -> new` per key."""
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def is_free(path: KeyPath) -> bool:
    """Whether a run may go on with another value of this key."""
    return any(_is_under(path, free) for free in FREE)


def _is_under(path: KeyPath, free: tuple[str, ...]) -> bool:
    begins = path[: len(free)]
    return len(begins) == len(free) and all(
        want in ("*", have) for want, have in zip(free, begins, strict=True)
    )


FREE: tuple[tuple[str, ...], ...] = (
    ("training", "steps"),
    ("training", "checkpoint_every"),
    ("models", "*", "training", "steps"),
    ("models", "*", "training", "checkpoint_every"),
    ("models", "*", "replicas"),
    ("models", "*", "capacity"),
    ("models", "*", "engines"),
    ("models", "*", "max_paused"),
    ("models", "*", "vllm", "url"),
    ("models", "*", "vllm", "environment"),
    ("models", "*", "sglang", "url"),
    ("dataflow", "lease"),
    ("dataflow", "bounds"),
    ("dataflow", "report"),
    ("dataflow", "retain_batches"),
    ("weights",),
    ("launcher",),
    ("report_to",),
)
"""What a resumed run may change without being told: how long it goes on, how many work on it, how
long they may take and what is kept; never what is learned from what. A `*` stands for any name, and
a section for all of its keys. Where the learning rate falls over the steps, they are part of it."""


def _facts(config: RunConfig) -> dict[KeyPath, str]:
    """All that says what the run is; `output_dir` only says where, and a run may be moved."""
    values = _open(config)
    del values["output_dir"]
    return dict(_flat(values, ()))


def _open(config: RunConfig) -> dict[str, Any]:
    """What anybody who reads the run's folder may know."""
    values = config.model_dump(mode="json")
    values["dataflow"]["store"] = without_password(config.dataflow.store)
    return values


def _flat(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict) and value:
        for key, below in cast(dict[str, Any], value).items():
            yield from _flat(below, (*path, key))
    elif isinstance(value, list) and value:
        for index, below in enumerate(cast(list[Any], value)):
            yield from _flat(below, (*path, index))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _escaped(value: Any) -> Any:
    """Text that holds `${` literally, written so that reading does not resolve it again."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_escaped(below) for below in cast(list[Any], value)]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + "\\${", value)
    return value
