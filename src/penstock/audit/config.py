# SPDX-License-Identifier: Apache-2.0
"""The part of a run's config.yaml that the audit needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.yaml_positions import read_values
from penstock.durable import read_regular
from penstock.errors import StoreError

MAX_FILE_BYTES = 1 << 20

REWARD = "reward"


class _Training(msgspec.Struct, frozen=True):
    max_staleness: int


class _Rule(msgspec.Struct, frozen=True):
    """Only the replay options of a rule."""

    replay: str | None = None
    max_uses: int | None = None
    max_staleness: int | None = None


class _Stage(msgspec.Struct, frozen=True):
    """Only the columns that a stage adds, and whether trainers require them."""

    writes: tuple[str, ...] = ()
    required: bool = True


class _Dataflow(msgspec.Struct, frozen=True):
    closing: Any = "complete"
    rules: tuple[_Rule, ...] = ()
    stages: tuple[_Stage, ...] = ()


class _Model(msgspec.Struct, frozen=True):
    training: _Training | None = None
    dataflow: _Dataflow | None = None
    """Only its rules; the rest is shared by all policies."""
    frozen: bool = False


class AuditedConfig(msgspec.Struct, frozen=True):
    models: dict[str, _Model]
    training: _Training
    dataflow: _Dataflow = _Dataflow()
    deterministic: bool = False
    """A restarted trainer reproduces the same weights bit for bit."""

    @property
    def trained(self) -> set[str]:
        """The policies that have a trainer."""
        return {name for name in self.models if not self.is_frozen(name)}

    def is_frozen(self, policy: str) -> bool:
        """Whether it is only called, and never trained."""
        return self.models.get(policy, _Model()).frozen

    def max_staleness(self, policy: str) -> int:
        """Bound for any row in a batch, new or replayed."""
        own, replay = self.max_fresh_staleness(policy), self._replay(policy)
        return own if replay is None else max(own, replay.max_staleness or 0)

    def max_fresh_staleness(self, policy: str) -> int:
        """Bound for rows that were in no batch before."""
        model = self.models.get(policy, _Model())
        return (model.training or self.training).max_staleness

    def max_uses(self, policy: str) -> float:
        """Maximum number of batches that may use a group."""
        replay = self._replay(policy)
        if replay is None:
            return 1
        return math.inf if replay.max_uses is None else replay.max_uses

    def _replay(self, policy: str) -> _Rule | None:
        """The replay rule in effect: the policy's own, otherwise the shared one."""
        own = self.models.get(policy, _Model()).dataflow or _Dataflow()
        rules = (*own.rules, *self.dataflow.rules)
        return next((rule for rule in rules if rule.replay is not None), None)

    @property
    def min_survivors(self) -> int | None:
        """Minimum number of members of a closed group; None if all are required."""
        closing: Any = self.dataflow.closing
        if not isinstance(closing, dict):
            return None
        try:
            return max(1, int(closing["survivors"]["min"]))  # pyright: ignore[reportUnknownArgumentType]
        except (KeyError, TypeError, ValueError, OverflowError):
            return 1

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns written by stages that every row in a batch must have."""
        stages = self.dataflow.stages
        return frozenset(name for stage in stages if stage.required for name in stage.writes)

    @property
    def is_scored_by_stage(self) -> bool:
        """Whether a stage writes the reward, so that rows are delivered without one."""
        return any(REWARD in stage.writes for stage in self.dataflow.stages)


def read_config(path: Path) -> AuditedConfig:
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}; pass a run folder (OUTPUT_DIR/NAME)"
        ) from error
    try:
        return msgspec.convert(read_values(text), AuditedConfig)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise StoreError(f"{path} is not a resolved run config: {error}") from error
