# SPDX-License-Identifier: Apache-2.0
"""Publishes a frozen policy: its initial model as version 0, once.

Owns the one step that a policy without a trainer needs. Trains nothing and imports no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import structlog

from penstock.config import RunConfig
from penstock.trainer.client import VersionsClient
from penstock.trainer.model_folders import init_model, static_files, weight_files
from penstock.wire.held_token import Token

CHECKPOINT_STATE = "trainer.json"
"""As `checkpoint_manifest.STATE`, whose module imports torch."""

_log = structlog.get_logger(__name__)


def publish_frozen(
    config: RunConfig, policy: str, *, url: str, token: Token, store_root: Path
) -> None:
    """Store the initial model and publish it as number 0, unless an earlier start did."""
    with VersionsClient(url, token, policy=policy, store=store_root) as versions:
        if versions.published() >= 0:
            return
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            init_model(config.models[policy].init, folder, config.seed)
            _remove_trainer_state(folder)
            versions.incarnate(number=0, seq=0)
            versions.publish(folder, number=0)
    _log.info("frozen policy published", policy=policy, init=config.models[policy].init)


def _remove_trainer_state(folder: Path) -> None:
    """Leave the model alone in its folder: a checkpoint of a run has more."""
    model = {*static_files(folder), *weight_files(folder)} - {folder / CHECKPOINT_STATE}
    for path in folder.iterdir():
        if path.is_file() and path not in model:
            path.unlink()
