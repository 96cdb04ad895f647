# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a GPU each: start this on both, with what torchrun sets in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.gpu.machines import RANK_VARIABLES, needs_gpus, needs_two_hosts
from tests.gpu.processes import environment, run_alone

pytestmark = [*needs_gpus(1), needs_two_hosts()]
TOLERANCE = 2e-3

Record = Callable[[str, object], None]


def test_ranks_of_two_hosts_learn_what_one_rank_learns(
    tmp_path: Path, record_property: Record
) -> None:
    from tests.gpu.training_jobs import SMALL, write_model

    folder = write_model(tmp_path, SMALL)
    plain = {k: v for k, v in environment().items() if k not in (*RANK_VARIABLES, "LOCAL_RANK")}
    alone = run_alone("train", folder, plain)
    together = run_alone("train", folder, environment(LOCAL_RANK="0"))
    pairs = zip(together["curve"], alone["curve"], strict=True)
    worst = max(abs(one - other) for both in pairs for one, other in zip(*both, strict=True))
    record_property("rank", os.environ["RANK"])
    record_property("worst_difference", worst)
    assert worst < TOLERANCE
