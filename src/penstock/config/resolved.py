# SPDX-License-Identifier: Apache-2.0
"""The resolved config as a run stores it: its text, and changes between two configs.

Owns the stored form, the meaning of "the same config", and the list of keys that may change on
resume. Reads and writes no file."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from penstock.config.base import leaves, map_texts
from penstock.config.error_messages import path_text
from penstock.config.models import KEPT_COPY
from penstock.config.run import RunConfig
from penstock.config.store_password import without_password
from penstock.hub import is_same_model
from penstock.options import KeyPath

_CONSTANT = '"constant"'
_INTERPOLATION = re.compile(r"(?<!\\)(\\*)\$\{")
_ESCAPED = re.compile(r"(?<!\\)(\\+)\$\{")
_STAND_IN = "\ufdd0{"
"""Begins with a character that Unicode leaves to programs."""


def run_dir(config: RunConfig) -> Path:
    """The folder of this run."""
    return Path(config.output_dir) / config.name


def dump(config: RunConfig) -> str:
    """The resolved config as YAML; reading it gives an equal config, except for the password of the
    store."""
    return OmegaConf.to_yaml(OmegaConf.create(escape_interpolation(_public_values(config))))


def identity(config: RunConfig) -> dict[str, str]:
    """The keys that identify a run: it does not resume if one of them changed, unless the user
    accepts the change. A learning rate schedule includes the number of steps, because the rate of
    every step depends on it."""
    flat_values = _flat_values(config)
    for path, shape in flat_values.items():
        if path[-2:] == ("training", "lr_scheduler_type") and shape != _CONSTANT:
            flat_values[path] = f"{shape} over {flat_values[(*path[:-1], 'steps')]} training.steps"
    return {
        path_text(path): text
        for path, text in flat_values.items()
        if not any(_matches(path, pattern) for pattern in MUTABLE_ON_RESUME)
    }


def config_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Every key that changed, whether it may change or not."""
    before, after = (
        {path_text(path): text for path, text in _flat_values(config).items()}
        for config in (old, new)
    )
    return identity_changes(before, after)


def identity_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The changes between two identities: one `path.to.key: old -> new` per key.

    A model of the Hub without a revision means the commit that the run started with."""
    return [
        f"{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
        and not is_same_model(new.get(key, "").strip('"'), old.get(key, "").strip('"'))
    ]


def _matches(path: KeyPath, pattern: tuple[str, ...]) -> bool:
    return len(path) >= len(pattern) and all(
        expected in ("*", part) for expected, part in zip(pattern, path, strict=False)
    )


MUTABLE_ON_RESUME: tuple[tuple[str, ...], ...] = (
    ("training", "steps"),
    ("training", "checkpoint_every"),
    ("training", "recompute"),
    ("training", "offload"),
    ("models", "*", "training", "steps"),
    ("models", "*", "training", "checkpoint_every"),
    ("models", "*", "training", "recompute"),
    ("models", "*", "training", "offload"),
    ("models", "*", "replicas"),
    ("models", "*", "capacity"),
    ("models", "*", "engines"),
    ("models", "*", "max_paused"),
    ("models", "*", "vllm", "url"),
    ("models", "*", "vllm", "environment"),
    ("models", "*", "vllm", "tensor_parallel"),
    ("models", "*", "vllm", "devices"),
    ("models", "*", "vllm", "memory_share"),
    ("models", "*", "training", "hosts"),
    ("models", "*", "training", "devices"),
    ("training", "hosts"),
    ("training", "devices"),
    ("hosts",),
    ("autoscale",),
    ("models", "*", "sglang", "url"),
    ("dataflow", "lease"),
    ("dataflow", "bounds"),
    ("dataflow", "report"),
    ("dataflow", "retain_batches"),
    ("dataflow", "keep"),
    ("dataflow", "keep_mb"),
    ("prompts", "*", "path"),
    ("prompts", "*", "text"),
    ("weights",),
    ("sandbox",),
    ("launcher",),
    ("ray",),
    ("ssh",),
    ("stall",),
    ("budget",),
    ("training", "external"),
    ("models", "*", "training", "external"),
    ("training", "port"),
    ("training", "rank_timeout_s"),
    ("models", "*", "training", "port"),
    ("models", "*", "training", "rank_timeout_s"),
    ("report_to",),
)
"""Keys that may change on resume without confirmation: duration, scale, time limits and retention;
never what is learned, or from what. `*` matches any name, and a section all of its keys. With a
learning rate schedule, the number of steps is part of the identity."""


def _flat_values(config: RunConfig) -> dict[KeyPath, str]:
    """All values except `output_dir`, and without the run folder in the names of its own copies,
    because a run may be moved."""
    values = _public_values(config)
    del values["output_dir"]
    for model in values["models"].values():
        model["init"] = KEPT_COPY.sub(r"version \g<digest>", model["init"])
    return {path: json.dumps(leaf, ensure_ascii=False) for path, leaf in leaves(values)}


def _public_values(config: RunConfig) -> dict[str, Any]:
    """The values without secrets, for the run folder."""
    values = config.model_dump(mode="json")
    values["dataflow"]["store"] = without_password(config.dataflow.store)
    return values


def escape_interpolation(value: Any) -> Any:
    """Escape a literal `${`, so that reading does not resolve it."""
    return map_texts(value, lambda text: _INTERPOLATION.sub(r"\1\1\\${", text))


def set_aside(value: Any) -> Any:
    """An escaped `${` as characters that OmegaConf passes over: it takes milliseconds for each."""
    return map_texts(value, lambda text: _ESCAPED.sub(_unescaped, text))


def _unescaped(match: re.Match[str]) -> str:
    """Of each pair of backslashes one stays; the last belongs to the `${`."""
    return match[1][: len(match[1]) // 2] + _STAND_IN


def put_back(value: Any) -> Any:
    """The literal `${` that `set_aside` replaced."""
    return map_texts(value, lambda text: text.replace(_STAND_IN, "${"))
