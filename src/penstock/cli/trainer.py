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
    from penstock.cli.service_process import enter, leave, only_policy, token_for
    from penstock.config import identity
    from penstock.errors import ForkRefused
    from penstock.fleet.launchers.local import EXIT_FENCED, EXIT_REFUSED
    from penstock.fleet.services import TOKEN
    from penstock.trainer.pipeline.builtin import chain_of
    from penstock.trainer.ranks.supervisor import membership, run_ranks
    from penstock.wire.auth import Role

    folder, config, endpoints = enter(run_dir, "trainer" if policy is None else f"trainer-{policy}")
    name = only_policy(config, policy)
    adopted = folder.adopted()  # what a launcher agreed to needs no second asking
    is_adopted = adopted is not None and identity(adopted) == identity(config)
    token = token_for(folder, config, Role.TRAINER)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    member = membership(os.environ)
    num_ranks = chain_of(config, name).num_ranks
    if member is None and num_ranks > 1:
        again = [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]]
        env = {**os.environ, TOKEN: token}
        final = (EXIT_FENCED, EXIT_REFUSED)
        leave(run_ranks(again, num_ranks, env=env, is_stopping=stopping.is_set, final_codes=final))
    from penstock.trainer.service import run_trainer  # torch loads here

    try:
        code = run_trainer(
            config,
            name,
            url=endpoints.dataflow,
            token=token,
            run_dir=folder.path,
            store_root=folder.weights,
            member=member,
            accepts_changes=accept_changes or is_adopted,
            is_stopping=stopping.is_set,
        )
    except ForkRefused as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_REFUSED
    leave(code)
