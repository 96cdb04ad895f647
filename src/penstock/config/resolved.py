# SPDX-License-Identifier: Apache-2.0
"""The resolved config as a run keeps it: its text, its digest, and what changed between two.

Owns the stored form and the meaning of "the same config". Reads and writes no file."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from penstock.config.checks import KeyPath
from penstock.config.explain import path_text
from penstock.config.passwords import without_password
from penstock.config.run import RunConfig

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def run_dir(config: RunConfig) -> Path:
    """The folder of this run."""
    return Path(config.output_dir) / config.name


def dump(config: RunConfig) -> str:
    """The resolved config as YAML; reading it gives an equal config, but for the password of its
    store."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(_open(config))))


def digest(config: RunConfig) -> str:
    """Equal for two configs that describe the same run, wherever its folder stands."""
    text = json.dumps(_identity(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What makes the digests differ: one `path.to.key: old -> new` per key; empty if equal."""
    before, after = (dict(_flat(_identity(config), ())) for config in (old, new))
    return [
        f"{path_text(path)}: {before.get(path, '(absent)')} -> {after.get(path, '(absent)')}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]


def _identity(config: RunConfig) -> dict[str, Any]:
    """All that says what the run is; `output_dir` only says where, and a run may be moved."""
    values = _open(config)
    del values["output_dir"]
    return values


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
