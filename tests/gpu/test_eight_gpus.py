# SPDX-License-Identifier: Apache-2.0
"""Several GPUs of one host: ranks over NCCL, and devices dealt to processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gpu.machines import NUM_GPUS, needs_gpus
from tests.gpu.processes import environment, run_alone, run_together

from penstock.config import demo_config
from penstock.fleet.device_plan import deal_devices
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import local_services
from penstock.wire.auth import Signer

pytestmark = needs_gpus(2)
TOLERANCE = 2e-3
"""Of losses and gradient norms in float32, whose sums have another order."""
SHOW_UUIDS = (
    "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) "
    "for i in range(torch.cuda.device_count())]))"
)

Record = Callable[[str, object], None]


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(8, marks=needs_gpus(8))], ids="{} ranks".format
)
def test_ranks_over_nccl_learn_what_one_rank_learns(
    num_ranks: int, tmp_path: Path, record_property: Record
) -> None:
    from tests.gpu.training_jobs import SMALL, write_model

    folder = write_model(tmp_path, SMALL)
    alone = run_alone("train", folder)
    together = run_together("train", folder, num_ranks)
    assert len({one["uuid"] for one in together}) == num_ranks, "one GPU for each rank"
    worst = 0.0
    for one in together:
        for (loss, norm), (expected_loss, expected_norm) in zip(
            one["curve"], alone["curve"], strict=True
        ):
            worst = max(worst, abs(loss - expected_loss), abs(norm / expected_norm - 1))
    record_property("worst_difference", worst)
    assert worst < TOLERANCE


def test_every_process_sees_the_devices_it_was_dealt(
    tmp_path: Path, record_property: Record
) -> None:
    num_engines = NUM_GPUS // 2
    model = f"{{init: builtin:tiny-qwen3, engine: vllm, engines: {num_engines}, replicas: 1}}"
    ranks = NUM_GPUS - num_engines
    config = demo_config(0, [f"models.policy={model}", f"training.parallel.dp={ranks}"])
    folder = RunFolder(tmp_path)
    Signer.create(folder.keys, config.name)
    seen: dict[str, list[str]] = {}
    for service in local_services(config, folder, deal_devices(config, NUM_GPUS)):
        if service.name in ("trainer-policy", "node-0", "dataflow"):
            visible = service.build_env()["CUDA_VISIBLE_DEVICES"]
            done = subprocess.run(
                [sys.executable, "-c", SHOW_UUIDS],
                env=environment(CUDA_VISIBLE_DEVICES=visible),
                capture_output=True,
                text=True,
                check=True,
            )
            seen[service.name] = json.loads(done.stdout)
    record_property("devices", seen)
    trainer, node = set(seen["trainer-policy"]), set(seen["node-0"])
    assert (len(trainer), len(node)) == (ranks, num_engines) and not trainer & node
    assert seen["dataflow"] == []
