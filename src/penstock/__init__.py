# SPDX-License-Identifier: Apache-2.0
"""penstock: reinforcement learning of language-model agents as a flow of data.

The names in `__all__` are the public API; docs/reference/stability.md says how they may change.
Each is imported when it is first used. Importing this package imports nothing else; torch in
particular stays out until a trainer or an in-process engine starts.
"""

TYPE_CHECKING = False  # type checkers take it for true; importing `typing` costs more than all here

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.dataflow.client.rows import RowsClient
    from penstock.dataflow.rules import Admit, Curate, Mix, Replay, Route, Rule, Select
    from penstock.errors import BudgetExceeded, ConfigError, PenstockError
    from penstock.gateway.budgets import Budget
    from penstock.gateway.generation import Completion, GenerationRequest
    from penstock.gateway.model_calls import Answer
    from penstock.rollout.context import Context
    from penstock.rollout.engine import Engine, EngineSettings
    from penstock.rollout.rewards.decorator import reward
    from penstock.rollout.workflow import Workflow
    from penstock.runs.compare import compare
    from penstock.runs.control_client import ControlClient
    from penstock.runs.export.model import export_gguf, export_model
    from penstock.runs.export.push import push
    from penstock.runs.export.trajectories import export_trajectories, read_trajectories
    from penstock.runs.history import open_run
    from penstock.runs.public import check, fork, load_config, replay, run
    from penstock.scorers.judge import judged
    from penstock.trainer.client import VersionsClient
    from penstock.trainer.losses.tokens import TokenLoss, Tokens
    from penstock.trainer.model_folders import init_model
    from penstock.trainer.pipeline.layout import Layout, RowColumn, Stage, TokenColumn
    from penstock.types import DropReason, Outcome, Task, Trajectory, Turn, Version

__version__ = "0.1.0"

__all__ = [
    "Admit",
    "Answer",
    "Budget",
    "BudgetExceeded",
    "Completion",
    "ConfigError",
    "Context",
    "ControlClient",
    "Curate",
    "DropReason",
    "Engine",
    "EngineSettings",
    "GenerationRequest",
    "Layout",
    "Mix",
    "Outcome",
    "PenstockError",
    "Replay",
    "Route",
    "RowColumn",
    "RowsClient",
    "Rule",
    "RunConfig",
    "Select",
    "Stage",
    "Task",
    "TokenColumn",
    "TokenLoss",
    "Tokens",
    "Trajectory",
    "Turn",
    "Version",
    "VersionsClient",
    "Workflow",
    "__version__",
    "check",
    "compare",
    "export_gguf",
    "export_model",
    "export_trajectories",
    "fork",
    "init_model",
    "judged",
    "load_config",
    "open_run",
    "push",
    "read_trajectories",
    "replay",
    "reward",
    "run",
]

_HOMES = {
    "penstock.config": ("RunConfig",),
    "penstock.dataflow.client.rows": ("RowsClient",),
    "penstock.dataflow.rules": ("Admit", "Curate", "Mix", "Replay", "Route", "Rule", "Select"),
    "penstock.errors": ("BudgetExceeded", "ConfigError", "PenstockError"),
    "penstock.gateway.budgets": ("Budget",),
    "penstock.gateway.generation": ("Completion", "GenerationRequest"),
    "penstock.gateway.model_calls": ("Answer",),
    "penstock.rollout.context": ("Context",),
    "penstock.rollout.engine": ("Engine", "EngineSettings"),
    "penstock.rollout.rewards.decorator": ("reward",),
    "penstock.rollout.workflow": ("Workflow",),
    "penstock.runs.compare": ("compare",),
    "penstock.runs.control_client": ("ControlClient",),
    "penstock.runs.export.model": ("export_gguf", "export_model"),
    "penstock.runs.export.push": ("push",),
    "penstock.runs.export.trajectories": ("export_trajectories", "read_trajectories"),
    "penstock.runs.history": ("open_run",),
    "penstock.runs.public": ("check", "fork", "load_config", "replay", "run"),
    "penstock.scorers.judge": ("judged",),
    "penstock.trainer.client": ("VersionsClient",),
    "penstock.trainer.losses.tokens": ("TokenLoss", "Tokens"),
    "penstock.trainer.model_folders": ("init_model",),
    "penstock.trainer.pipeline.layout": ("Layout", "RowColumn", "Stage", "TokenColumn"),
    "penstock.types": ("DropReason", "Outcome", "Task", "Trajectory", "Turn", "Version"),
}
"""Where each public name is defined."""


if not TYPE_CHECKING:  # so that they report a name that does not exist

    def __getattr__(name: str) -> object:
        import importlib

        for module, names in _HOMES.items():
            if name in names:
                found = getattr(importlib.import_module(module), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
