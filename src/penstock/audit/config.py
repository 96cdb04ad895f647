# SPDX-License-Identifier: Apache-2.0
"""Of a run's config.yaml, only what the laws are measured by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.errors import StoreError

REWARD = "reward"


class _Training(msgspec.Struct, frozen=True):
    max_staleness: int


class _Rule(msgspec.Struct, frozen=True):
    """Of a rule, only whether and how often it serves a group again."""

    replay: str | None = None
    max_uses: int | None = None
    max_staleness: int | None = None


class _Stage(msgspec.Struct, frozen=True):
    """Of a stage, only which columns it adds and whether trainers wait for them."""

    writes: tuple[str, ...] = ()
    required: bool = True


class _PolicyDataflow(msgspec.Struct, frozen=True):
    rules: tuple[_Rule, ...] = ()


class _Model(msgspec.Struct, frozen=True):
    training: _Training | None = None
    dataflow: _PolicyDataflow | None = None


class _Dataflow(msgspec.Struct, frozen=True):
    closing: Any = "complete"
    rules: tuple[_Rule, ...] = ()
    stages: tuple[_Stage, ...] = ()


class AuditedConfig(msgspec.Struct, frozen=True):
    models: dict[str, _Model]
    training: _Training
    dataflow: _Dataflow = _Dataflow()
    deterministic: bool = False
    """Each life of a trainer repeats the others bit for bit."""

    def max_staleness(self, policy: str) -> int:
        """Of any row in a batch, fresh or served again."""
        own, replay = self.max_fresh_staleness(policy), self._replay(policy)
        return own if replay is None else max(own, replay.max_staleness or 0)

    def max_fresh_staleness(self, policy: str) -> int:
        """Of rows that no batch has had yet."""
        model = self.models.get(policy, _Model())
        return (model.training or self.training).max_staleness

    def max_uses(self, policy: str) -> float:
        """In how many batches a group may be."""
        replay = self._replay(policy)
        if replay is None:
            return 1
        return math.inf if replay.max_uses is None else replay.max_uses

    def _replay(self, policy: str) -> _Rule | None:
        """The rule in force: the policy's own, else the shared one."""
        own = self.models.get(policy, _Model()).dataflow or _PolicyDataflow()
        found = [rule for rule in (*own.rules, *self.dataflow.rules) if rule.replay is not None]
        return found[0] if found else None

    @property
    def min_survivors(self) -> int | None:
        """Members that a closed group may be left with; None when it must have them all."""
        closing: Any = self.dataflow.closing
        if not isinstance(closing, dict):
            return None
        try:
            return max(1, int(closing["survivors"]["min"]))  # pyright: ignore[reportUnknownArgumentType]
        except (KeyError, TypeError, ValueError):
            return 1

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that every row in a batch has from a stage."""
        stages = self.dataflow.stages
        return frozenset(name for stage in stages if stage.required for name in stage.writes)

    @property
    def is_scored_by_stage(self) -> bool:
        """Rows arrive without a reward, and a stage adds it."""
        return any(REWARD in stage.writes for stage in self.dataflow.stages)


def read_config(path: Path) -> AuditedConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; give the folder of a run"
        ) from error
    try:
        return msgspec.convert(yaml.safe_load(text), AuditedConfig)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise StoreError(f"{path} is no resolved run file: {error}") from error
