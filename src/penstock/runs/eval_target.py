# SPDX-License-Identifier: Apache-2.0
"""Resolves what `penstock eval` and `penstock solve` are pointed at: a run, a config file, a model
folder, or an OpenAI-compatible server.

Owns the config of a model without a run: one call per question, unless a workflow is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import run_dir
from penstock.errors import ConfigError
from penstock.evals.recording import FOLDER
from penstock.fleet.run_folder import RunFolder
from penstock.hub import TINY_QWEN3
from penstock.runs.chosen_weights import ChosenWeights, chosen_weights
from penstock.runs.local_gateway import TextServerAddress
from penstock.runs.public import load_config
from penstock.runs.result_files import LOCAL
from penstock.runs.target import RunTarget, read_target

POLICY = "policy"
WORKFLOW = "single_turn"
MAX_TOKENS = 2048
"""Most tokens of an answer of a model without a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTarget:
    """A model, and how it is asked."""

    run: RunTarget
    model: str
    """What it is, for people."""
    policy: str
    version: int
    weights: ChosenWeights | None
    """None for a server."""
    server: TextServerAddress | None
    results: Path
    """Where its results go unless the user says otherwise."""


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def read_eval_target(
    where: str,
    *,
    version: int | None = None,
    policy: str | None = None,
    model: str | None = None,
    api_key: str = "",
    workflow: str | None = None,
) -> EvalTarget:
    """`model` and `api_key`: of a server. `workflow`: for a model without a run."""
    if is_url(where):
        return _server(where, version, model, api_key, workflow or WORKFLOW)
    if model is not None:
        raise ConfigError("--model names a model of a server; give its URL, such as http://…/v1")
    path = Path(where)
    if (path / "config.yaml").is_file() or path.is_file():
        if workflow is not None:
            raise ConfigError("--workflow is for a model without a run; a run has its own")
        return _of_run(read_target(path), path, policy, version)
    if version is not None:
        raise ConfigError(f"--version {version}: {where} is not a run, so it has only one version")
    run = _made_up(where, workflow or WORKFLOW, engine="hf")
    return EvalTarget(
        run=run,
        model=where,
        policy=POLICY,
        version=0,
        weights=chosen_weights(run, POLICY, None),
        server=None,
        results=Path(FOLDER) / f"{_file_name(where)}.json",
    )


def _of_run(run: RunTarget, path: Path, policy: str | None, version: int | None) -> EvalTarget:
    name = _policy(run, policy)
    weights = chosen_weights(run, name, version)
    file = f"{name}@{weights.number}.json"
    is_folder = path.is_dir()
    results = run.folder.path / FOLDER / LOCAL / file if is_folder else Path(FOLDER) / file
    return EvalTarget(
        run=run,
        model=run.config.name,
        policy=name,
        version=weights.number,
        weights=weights,
        server=None,
        results=results,
    )


def _policy(run: RunTarget, policy: str | None) -> str:
    trained = list(run.config.trained)
    if policy is None and len(trained) == 1:
        return trained[0]
    if policy is None or policy not in run.config.models:
        names = ", ".join(run.config.models)
        raise ConfigError(
            f"run {run.config.name} has the policies {names}; choose one with --policy"
        )
    return policy


def _server(
    url: str, version: int | None, model: str | None, api_key: str, workflow: str
) -> EvalTarget:
    if model is None:
        raise ConfigError(f"{url} may serve several models; name one with --model")
    if version is not None:
        raise ConfigError("--version is for a run; a server has no versions")
    return EvalTarget(
        run=_made_up(TINY_QWEN3, workflow, engine="scripted"),
        model=f"{model} at {url}",
        policy=POLICY,
        version=0,
        weights=None,
        server=TextServerAddress(base_url=url, model=model, api_key=api_key),
        results=Path(FOLDER) / f"{_file_name(model)}.json",
    )


def _made_up(init: str, workflow: str, *, engine: str) -> RunTarget:
    """A run of this model alone. Its source is never read."""
    config: dict[str, Any] = {
        "name": "eval",
        "models": {POLICY: {"init": init, "engine": engine}},
        "sources": [{"name": "unused", "task": "penstock.tasks.reverse"}],
        "reward": "penstock.tasks.reverse:reward",
        "workflow": workflow,
        "sampling": {"max_tokens": MAX_TOKENS},
        "algorithm": {"name": "grpo", "num_generations": 2},
        "training": {"steps": 1, "groups_per_batch": 1},
    }
    loaded = load_config(config)
    folder = RunFolder(run_dir(loaded))
    return RunTarget(config=loaded, folder=folder, python_path=(str(Path.cwd()),))


def _file_name(model: str) -> str:
    """A name without separators."""
    kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in model)
    return kept.strip("-.") or "model"
