# SPDX-License-Identifier: Apache-2.0
"""What a run file leaves open and the machine decides: the precision of training.

Owns the default on GPUs. A config on disk has every value, so a run keeps what it started with.
Changes nothing on a CPU, and nothing of a deterministic run."""

from __future__ import annotations

from penstock.config import RunConfig, TrainingConfig
from penstock.devices import visible_devices
from penstock.fleet.device_plan import layout_here

GPU_PRECISION = "bfloat16"


def with_device_defaults(config: RunConfig) -> RunConfig:
    """The config with bfloat16 for every policy that trains on GPUs and names no precision."""
    on_gpus = layout_here(config, len(visible_devices())).ranks
    if not on_gpus or config.deterministic:
        return config
    models = {
        name: model.model_copy(update={"training": _completed(model.training)})
        if name in on_gpus and model.training is not None
        else model
        for name, model in config.models.items()
    }
    is_shared = any(config.models[name].training is None for name in on_gpus)
    training = _completed(config.training) if is_shared else config.training
    return config.model_copy(update={"models": models, "training": training})


def _completed(training: TrainingConfig) -> TrainingConfig:
    if "precision" in training.model_fields_set:
        return training
    return training.model_copy(update={"precision": GPU_PRECISION})
