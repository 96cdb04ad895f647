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
    return OmegaConf.to_yaml(OmegaConf.create(_escape_interpolation(_public_values(config))))


def digest(config: RunConfig) -> str:
    """Equal for two configs that describe the same run: only what may change freely differs."""
    text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identity(config: RunConfig) -> dict[str, str]:
    """What a run is, by key: it cannot go on when one of these changes, unless somebody says so.
    A learning rate that falls is one over so many steps: with more of them, or fewer, every step
    has another."""
    flat_values = _flat_values(config)
    for path, shape in flat_values.items():
        if path[-2:] == ("training", "lr_scheduler_type") and shape != _CONSTANT:
            flat_values[path] = f"{shape} over {flat_values[(*path[:-1], 'steps')]} training.steps"
    return {
        path_text(path): text
        for path, text in flat_values.items()
        if not may_change_on_resume(path)
    }


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Every key that changed, free or not; empty if none did."""
    before, after = (
        {path_text(path): text for path, text in _flat_values(config).items()}
        for config in (old, new)
    )
    return changed(before, after)


def changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What makes one identity differ from another: one `path.to.key: old -> new` per key."""
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def may_change_on_resume(path: KeyPath) -> bool:
    """Whether a run may go on with another value of this key."""
    return any(_matches(path, pattern) for pattern in MUTABLE_ON_RESUME)


def _matches(path: KeyPath, pattern: tuple[str, ...]) -> bool:
    begins = path[: len(pattern)]
    return len(begins) == len(pattern) and all(
        want in ("*", have) for want, have in zip(pattern, begins, strict=True)
    )


MUTABLE_ON_RESUME: tuple[tuple[str, ...], ...] = (
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


def _flat_values(config: RunConfig) -> dict[KeyPath, str]:
    """All that says what the run is; `output_dir` only says where, and a run may be moved."""
    values = _public_values(config)
    del values["output_dir"]
    return dict(_flatten(values, ()))


def _public_values(config: RunConfig) -> dict[str, Any]:
    """What anybody who reads the run's folder may know."""
    values = config.model_dump(mode="json")
    values["dataflow"]["store"] = without_password(config.dataflow.store)
    return values


def _flatten(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict) and value:
        for key, child in cast(dict[str, Any], value).items():
            yield from _flatten(child, (*path, key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(cast(list[Any], value)):
            yield from _flatten(child, (*path, index))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _escape_interpolation(value: Any) -> Any:
    """Text that holds `${` literally, written so that reading does not resolve it again."""
    if isinstance(value, dict):
        return {
            key: _escape_interpolation(child) for key, child in cast(dict[str, Any], value).items()
        }
    if isinstance(value, list):
        return [_escape_interpolation(child) for child in cast(list[Any], value)]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + "\\${", value)
    return value
