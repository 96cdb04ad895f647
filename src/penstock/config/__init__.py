# SPDX-License-Identifier: Apache-2.0
"""The run file: strict schemas, and a loader whose messages name file, line and fix.

Owns the shape of run.yaml, its defaults and its stored form. Builds nothing, imports no user code
and no torch; every other folder takes plain values from here through its own `build`."""

from penstock.config.algorithms import AlgorithmConfig, CorrectionConfig
from penstock.config.dataflow import DataflowConfig, LeaseConfig, SurvivorsClosing
from penstock.config.hosts import HostConfig
from penstock.config.loader import demo_config, load, load_stored
from penstock.config.models import LoraConfig, ModelConfig
from penstock.config.pipeline import PipelineConfig, PipelineStageConfig
from penstock.config.resolved import config_changes, dump, identity, identity_changes, run_dir
from penstock.config.rules import RuleConfig
from penstock.config.run import RunConfig
from penstock.config.run_sections import PolicyConfig
from penstock.config.sandbox import GrantsConfig, LimitsConfig, SandboxConfig
from penstock.config.sources import CommandWorkflow, DataConfig, SourceConfig
from penstock.config.stages import StageConfig
from penstock.config.tools import ToolServerConfig
from penstock.config.trainer import SamplingConfig, TrainingConfig
from penstock.types import Hook

__all__ = [
    "AlgorithmConfig",
    "CommandWorkflow",
    "CorrectionConfig",
    "DataConfig",
    "DataflowConfig",
    "GrantsConfig",
    "Hook",
    "HostConfig",
    "LeaseConfig",
    "LimitsConfig",
    "LoraConfig",
    "ModelConfig",
    "PipelineConfig",
    "PipelineStageConfig",
    "PolicyConfig",
    "RuleConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SourceConfig",
    "StageConfig",
    "SurvivorsClosing",
    "ToolServerConfig",
    "TrainingConfig",
    "config_changes",
    "demo_config",
    "dump",
    "identity",
    "identity_changes",
    "load",
    "load_stored",
    "run_dir",
]
