# SPDX-License-Identifier: Apache-2.0
"""`penstock stage`: a worker for a pipeline stage outside the trainer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.config.stages import PipelineStageConfig
    from penstock.trainer.pipeline.stage_worker import Scorer


def stage(
    run: Path,
    id: str,
    /,
    *,
    url: str | None = None,
    token_file: Path | None = None,
    rows: int = 16,
) -> int:
    """Process rows of a pipeline stage until SIGTERM or Ctrl-C. Start several workers to scale.

    Args:
        run: Run folder, or its config file.
        id: Stage id; the stage has `place` in the config, or it is the built-in `trusted-reward`.
        url: URL of the run's dataflow, from another machine; needs a token.
        token_file: With --url: file with a token for `stage-ID`, from `penstock token RUN --role
            stage --name stage-ID --out FILE`; by default the one that PENSTOCK_TOKEN_FILE names.
            Renewed tokens are written back to it. /dev/stdin works too.
        rows: Number of rows to lease at a time.
    """
    return serve_stage(run, id, url=url, token_file=token_file, rows=rows)


def serve_stage(
    run: Path,
    id: str,
    *,
    url: str | None = None,
    token_file: Path | None = None,
    rows: int = 16,
    model: str | None = None,
) -> int:
    """As `penstock stage`; `model` replaces the one that the config names."""
    import uvloop

    from penstock.cli.output import print_note
    from penstock.cli.service_options import check_url, require_token
    from penstock.config.stages import stage_subject
    from penstock.config.trust import SCORE_STAGE
    from penstock.errors import ConfigError
    from penstock.fleet.processes import exit_with_parent
    from penstock.observe import logs
    from penstock.runs.credential_upkeep import with_upkeep
    from penstock.runs.scoring import run_score_stage
    from penstock.runs.service_process import (
        add_import_paths,
        find_service_stage,
        service_token,
    )
    from penstock.runs.target import find_run_folder, read_target
    from penstock.trainer.pipeline.stage_worker import serve
    from penstock.wire.auth import Role
    from penstock.wire.trust import refuse_clear_text

    exit_with_parent()
    logs.configure(f"stage-{id}")
    target = read_target(run)
    add_import_paths((*target.python_path, str(Path.cwd())))
    if id == SCORE_STAGE and target.config.has_score_stage:
        if url is not None:
            raise ConfigError(f"stage {id} needs the run folder; start it there, without --url")
        folder = find_run_folder(run)
        token = service_token(folder, target.config.name, Role.STAGE, subject=stage_subject(id))
        print_note("stage trusted-reward: computing rewards on the trusted side")
        work, urls = (
            run_score_stage(target.config, folder, token),
            [folder.trusted_endpoints().dataflow],
        )
        uvloop.run(_until_signalled(with_upkeep(work, token, urls=urls)))
        return 0
    found, terms = find_service_stage(target.config, id)
    scorer = _load_scorer(target.config, found, run, url, model)
    if url is None:
        folder = find_run_folder(run)
        url = folder.trusted_endpoints().dataflow
        token = service_token(folder, target.config.name, Role.STAGE, subject=stage_subject(id))
    else:
        refuse_clear_text(check_url(url, example="http://127.0.0.1:18080"))
        token = require_token(token_file, role="stage")
    what = found.fn or f"model {model or found.model}"
    print_note(f"stage {id}: running {what} on rows from {url}")
    work = serve(url, token, found, terms, max_rows=rows, scorer=scorer)
    uvloop.run(_until_signalled(with_upkeep(work, token, urls=[url])))
    return 0


def _load_scorer(
    config: RunConfig, stage: PipelineStageConfig, run: Path, url: str | None, model: str | None
) -> Scorer | None:
    """The scorer of a stage with a model; None for a stage with a function."""
    from penstock.errors import ConfigError
    from penstock.runs.target import find_run_folder

    if stage.fn is not None:
        return None
    if url is not None:
        raise ConfigError(
            f"stage {stage.id} runs a model on text, which needs the tokenizers of the run folder; "
            "start it there, without --url"
        )
    from penstock.runs.prm.scoring import model_scorer

    return model_scorer(config, stage, find_run_folder(run), model)


async def _until_signalled(work: Coroutine[None, None, None]) -> None:
    """Cancel on a signal; the worker then returns the rows it holds."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task
