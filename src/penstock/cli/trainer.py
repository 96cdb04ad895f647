# SPDX-License-Identifier: Apache-2.0
"""`penstock trainer`: the trainer of one policy."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def trainer(*, run_dir: Path, policy: str | None = None, accept_changes: bool = False) -> int:
    """Train one policy until its last step; exit code 0 means that it is trained.

    SIGTERM lets it finish its step and save a checkpoint; it then exits with 143.

    Parameters
    ----------
    run_dir
        The run folder.
    policy
        Which policy; may be left out when the run has one.
    accept_changes
        Go on from a checkpoint although the config differs from the one it was saved under.
    """
    from penstock.cli.service_process import enter_run, exit_now, resolve_policy, service_token
    from penstock.config import identity
    from penstock.errors import ResumeRejected
    from penstock.fleet.launchers.local import EXIT_FENCED, EXIT_RESUME_REJECTED
    from penstock.fleet.services import TOKEN_ENV
    from penstock.trainer.pipeline.builtin import chain_of
    from penstock.trainer.ranks.supervisor import read_rank_env, run_ranks
    from penstock.wire.auth import Role

    folder, config, endpoints = enter_run(
        run_dir, "trainer" if policy is None else f"trainer-{policy}"
    )
    name = resolve_policy(config, policy)
    last_started_config = (
        folder.last_started_config()
    )  # what a launcher agreed to needs no second asking
    is_adopted = last_started_config is not None and identity(last_started_config) == identity(
        config
    )
    token = service_token(folder, config, Role.TRAINER)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    rank_env = read_rank_env(os.environ)
    num_ranks = chain_of(config, name).num_ranks
    if rank_env is None and num_ranks > 1:
        command = [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]]
        env = {**os.environ, TOKEN_ENV: token}
        final = (EXIT_FENCED, EXIT_RESUME_REJECTED)
        exit_now(
            run_ranks(command, num_ranks, env=env, is_stopping=stopping.is_set, final_codes=final)
        )
    from penstock.trainer.service import run_trainer  # torch loads here

    try:
        code = run_trainer(
            config,
            name,
            url=endpoints.dataflow,
            token=token,
            run_dir=folder.path,
            store_root=folder.weights,
            rank_env=rank_env,
            accepts_changes=accept_changes or is_adopted,
            is_stopping=stopping.is_set,
        )
    except ResumeRejected as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_RESUME_REJECTED
    exit_now(code)
