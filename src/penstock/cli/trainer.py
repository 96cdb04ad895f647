# SPDX-License-Identifier: Apache-2.0
"""`penstock trainer`: the trainer of one policy."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType


def trainer(
    *,
    run_dir: Path,
    policy: str | None = None,
    url: str | None = None,
    host: str | None = None,
    accept_changes: bool = False,
) -> int:
    """Train one policy until its last step; exit code 0 means that training is complete. A frozen
    policy is published, and nothing else.

    On SIGTERM it finishes its step, saves a checkpoint and exits with 143.

    Args:
        run_dir: Run folder.
        policy: Policy to train; optional if the run has only one.
        url: URL of the dataflow service, if this host reaches it at another one than the run's.
        host: This machine's name under `hosts`, for a trainer on several hosts; start it on each of
            them, with the run folder on a file system that they share.
        accept_changes: Resume from a checkpoint even if the config has changed since it was saved.
    """
    from penstock.cli.service_options import check_url, exit_now, run_per_rank
    from penstock.config import identity
    from penstock.errors import ResumeRejected
    from penstock.fleet.launchers.local import EXIT_FENCED, EXIT_RESUME_REJECTED
    from penstock.fleet.service_tokens import TOKEN_FILE_ENV
    from penstock.runs.service_process import enter_run, resolve_policy, service_token
    from penstock.runs.trainer_host import ranks_here, visible_devices
    from penstock.trainer.ranks.supervisor import read_rank_env
    from penstock.wire.auth import Role
    from penstock.wire.trust import refuse_clear_text

    folder, config, endpoints = enter_run(
        run_dir, "trainer" if policy is None else f"trainer-{policy}"
    )
    name = resolve_policy(config, policy)
    started = folder.last_started_config()
    has_accepted = started is not None and identity(started) == identity(config)  # by the launcher
    if url is not None:
        refuse_clear_text(check_url(url, example="https://host:18080"))
    token_file = os.environ.get(TOKEN_FILE_ENV)
    token = service_token(folder, config.name, Role.TRAINER, subject=f"trainer-{name}")
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    if config.models[name].frozen:
        from penstock.trainer.frozen import publish_frozen

        publish_frozen(
            config, name, url=url or endpoints.dataflow, token=token, store_root=folder.weights
        )
        exit_now(0)
    rank_env = read_rank_env(os.environ)
    if rank_env is None and (ranks := ranks_here(config, name, host)).num_ranks > 1:
        own = {TOKEN_FILE_ENV: token_file} if token_file else {}
        code = run_per_rank(
            ranks,
            final_codes=(EXIT_FENCED, EXIT_RESUME_REJECTED),
            is_stopping=stopping.is_set,
            env={**own, **visible_devices(config, name)},
        )
        exit_now(code)
    from penstock.trainer.service import run_trainer  # torch loads here

    try:
        code = run_trainer(
            config,
            name,
            url=url or endpoints.dataflow,
            token=token,
            run_dir=folder.path,
            store_root=folder.weights,
            rank_env=rank_env,
            accepts_changes=accept_changes or has_accepted,
            is_stopping=stopping.is_set,
        )
    except ResumeRejected as error:
        from penstock.cli.output import print_note

        print_note(f"error: {error}")
        code = EXIT_RESUME_REJECTED
    exit_now(code)
