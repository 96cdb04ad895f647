# SPDX-License-Identifier: Apache-2.0
"""The run file: strict schemas, and a loader that names file, line and cure of every mistake.

Owns the shape of run.yaml, its defaults and its stored form. Builds nothing, imports no user code
and no torch; every other folder takes plain values from here through its own `build`."""

from penstock.config.dataflow import (
    ClosingConfig,
    DataflowConfig,
    Hook,
    LeaseConfig,
    PolicyDataflowConfig,
    RuleConfig,
    SurvivorsClosing,
    SurvivorsConfig,
)
from penstock.config.loader import demo, load
from penstock.config.resolved import differences, digest, dump, run_dir
from penstock.config.run import (
    CommandWorkflow,
    ModelConfig,
    PolicyConfig,
    RunConfig,
    SourceConfig,
    WorkflowConfig,
)
from penstock.config.trainer import AlgorithmConfig, SamplingConfig, TrainingConfig

__all__ = [
    "AlgorithmConfig",
    "ClosingConfig",
    "CommandWorkflow",
    "DataflowConfig",
    "Hook",
    "LeaseConfig",
    "ModelConfig",
    "PolicyConfig",
    "PolicyDataflowConfig",
    "RuleConfig",
    "RunConfig",
    "SamplingConfig",
    "SourceConfig",
    "SurvivorsClosing",
    "SurvivorsConfig",
    "TrainingConfig",
    "WorkflowConfig",
    "demo",
    "differences",
    "digest",
    "dump",
    "load",
    "run_dir",
]
