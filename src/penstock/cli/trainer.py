# SPDX-License-Identifier: Apache-2.0
"""`penstock trainer`: the trainer of one policy."""

from __future__ import annotations

from pathlib import Path


def trainer(*, run_dir: Path, policy: str | None = None) -> int:
    """Train one policy until its last step; exit code 0 means that it is trained.

    Parameters
    ----------
    run_dir
        The run folder.
    policy
        Which policy; may be left out when the run has one.
    """
    from penstock.cli.service import enter, leave, only_policy, token_for
    from penstock.wire.auth import Role

    folder, config, endpoints = enter(run_dir, "trainer" if policy is None else f"trainer-{policy}")
    name = only_policy(config, policy)
    token = token_for(folder, config, Role.TRAINER)
    from penstock.trainer.service import run_trainer  # torch loads here

    code = run_trainer(
        config,
        name,
        url=endpoints.dataflow,
        token=token,
        run_dir=folder.path,
        store_root=folder.weights,
    )
    leave(code)
