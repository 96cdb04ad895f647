# SPDX-License-Identifier: Apache-2.0
"""The four `penstock prm` commands on one run: traces from its ledger, labels, a model, and scores
of its next rows over real HTTP, down to the advantages of a planted bad step."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
    trajectory,
)
from tests.unit.trainer.stage_makers import of, stage

from penstock.cli.prm import collect, label, train
from penstock.config import PipelineConfig, RunConfig
from penstock.config.stages import stage_subject
from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import BatchRequest
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.history import open_run
from penstock.runs.prm.scoring import RowScores, find_prm_stage, model_scorer
from penstock.runs.service_process import find_service_stage
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.model_folders import TINY_QWEN3, init_model
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.pipeline.run import bind
from penstock.trainer.pipeline.stage_worker import serve
from penstock.trainer.prm.step_text import text_digest
from penstock.types import FinishReason, NodeId, Trajectory, VersionSpan, log_probs, token_ids
from penstock.wire.auth import Role
from penstock.wire.codec import decode, encode

NODE = NodeId("n0")
NUM_GROUPS, NUM_ROWS = 3, 12
STEPS = stage(
    "advantage",
    "reward step_scores",
    "advantage",
    role="advantage",
    fn="penstock.trainer.pipeline.credits:step_advantage",
)
Actions = tuple[str, str]
"""What a trajectory's two turns say."""
PLANNED: Sequence[Actions] = [("ca", "da"), ("cb", "da"), ("ga", "hb"), ("ga", "ha")]
"""By slot: steps that end in b are bad."""


def with_turns(delivery: Delivery, actions: Actions, prompt: str, live: LiveVersion) -> Delivery:
    """The delivery with two turns, of which the second sees a result of the first."""
    record = decode(delivery.payload, Trajectory)
    [turn] = record.turns
    turns = tuple(
        replace(
            turn,
            parent=index - 1,
            prompt_ids=token_ids(tokens(f"{prompt}>")),
            sampled_ids=token_ids([*tokens(action), 1]),
            logprobs=log_probs([-0.5] * (len(action) + 1)),
            spans=(
                VersionSpan(
                    start=0,
                    end=len(action) + 1,
                    incarnation=live.incarnation,
                    number=live.number,
                ),
            ),
            finish=FinishReason.STOP,
        )
        for index, action in enumerate(actions)
    )
    made = replace(record, turns=turns, reward=1.0)
    return replace(delivery, payload=memoryview(encode(made)))


def tokens(text: str) -> list[int]:
    vocabulary = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghij"]
    return [vocabulary.index(letter) for letter in text]


async def roll_out(running: RunningDataflow, trainer: FakeTrainer) -> None:
    """Deliver a batch of trajectories that all succeed, with the planned steps."""
    client = NodeClient(running.url, running.node_token(NODE))
    boot_id = uuid.uuid4().hex
    live = LiveVersion(policy=POLICY, incarnation=trainer.incarnation, number=trainer.number)
    prompts: Iterator[str] = map("".join, itertools.product("abcdefghij", repeat=2))
    try:
        node = RegisterRequest(node_id=NODE, boot_id=boot_id, capacity=64, policies=())
        await client.register(node)
        await client.heartbeat(NODE, Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=(live,)))
        request = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=NODE,
            boot_id=boot_id,
            max_slots=NUM_ROWS,
            wait_s=60.0,
            live=(live,),
        )
        grants = (await client.lease(request)).grants
        assert len(grants) == NUM_ROWS
        deliveries = tuple(
            with_turns(trajectory(grant, NODE, live), PLANNED[grant.slot], prompt, live)
            for grant, prompt in zip(grants, prompts, strict=False)
        )
        body = DeliveryRequest(node_id=NODE, boot_id=boot_id, deliveries=deliveries)
        answer = await client.deliver(body)
        assert {result.status for result in answer.results} == {"stored"}
    finally:
        await client.close()


def train_batch(running: RunningDataflow, trainer: FakeTrainer) -> Batch:
    """Roll out the planned steps, and commit the batch of them."""
    asyncio.run(roll_out(running, trainer))
    seq = trainer.seq + 1
    request = BatchRequest(consumer=POLICY, seq=seq, incarnation=trainer.incarnation, wait_s=20.0)
    manifest = None
    while manifest is None:  # as long as the stage needs
        manifest = trainer.client.batch(request).manifest
    batch = assemble(manifest, trainer.client.rows(POLICY, seq).rows, POLICY, 16)
    assert trainer.step()
    return batch


def run_config(folder: Path, *, with_prm: bool) -> RunConfig:
    config = small_config(groups_per_batch=NUM_GROUPS, num_generations=4, steps=5)
    values: dict[str, Any] = config.model_dump()
    values["models"]["policy"]["init"] = str(folder / "model")
    if with_prm:
        prm = stage(
            "prm",
            "turns",
            "step_scores",
            type="infer",
            role="prm",
            fn=None,
            place=("cpu",),
            model="prm",
        )
        values["pipeline"] = PipelineConfig(stages=(prm, STEPS, of("grpo")[-1])).model_dump()
    return RunConfig.model_validate(values)


@contextmanager
def running_run(folder: Path, config: RunConfig) -> Generator[RunningDataflow]:
    """The dataflow service of the run in this folder."""
    run_folder = RunFolder(folder)
    run_folder.write_config(config)
    found = run_folder.allocate_endpoints(folder, ())
    with dataflow(folder, config, port=int(found.dataflow.rpartition(":")[2])) as running:
        yield running


@contextmanager
def process_scores(folder: Path, running: RunningDataflow, config: RunConfig) -> Generator[None]:
    """`penstock prm serve RUN` as a process, from when it scores rows."""
    command = [sys.executable, "-m", "penstock.cli.main", "prm", "serve", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        try:
            seen: list[str] = []
            while not (line := process.stderr.readline()).startswith("stage prm: running model"):
                assert line, "".join(seen)
                seen.append(line)
            yield
        finally:
            process.terminate()
            process.communicate(timeout=300)
        assert process.returncode == 0


@contextmanager
def thread_scores(folder: Path, running: RunningDataflow, config: RunConfig) -> Generator[None]:
    """What the command runs, in a thread."""
    found, terms = find_service_stage(config, "prm")
    scorer = model_scorer(config, found, RunFolder(folder))
    token = running.token(Role.STAGE, subject=stage_subject("prm"))
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        work = loop.create_task(serve(running.url, token, found, terms, scorer=scorer))
        thread = threading.Thread(target=lambda: runner.run(ended(work)))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(work.cancel)
            thread.join()


async def ended(work: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        await work


def make_model(folder: Path, said: Callable[[], dict[str, Any]]) -> None:
    """Traces of the run, labels, and version 1."""
    traces, labels = folder / "traces.jsonl", folder / "labels.jsonl"
    assert collect(folder, out=traces, json=True) == 0
    assert said()["collected"]["num_steps"] == 2 * NUM_ROWS
    program = "tests.contract.prm_teacher:label"
    assert label(traces, out=labels, program=program, json=True) == 0
    assert said()["labelled"]["num_steps"] == 2 * NUM_ROWS
    assert label(traces, out=labels, program=program, json=True) == 0
    assert said()["labelled"]["num_known"] == NUM_ROWS, "labels are kept"
    model, out = str(folder / "model"), folder / "prm"
    assert train(labels, model=model, out=out, held_out=0.3, head_only=True, json=True) == 0
    report = said()
    assert report["version"] == 1 and report["text_digest"] == text_digest()
    assert report["held_out"]["mae"] < 0.3 < report["held_out"]["constant_mae"]


@pytest.mark.parametrize(
    "scores", [thread_scores, pytest.param(process_scores, marks=pytest.mark.slow)]
)
def test_the_four_commands_on_one_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scores: Callable[..., AbstractContextManager[None]],
) -> None:
    init_model(TINY_QWEN3, tmp_path / "model", seed=0)
    with running_run(tmp_path, run_config(tmp_path, with_prm=False)) as running:
        train_batch(running, FakeTrainer(running))
    make_model(tmp_path, lambda: json.loads(capsys.readouterr().out.splitlines()[-1]))
    config = run_config(tmp_path, with_prm=True)
    with running_run(tmp_path, config) as running, scores(tmp_path, running, config):
        batch = train_batch(running, FakeTrainer(running))
    credit = bind(chain_of(config, POLICY).stages[0])(batch)
    assert isinstance(credit, Batch)
    is_bad_T = planted(batch)
    advantages_T, mask_T = credit.token_columns["advantage"], batch.samples.mask_T
    assert (advantages_T[is_bad_T] < 0).all() and is_bad_T.any()
    assert (advantages_T[mask_T & ~is_bad_T] > 0).all(), "all trajectories succeed"
    check_versions(tmp_path)


def planted(batch: Batch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Trained tokens of bad steps."""
    slots_T, turns_T = batch.rows_T % len(PLANNED), batch.samples.turns_T
    bad = {
        (slot, turn)
        for slot, actions in enumerate(PLANNED)
        for turn, action in enumerate(actions)
        if action.endswith("b")
    }
    found = [(int(slot), int(turn)) in bad for slot, turn in zip(slots_T, turns_T, strict=True)]
    return np.array(found) & batch.samples.mask_T


def check_versions(folder: Path) -> None:
    """Every score of the last rows names its version, and the form of its text."""
    with open_run(folder) as run:
        newest = [*itertools.islice(run.trajectories(order="newest"), NUM_ROWS)]
    for one in newest:
        content = one.columns["step_scores@1"]
        assert isinstance(content, bytes)
        record = msgspec.json.decode(content, type=RowScores)
        assert record.version == 1 and record.text_digest == text_digest()
        assert [score is not None for score in record.scores] == [True, True]


def test_a_run_without_such_a_stage_has_nothing_to_serve(tmp_path: Path) -> None:
    init_model(TINY_QWEN3, tmp_path / "model", seed=0)
    RunFolder(tmp_path).write_config(run_config(tmp_path, with_prm=False))
    with pytest.raises(ConfigError, match="no single stage with role prm"):
        find_prm_stage(RunFolder(tmp_path).read_config(), None)
