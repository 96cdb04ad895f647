# SPDX-License-Identifier: Apache-2.0
"""The verbs of the public API: load a config, run, check, fork, replay.

Owns what they accept: a config, a path or a mapping. Prints nothing, installs no signal handlers
and does nothing that the commands of the same names do not do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from penstock.config import RunConfig, dump, load, load_stored, run_dir
from penstock.config.loader import parse
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.target import RunTarget, find_run_folder, read_target

if TYPE_CHECKING:
    from penstock.runs.launch import Display, LaunchResult, StopRequest
    from penstock.runs.replay import ReplayComparison

ConfigSource = RunConfig | Mapping[str, Any] | str | Path
"""What describes a run: a config, its values as a mapping, a config file, or a run folder."""


def load_config(config: ConfigSource, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a config without running anything; ConfigError lists every mistake.

    Args:
        config: A config file, a run folder, or the same values as a mapping.
        overrides: Settings that override it, such as `training.steps=20`.
    """
    if isinstance(config, str | Path):
        path = Path(config)
        if path.is_dir():
            return load_stored(RunFolder.open_existing(path).config_file, overrides)
        return load(path, overrides)
    if isinstance(config, RunConfig):
        return parse(dump(config), origin="config", overrides=overrides) if overrides else config
    try:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"config: holds a value that a run file cannot hold ({' '.join(str(error).split())}); "
            "use text, numbers, lists and mappings, and name functions as module:function"
        ) from None
    return parse(text, origin="config", overrides=overrides)


def run(
    config: ConfigSource,
    *,
    overrides: Sequence[str] = (),
    accept_changes: bool = False,
    display: Display | None = None,
    stop: StopRequest | None = None,
) -> LaunchResult:
    """Start or resume a run on this machine and wait until its last step, as `penstock run` does.

    The run's processes find your modules next to the config file; without a file, in the working
    directory and next to your script. An exception, such as Ctrl-C, ends all processes; no data is
    lost, and the same call resumes the run.

    Args:
        config: A config, its values as a mapping, a config file, or a run folder to resume.
        overrides: Settings that override it, such as `training.steps=20`.
        accept_changes: Resume even if the config or dataset has changed since the run was started.
        display: Receives the state of the run about twice a second.
        stop: Set its `number` from another thread to stop the run gracefully.
    """
    from penstock.runs.launch import launch
    from penstock.runs.preflight import ensure_startable

    target = _target(config, overrides)
    return launch(
        target.config,
        target.folder,
        python_path=target.python_path,
        display=display,
        stop=stop,
        sources=ensure_startable(target),
        accept_changes=accept_changes,
    )


def check(config: ConfigSource, *, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Every problem that would keep this run from working here, as `penstock check` finds them;
    empty if there is none. Calls your code once and computes one loss, in a separate process.

    Args:
        config: A config, its values as a mapping, a config file, or a run folder.
        overrides: Settings that override it, such as `training.steps=20`.
    """
    from penstock.runs.preflight import check_run

    try:
        target = _target(config, overrides)
    except ConfigError as error:
        return tuple(str(error).splitlines())
    return tuple(map(str, check_run(target).problems))


def fork(
    run: str | Path, step: int, *, name: str | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Create a new run folder next to `run` that starts from its step `step`, as `penstock fork`
    does. Returns the new folder; `penstock.run(folder)` starts it.

    Args:
        run: Run folder, or its config file; running or finished.
        step: Step to start from.
        name: Name of the new run; by default NAME-fork-STEP.
        overrides: Settings that differ in the new run, such as `training.learning_rate=1e-4`.
    """
    from penstock.runs.fork import fork_run

    folder, _ = fork_run(find_run_folder(Path(run)), overrides, step, name)
    return folder.path


def replay(run: str | Path, step: int, *, policy: str | None = None) -> ReplayComparison:
    """Recompute a training step from its sealed batch and compare it with the published version, as
    `penstock replay` does. `is_equal` of the result says whether every bit matches.

    Args:
        run: Run folder, or its config file; running or finished.
        step: Step to recompute.
        policy: Policy to recompute; optional if the run has only one.
    """
    from penstock.runs.replay import num_trainer_ranks, replay_and_compare

    folder = find_run_folder(Path(run))
    if (num_ranks := num_trainer_ranks(folder, policy)) > 1:
        raise ConfigError(
            f"{folder.path} was trained by {num_ranks} ranks, and a replay needs as many "
            f"processes; use the command: penstock replay {folder.path} {step}"
        )
    found = replay_and_compare(folder, step, policy)
    assert found is not None, "only ranks other than 0 have no result"
    return found


def _target(config: ConfigSource, overrides: Sequence[str]) -> RunTarget:
    if isinstance(config, str | Path):
        return read_target(Path(config), overrides)
    loaded = load_config(config, overrides=overrides)
    return RunTarget(
        config=loaded, folder=RunFolder(run_dir(loaded)), python_path=_caller_folders()
    )


def _caller_folders() -> tuple[str, ...]:
    """The working directory, and the folder of the caller's script."""
    script = Path(sys.path[0] if sys.path else "").absolute()
    return tuple(dict.fromkeys([str(Path.cwd()), *([str(script)] if script.is_dir() else [])]))
