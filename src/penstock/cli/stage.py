# SPDX-License-Identifier: Apache-2.0
"""`penstock stage`: a worker of a pipeline stage that is placed away from the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.config import RunConfig, StageConfig
    from penstock.config.pipeline import PipelineStageConfig


def stage(run: Path, id: str, /, *, url: str | None = None, rows: int = 16) -> int:
    """Score rows until SIGTERM or Ctrl-C; start as many workers as there is work for.

    Parameters
    ----------
    run
        The run folder, or its config file.
    id
        Which stage; it has `place` in the config.
    url
        Address of the run's dataflow, from another machine; PENSTOCK_TOKEN then holds a token of
        `penstock token RUN --role stage`.
    rows
        Rows held at a time.
    """
    import uvloop

    from penstock.cli.output import note
    from penstock.cli.service_process import add_import_paths
    from penstock.fleet.processes import exit_with_parent
    from penstock.fleet.services import TOKEN_ENV, TOKEN_TTL_S
    from penstock.observe import logs
    from penstock.runs.target import find_run_folder, read_target
    from penstock.trainer.pipeline.stage_worker import serve
    from penstock.wire.auth import Role

    exit_with_parent()
    logs.configure(f"stage-{id}")
    target = read_target(run)
    found, terms = find_service_stage(target.config, id)
    token = os.environ.pop(TOKEN_ENV, "")
    if url is None:
        folder = find_run_folder(run)
        url = folder.endpoints().dataflow
        token = token or folder.token(target.config.name, Role.STAGE, ttl_s=TOKEN_TTL_S)
    add_import_paths((*target.python_path, str(Path.cwd())))
    note(f"stage {id}: {found.fn} on rows of {url}")
    uvloop.run(_until_signalled(serve(url, token, found, terms, max_rows=rows)))
    return 0


def find_service_stage(config: RunConfig, id: str) -> tuple[PipelineStageConfig, StageConfig]:
    """The stage of the pipeline, and its terms in the ledger."""
    from penstock.config.base import did_you_mean
    from penstock.errors import ConfigError

    services = {stage.id: stage for _, stage in config.pipeline.services} if config.pipeline else {}
    if id not in services:
        near = did_you_mean(id, tuple(services))
        known = ", ".join(services) or "none; give a stage `place` in the config"
        fix = f'did you mean "{near}"?' if near else f"stages placed elsewhere: {known}"
        raise ConfigError(f"no stage {id!r} runs away from the trainer; {fix}")
    terms = next(stage for stage in config.dataflow.stages if stage.name == id)
    return services[id], terms


async def _until_signalled(work: Coroutine[None, None, None]) -> None:
    """Rows that are held go back when a signal comes."""
    import asyncio
    import signal
    from contextlib import suppress

    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
