# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from tests.unit.trainer.doubles import (
    POLICY,
    VOCAB_SIZE,
    MemoryDataflow,
    Sealed,
    make_turn,
    random_batch,
    seal,
)
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config import AlgorithmConfig, RunConfig
from penstock.errors import Fenced, ResumeRejected
from penstock.observe.metrics import MetricsFile
from penstock.trainer.actor import Actor
from penstock.trainer.batches import assemble
from penstock.trainer.checkpoint import Cursor
from penstock.trainer.checkpoint_saver import Saver
from penstock.trainer.inputs import make_inputs
from penstock.trainer.loop import Trainer
from penstock.trainer.model_folders import WEIGHTS
from penstock.trainer.publisher import Publisher
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.service import make_checkpoints, restore_models
from penstock.trainer.snapshots import Snapshots, weights_of
from penstock.trainer.state_shards import OPTIMIZER
from penstock.trainer.takeover import take_over
from penstock.types import Trajectory, Turn, log_probs
from penstock.weights.manifest import parse_manifest
from penstock.weights.store import DirectoryStore
from penstock.wire.codec import decode


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that calls have one order; `test_publisher` and `test_saving` are about the other ones."""
    submit, save, move = Publisher.submit, Saver.submit, Saver.advance_cursor

    def at_once(
        publisher: Publisher, weights: Mapping[str, Tensor], number: int, *, token: int
    ) -> None:
        submit(publisher, weights, number, token=token)
        publisher.flush()

    def saved(saver: Saver, cursor: Cursor, **copied: Any) -> None:
        save(saver, cursor, **copied)
        saver.flush()

    def moved(saver: Saver, cursor: Cursor, monitor_state: Mapping[str, Any]) -> None:
        move(saver, cursor, monitor_state)
        saver.flush()

    monkeypatch.setattr(Publisher, "submit", at_once)
    monkeypatch.setattr(Saver, "submit", saved)
    monkeypatch.setattr(Saver, "advance_cursor", moved)


BATCHES = [random_batch(0, seq=seq) for seq in range(1, 7)]


def config(folder: Path, *, checkpoint_every: int = 2) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "models": {"policy": {"init": str(folder)}},
            "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
            "algorithm": {"entropy_coef": 0.01},
            "training": {
                "steps": 6,
                "learning_rate": 2e-3,
                "weight_decay": 0.01,
                "checkpoint_every": checkpoint_every,
            },
        }
    )


def run(
    dataflow: MemoryDataflow,
    run_dir: Path,
    settings: RunConfig,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor]:
    """One life of the trainer; the weights it ends with."""
    checkpoints = make_checkpoints(settings, POLICY, run_dir)
    models, checkpoint = restore_models(settings, POLICY, checkpoints, SingleRank())
    snapshots = Snapshots(run_dir / "weights", POLICY, checkpoint.folder)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    trainer = Trainer(
        policy=POLICY,
        models=models,
        dataflow=dataflow,
        snapshots=snapshots,
        checkpoints=checkpoints,
        incarnation=take_over(dataflow, POLICY, checkpoints).incarnation,
        metrics=metrics,
        is_stopping=is_stopping,
    )
    try:
        assert trainer.run() is not is_stopping()
    finally:
        metrics.close()
    snapshots.close()
    return weights_of(models.model)


def metric_lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def equal_rewards(seq: int) -> Sealed:
    rows = [(make_turn([3, 4], [5]), 0.5), (make_turn([3, 4], [6]), 0.5)]
    return seal([rows], seq=seq, trains_from=seq - 1)


def test_a_run_in_the_order_that_makes_it_exactly_once(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:2])
    run(dataflow, tmp_path, config(model_folder))
    assert dataflow.calls == [
        "incarnate 0 0",
        "checkpoints ((0, 0),)",
        "publish 0",
        "batch 1",
        "commit 1",
        "publish 1",
        "batch 2",
        "commit 2",
        "publish 2",
        "checkpoints ((0, 0), (2, 2))",
        "batch 3",
    ]
    numbers = [(line["number"], line["seq"]) for line in metric_lines(tmp_path)]
    assert numbers == [(1, 1), (2, 2)]
    stats = dataflow.commits[0][1].stats
    assert {"reward/mean", "loss", "grad_norm", "seconds", "seconds/wait"} <= stats.keys()


def test_a_run_reports_a_bounded_number_of_roles(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the statistics of a commit, too: a tracker keeps a curve of each."""
    monkeypatch.setattr("penstock.trainer.signals.role_names.MAX_SHOWN_ROLES", 1)
    dataflow = MemoryDataflow(batches=[_played_by(BATCHES[n], f"role {n}") for n in range(2)])
    run(dataflow, tmp_path, config(model_folder))
    named = [{name for name in body.stats if "/role/" in name} for _, body in dataflow.commits]
    assert named == [{"reward/role/role 0", "tokens/role/role 0"}, set()]
    assert not any("role 1" in str(line) for line in metric_lines(tmp_path))


def _played_by(sealed: Sealed, role: str) -> Sealed:
    groups = [
        replace(
            group,
            rows=tuple(
                structs.replace(row, roles={POLICY: {role: row.sampled[POLICY]}})
                for row in group.rows
            ),
        )
        for group in sealed.manifest.groups
    ]
    return replace(sealed, manifest=replace(sealed.manifest, groups=tuple(groups)))


def test_number_0_holds_the_policy_and_a_critic_begins_beside_it(
    model_folder: Path, tmp_path: Path
) -> None:
    """Whoever is first would otherwise hold every model of the run whole."""
    chosen = config(model_folder).model_copy(update={"algorithm": AlgorithmConfig(name="ppo")})
    made = restore_models(chosen, POLICY, make_checkpoints(chosen, POLICY, tmp_path), SingleRank())
    assert {*made[1].read_state()} == {"random_generator"}
    models, _ = restore_models(
        chosen, POLICY, make_checkpoints(chosen, POLICY, tmp_path), SingleRank()
    )
    given = assemble(BATCHES[0].manifest, BATCHES[0].rows, POLICY, VOCAB_SIZE)
    found = [one.step(given).values["critic/value"] for one in (made[0], models)]
    assert found == [0, 0]


def test_the_published_bytes_are_the_weights(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:1])
    final = run(dataflow, tmp_path, config(model_folder))
    store = tmp_path / "weights"
    path = store / "manifests" / f"{dataflow.published[-1].manifest_digest}.json"
    manifest = json.loads(path.read_text())
    blobs = {entry["name"]: entry["blob"] for entry in manifest["files"]}
    assert "trainer.json" not in blobs and {"tokenizer.json", "config.json"} <= blobs.keys()
    stored = load_file(store / "blobs" / blobs[WEIGHTS])
    assert stored.keys() == final.keys()
    assert all(torch.equal(stored[name], value) for name, value in final.items())
    assert not list(tmp_path.glob(".snapshot-*"))


def test_a_skipped_batch_changes_no_number_and_publishes_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    dataflow = MemoryDataflow(batches=[equal_rewards(1), equal_rewards(2), BATCHES[2]])
    run(dataflow, tmp_path, config(model_folder))
    assert [(seq, body.number, body.skipped) for seq, body in dataflow.commits] == [
        (1, 0, "zero_advantage"),
        (2, 0, "zero_advantage"),
        (3, 1, ""),
    ]
    assert [body.number for body in dataflow.published] == [0, 1]


def test_only_skipped_batches_still_move_the_cursor_of_the_last_checkpoint(
    model_folder: Path, tmp_path: Path
) -> None:
    dataflow = MemoryDataflow(batches=[equal_rewards(1), equal_rewards(2)])
    run(dataflow, tmp_path, config(model_folder))
    assert dataflow.retained == ((0, 2),)


@pytest.mark.parametrize(
    "moment", ["publish 0", "commit 1", "commit 3", "publish 3", "commit 4", "batch 6", "commit 6"]
)
def test_a_crash_anywhere_ends_in_the_same_bits(
    model_folder: Path, tmp_path: Path, moment: str
) -> None:
    settings = config(model_folder)
    straight = run(MemoryDataflow(batches=BATCHES), tmp_path / "straight", settings)
    dataflow = MemoryDataflow(batches=BATCHES, die_after=moment)
    with pytest.raises(KeyboardInterrupt):
        run(dataflow, tmp_path / "crashed", settings)
    dataflow.die_after = ""
    resumed = run(dataflow, tmp_path / "crashed", settings)
    assert dataflow.incarnation == 2
    assert (dataflow.number, dataflow.seq) == (6, 6)
    assert all(torch.equal(straight[name], value) for name, value in resumed.items())
    digests = {body.number: body.weights_digest for body in dataflow.published}
    again = {(body.number, body.weights_digest) for body in dataflow.published}
    assert len(again) == len(digests), "a replayed version has the digest it had before"
    assert not list((tmp_path / "crashed").glob(".snapshot-*")), "the dead life left nothing"


@pytest.mark.parametrize("moment", ["batch 3", "commit 3", "commit 4", "batch 6", "commit 6"])
def test_a_crash_between_batches_of_which_only_the_critic_learned_ends_in_the_same_bits(
    model_folder: Path, tmp_path: Path, moment: str
) -> None:
    plain = config(model_folder)
    settings = plain.model_copy(update={"algorithm": AlgorithmConfig(name="ppo")})
    batches = [*map(equal_rewards, (1, 2)), BATCHES[2], *map(equal_rewards, (4, 5)), BATCHES[5]]

    def flow(die_after: str) -> MemoryDataflow:
        return MemoryDataflow(batches=batches, checkpoint_now=True, die_after=die_after)

    def last(name: str) -> Path:
        return tmp_path / name / "checkpoints" / "step_2"

    straight = flow("")
    run(straight, tmp_path / "straight", settings)
    assert [body.number for _, body in straight.commits] == [0, 0, 1, 1, 1, 2]
    assert straight.commits[1][1].stats["critic/updates"] > 0
    dataflow = flow(moment)
    with pytest.raises(KeyboardInterrupt):
        run(dataflow, tmp_path / "crashed", settings)
    dataflow.die_after = ""
    run(dataflow, tmp_path / "crashed", settings)
    assert dataflow.retained == straight.retained
    for name in (WEIGHTS, OPTIMIZER):
        assert (last("crashed") / name).read_bytes() == (last("straight") / name).read_bytes()


def test_a_trainer_told_to_stop_saves_after_its_step(model_folder: Path, tmp_path: Path) -> None:
    settings = config(model_folder, checkpoint_every=100)
    straight = run(MemoryDataflow(batches=BATCHES), tmp_path / "straight", settings)
    dataflow = MemoryDataflow(batches=BATCHES)
    run(dataflow, tmp_path / "stopped", settings, lambda: dataflow.number >= 3)
    assert dataflow.calls[-1] == "checkpoints ((0, 0), (3, 3))"
    resumed = run(dataflow, tmp_path / "stopped", settings)
    assert dataflow.calls.count("commit 3") == 1, "nothing is trained a second time"
    assert all(torch.equal(straight[name], value) for name, value in resumed.items())


def test_starting_again_after_the_end_is_harmless(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:3])
    first = run(dataflow, tmp_path, config(model_folder))
    second = run(dataflow, tmp_path, config(model_folder))
    assert (dataflow.number, dataflow.seq) == (3, 3)
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_a_lost_compare_and_set_is_looked_at_again(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:1], rivals=2)
    run(dataflow, tmp_path, config(model_folder))
    assert dataflow.incarnation == 3
    assert dataflow.number == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_published_is_the_policy_that_learns(
    model_folder: Path, tmp_path: Path, precision: str
) -> None:
    """A model of halves that is trained in float32 is served in float32: rounded to halves, small
    steps would be lost on their way to the engine."""
    folder = tmp_path / "half"
    shutil.copytree(model_folder, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"dtype": "bfloat16"}))
    settings = config(folder)
    training = settings.training.model_copy(update={"precision": precision, "learning_rate": 1e-6})
    dataflow = MemoryDataflow(batches=BATCHES[:2])
    learned = run(dataflow, tmp_path, settings.model_copy(update={"training": training}))
    store = DirectoryStore(tmp_path / "weights")
    manifest = parse_manifest(store.read_manifest(dataflow.published[-1].manifest_digest))
    files = {file.name: store.blob_path(file.blob) for file in manifest.files}
    served = load_file(files["model.safetensors"])
    dtype = getattr(torch, precision)
    assert all(torch.equal(served[name], value.to(dtype)) for name, value in learned.items())
    assert json.loads(files["config.json"].read_text())["dtype"] == precision


def test_a_refused_fork_point_is_an_error_not_a_loop(model_folder: Path, tmp_path: Path) -> None:
    settings = config(model_folder)
    run(MemoryDataflow(batches=BATCHES[:2]), tmp_path, settings)
    with pytest.raises(ResumeRejected, match=r"step_2, number 2, batch 2: .*\n.*another run"):
        run(MemoryDataflow(batches=BATCHES[:2]), tmp_path, settings)  # a ledger that was emptied


def test_a_fork_point_whose_batches_were_let_go_is_no_other_run(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = config(model_folder)
    dataflow = MemoryDataflow(batches=BATCHES[:2])
    run(dataflow, tmp_path, settings)
    dataflow.let_go = 3
    with pytest.raises(
        ResumeRejected, match=r"step_2, number 2, batch 2: .*restore a younger one$"
    ):
        run(dataflow, tmp_path, settings)


def test_a_fenced_trainer_stops(model_folder: Path, tmp_path: Path) -> None:
    class Replaced(MemoryDataflow):
        def rows(self, policy, seq, indexes=None):  # pyright: ignore
            self.incarnation += 1
            return super().rows(policy, seq, indexes)

    dataflow = Replaced(batches=BATCHES)
    with pytest.raises(Fenced):
        run(dataflow, tmp_path, config(model_folder))
    assert dataflow.commits == []


def test_a_replaced_trainer_that_is_told_to_stop_saves_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    """Paused after a step, replaced, woken by SIGTERM: the save is the first thing it does."""
    dataflow = MemoryDataflow(batches=BATCHES)

    def is_stopping() -> bool:
        if dataflow.number == 3:
            dataflow.incarnation += 1
        return dataflow.number == 3

    with pytest.raises(Fenced, match="was replaced by 2"):
        run(dataflow, tmp_path, config(model_folder, checkpoint_every=2), is_stopping)
    folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert folders == {"step_0", "step_2"}
    assert dataflow.retained == ((0, 0), (2, 2))


def test_the_ledger_may_ask_for_a_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:3], checkpoint_now=True)
    run(dataflow, tmp_path, config(model_folder, checkpoint_every=100))
    assert "checkpoints ((0, 0), (1, 1))" in dataflow.calls
    assert "checkpoints ((1, 1), (2, 2))" in dataflow.calls
    assert dataflow.retained == ((2, 2), (3, 3))


def test_a_node_whose_log_probs_drift_is_quarantined(
    model_folder: Path, tmp_path: Path, new_model: Callable[[], PreTrainedModel]
) -> None:
    """Four nodes; the engine of one says other log-probs than the weights give."""
    actor = Actor(new_model())
    nodes = ("good-0/1", "good-1/1", "bad/life", "good-2/1")

    def batch(seq: int) -> Sealed:
        plain = random_batch(5, seq=seq, num_groups=16, size=8)
        whole = plain.assembled()
        inputs = make_inputs(whole, np.arange(whole.samples.starts_S.size))
        with torch.no_grad():
            said = actor(inputs).logprobs_K.double().numpy()
        row_K = whole.rows_T[inputs.token_K.numpy()]
        turns = [decode(row.payload or b"", Trajectory).turns[0] for row in plain.rows]
        members = list[tuple[Turn, float]]()
        for index, (turn, summary) in enumerate(zip(turns, plain.manifest.rows, strict=True)):
            off = 0.4 if nodes[index % 4] == "bad/life" else 0.0
            values = (said[row_K == index] + off).tolist()
            members.append((replace(turn, logprobs=log_probs(values)), summary.score))
        groups = [members[at : at + 8] for at in range(0, len(members), 8)]
        return seal(groups, seq=seq, trains_from=seq - 1, nodes=nodes)

    settings = config(model_folder)
    still = settings.model_copy(
        update={"training": settings.training.model_copy(update={"learning_rate": 0.0})}
    )
    dataflow = MemoryDataflow(batches=[batch(seq) for seq in range(1, 13)])
    run(dataflow, tmp_path, still)
    assert dataflow.quarantined == [("bad", "")], "by credential, whatever the process"
    [*_, last] = metric_lines(tmp_path)
    assert 0 < cast(float, last["gap/mean"]) < 0.2
    assert last["signal/informative_groups"] == 1


def test_a_run_that_trains_on_nothing_says_so_and_why(model_folder: Path, tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=[equal_rewards(seq) for seq in range(1, 5)])
    run(dataflow, tmp_path, config(model_folder))
    alarms = [line.get("alarm") for line in metric_lines(tmp_path)]
    assert [alarm is not None for alarm in alarms] == [False, False, True, False]
    assert "3 consecutive batches had no learning signal (3 equal_rewards)" in cast(str, alarms[2])


def test_a_run_that_trains_on_nothing_says_so_however_often_it_starts_again(
    model_folder: Path, tmp_path: Path
) -> None:
    dataflow = MemoryDataflow(batches=[equal_rewards(seq) for seq in range(1, 9)])
    for last in (2, 4, 6, 8):
        run(dataflow, tmp_path, config(model_folder), lambda last=last: dataflow.seq >= last)
    told = [(line["seq"], line["alarm"]) for line in metric_lines(tmp_path) if "alarm" in line]
    assert [seq for seq, _ in told] == [3, 6]
    assert "6 consecutive batches had no learning signal (6 equal_rewards)" in cast(str, told[1][1])


# --- instalments ----------------------------------------------------------------------------------


def streamed(folder: Path) -> RunConfig:
    settings = config(folder)
    training = settings.training.model_copy(update={"stream": True, "groups_per_batch": 4})
    algorithm = settings.algorithm.model_copy(
        update={"aggregation": "fixed-constant", "num_generations": 4}
    )
    return settings.model_copy(update={"training": training, "algorithm": algorithm})


def test_a_streamed_run_asks_for_instalments_and_commits_after_the_last(
    model_folder: Path, tmp_path: Path
) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:2], sizes=(1, 3, 0))
    run(dataflow, tmp_path, streamed(model_folder))
    asked = [f"batch {seq}/{k}" for seq in (1, 2) for k in (1, 2, 3)]
    steps = [call for call in dataflow.calls if call.startswith(("batch", "commit"))]
    assert steps == [*asked[:3], "commit 1", *asked[3:], "commit 2", "batch 3/1"]


@pytest.mark.parametrize("moment", ["batch 1/2", "batch 3/1", "batch 4/2", "batch 6/3", "commit 5"])
def test_a_crash_between_instalments_ends_in_the_same_bits(
    model_folder: Path, tmp_path: Path, moment: str
) -> None:
    settings = streamed(model_folder)
    straight = run(MemoryDataflow(batches=BATCHES, sizes=(4,)), tmp_path / "straight", settings)
    dataflow = MemoryDataflow(batches=BATCHES, sizes=(1, 2, 1), die_after=moment)
    with pytest.raises(KeyboardInterrupt):
        run(dataflow, tmp_path / "crashed", settings)
    dataflow.die_after = ""
    resumed = run(dataflow, tmp_path / "crashed", settings)
    assert (dataflow.incarnation, dataflow.number, dataflow.seq) == (2, 6, 6)
    assert all(torch.equal(straight[name], value) for name, value in resumed.items())


def test_a_trainer_that_stops_between_instalments_trains_the_batch_later(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = streamed(model_folder)
    straight = run(MemoryDataflow(batches=BATCHES, sizes=(4,)), tmp_path / "straight", settings)
    dataflow = MemoryDataflow(batches=BATCHES, sizes=(1, 2, 1), checkpoint_now=True)
    run(dataflow, tmp_path / "stopped", settings, lambda: "batch 3/2" in dataflow.calls)
    assert (dataflow.number, dataflow.retained[-1]) == (2, (2, 2))
    resumed = run(dataflow, tmp_path / "stopped", settings)
    assert all(torch.equal(straight[name], value) for name, value in resumed.items())


def test_the_fork_point_is_what_the_trainer_before_saved_last(
    model_folder: Path, tmp_path: Path
) -> None:
    """It goes on while its successor starts, and the batches after what that one opened go."""
    settings = config(model_folder)
    dataflow = MemoryDataflow(batches=BATCHES[:2])
    run(dataflow, tmp_path, settings)
    successor = make_checkpoints(settings, POLICY, tmp_path)
    assert successor.open_newest() is not None and successor.last.cursor.number == 2
    dataflow.batches = BATCHES[:4]
    run(dataflow, tmp_path, settings)
    dataflow.let_go = 4
    assert take_over(dataflow, POLICY, successor).checkpoint.cursor.number == 4
