# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on other hosts than the trainer, over real HTTP: reward model, process scores and
reference as workers with scripted scorers, and the advantages computed from their columns."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path

import numpy as np
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
)
from tests.contract.test_stages import roll_out
from tests.unit.trainer.stage_makers import OWN, of, stage

from penstock.config import PipelineConfig, PipelineStageConfig, RunConfig
from penstock.config.stages import stage_subject
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.sealed_batches import SealedBatches
from penstock.dataflow.service.trainers.messages import BatchRequest
from penstock.runs.service_process import find_service_stage
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.pipeline.credits import group_advantage
from penstock.trainer.pipeline.layout import Layout
from penstock.trainer.pipeline.run import bind
from penstock.trainer.pipeline.stage_worker import serve
from penstock.wire.auth import Role

PLACED = {"type": "infer", "place": ("score",)}
REWARD = stage("judge", "turns", "reward", **PLACED, role="reward", fn=f"{OWN}:reward_of_length")
PRM = stage("prm", "turns reward", "step_scores", **PLACED, role="prm", fn=f"{OWN}:step_scores")
REFERENCE = stage(
    "reference",
    "turns",
    "reference_logprobs",
    **PLACED,
    role="reference",
    fn=f"{OWN}:reference",
    on="admitted",
)
STEPS = stage(
    "advantage",
    "reward step_scores",
    "advantage",
    role="advantage",
    fn="penstock.trainer.pipeline.credits:step_advantage",
)


def with_services(*services: PipelineStageConfig) -> RunConfig:
    config = small_config(groups_per_batch=2, num_generations=2, steps=3)
    pipeline = PipelineConfig(stages=(*services, STEPS, of("grpo")[-1]))
    values = {**config.model_dump(), "pipeline": pipeline.model_dump(), "reward": None}
    return RunConfig.model_validate(values)


async def serve_while_rolling_out(
    running: RunningDataflow, config: RunConfig, num_slots: int
) -> None:
    """Run a worker of every service until the rows are delivered and the batch can be sealed."""
    assert config.pipeline is not None
    tokens = {
        service.id: running.token(Role.STAGE, subject=stage_subject(service.id))
        for _, service in config.pipeline.services
    }
    workers = [
        asyncio.create_task(serve(running.url, token, *find_service_stage(config, id)))
        for id, token in tokens.items()
    ]
    try:
        await asyncio.sleep(1.2)  # a policy with a stage without workers gets no work
        assert await roll_out(running, num_slots=num_slots) == num_slots
        trainer = await asyncio.to_thread(FakeTrainer, running)
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=trainer.incarnation, wait_s=20.0)
        answer = await asyncio.to_thread(trainer.client.batch, request)
        assert answer.manifest is not None, "no batch: a service wrote nothing"
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def test_columns_of_three_services_reach_the_batch_and_the_advantages(tmp_path: Path) -> None:
    config = with_services(REWARD, PRM, REFERENCE)
    with dataflow(tmp_path, config) as running:
        first = FakeTrainer(running)
        asyncio.run(serve_while_rolling_out(running, config, 4))
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=first.incarnation + 1)
        manifest = first.client.batch(request).manifest
        assert manifest is not None
        rows = first.client.rows(POLICY, 1).rows
        batch = assemble(manifest, rows, POLICY, 16)
    np.testing.assert_array_equal(batch.row_columns["reward"], [2.0, 2.0, 2.0, 2.0])
    mask = batch.samples.mask_T
    np.testing.assert_allclose(
        batch.token_columns["reference_logprobs"][mask], batch.samples.logprobs_T[mask] - 0.125
    )
    slot_T = batch.rows_T % 2
    scores_T = batch.token_columns["step_scores"]
    np.testing.assert_allclose(scores_T[mask], np.where(slot_T == 0, 1.0, 2 / 3)[mask], rtol=1e-6)
    credit = bind(chain_of(config, POLICY).stages[0])(batch)
    assert isinstance(credit, Batch)
    sign_T = np.where(mask, np.where(slot_T == 0, 1.0, -1.0), 0.0)
    np.testing.assert_allclose(
        credit.token_columns["advantage"], sign_T * math.sqrt(0.5), rtol=1e-3
    )
    without = group_advantage(Layout.of(batch), reward=batch.row_columns["reward"])
    assert not without["advantage"].any(), "all are rewarded alike: the scores tell them apart"
    with contextlib.closing(open_recorded_run(tmp_path / "ledger")) as recorded:
        again = SealedBatches(recorded, tmp_path / "ledger", POLICY).rows(manifest)
    assert tuple(again) == rows, "as a replay reads them"
