# SPDX-License-Identifier: Apache-2.0
"""The run file: strict schemas, and a loader whose messages name file, line and fix.

Owns the shape of run.yaml, its defaults and its stored form. Builds nothing, imports no user code
and no torch; every other folder takes plain values from here through its own `build`."""

from penstock.config.algorithms import AlgorithmConfig, CorrectionConfig
from penstock.config.dataflow import (
    BoundsConfig,
    ClosingConfig,
    DataflowConfig,
    LeaseConfig,
    PolicyDataflowConfig,
    SpaceConfig,
    SurvivorsClosing,
    SurvivorsConfig,
)
from penstock.config.loader import demo, load
from penstock.config.lora import LoraConfig
from penstock.config.models import ModelConfig
from penstock.config.pipeline import HostConfig, PipelineConfig, PipelineStageConfig
from penstock.config.resolved import changed, differences, digest, dump, identity, run_dir
from penstock.config.rules import RuleConfig
from penstock.config.run import RunConfig
from penstock.config.run_sections import PolicyConfig
from penstock.config.sources import CommandWorkflow, SourceConfig, WorkflowConfig
from penstock.config.stages import StageConfig
from penstock.config.trainer import SamplingConfig, TrainingConfig
from penstock.config.weights import WeightsConfig
from penstock.types import Hook

__all__ = [
    "AlgorithmConfig",
    "BoundsConfig",
    "ClosingConfig",
    "CommandWorkflow",
    "CorrectionConfig",
    "DataflowConfig",
    "Hook",
    "HostConfig",
    "LeaseConfig",
    "LoraConfig",
    "ModelConfig",
    "PipelineConfig",
    "PipelineStageConfig",
    "PolicyConfig",
    "PolicyDataflowConfig",
    "RuleConfig",
    "RunConfig",
    "SamplingConfig",
    "SourceConfig",
    "SpaceConfig",
    "StageConfig",
    "SurvivorsClosing",
    "SurvivorsConfig",
    "TrainingConfig",
    "WeightsConfig",
    "WorkflowConfig",
    "changed",
    "demo",
    "differences",
    "digest",
    "dump",
    "identity",
    "load",
    "run_dir",
]
