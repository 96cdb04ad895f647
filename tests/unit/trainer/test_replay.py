# SPDX-License-Identifier: Apache-2.0
"""A step computed again: equal bits are found equal, and whatever differs is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.doubles import POLICY, MemoryDataflow, Sealed, random_batch
from tests.unit.trainer.test_loop import config, equal_rewards, run

from penstock.config import RunConfig
from penstock.config.pipeline import ParallelConfig
from penstock.errors import ConfigError, StoreError
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.replay import RecordedCommit, ReplayResult, choose_start_checkpoint
from penstock.trainer.service import replay_step
from penstock.trainer.state_shards import StateShard
from penstock.trainer.weight_shares import ShareBuffers
from penstock.types import Manifest, RowPayload

BATCHES = [random_batch(0, seq=1), random_batch(0, seq=2), equal_rewards(3), random_batch(0, seq=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """What a `MemoryDataflow` heard."""

    batches: Sequence[Sealed]
    commits: dict[int, RecordedCommit]

    def manifest(self, seq: int) -> Manifest | None:
        return self.batches[seq - 1].manifest if seq <= len(self.batches) else None

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]:
        return self.batches[manifest.seq - 1].rows

    def committed(self, seq: int) -> RecordedCommit | None:
        return self.commits.get(seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    model_folder: Path
    record: MemoryRecord
    published: dict[int, str]

    def replay(
        self,
        number: int,
        record: MemoryRecord | None = None,
        *,
        settings: RunConfig | None = None,
    ) -> ReplayResult:
        done = replay_step(
            settings or config(self.model_folder),
            POLICY,
            record or self.record,
            number=number,
            run_dir=self.folder,
            scratch=self.folder / "scratch",
        )
        assert done is not None
        return done


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Numbers 1, 2 and 3; the third batch was skipped; checkpoints at 2 and 3."""
    folder = tmp_path_factory.mktemp("run")
    dataflow = MemoryDataflow(batches=BATCHES)
    run(dataflow, folder, config(model_folder))
    commits = {
        seq: RecordedCommit(number=body.number, skipped=body.skipped, stats=body.stats)
        for seq, body in dataflow.commits
    }
    return Run(
        folder=folder,
        model_folder=model_folder,
        record=MemoryRecord(batches=BATCHES, commits=commits),
        published={body.number: body.weights_digest for body in dataflow.published},
    )


def test_a_step_comes_out_bit_for_bit_over_a_skipped_batch(finished: Run) -> None:
    done = finished.replay(3)
    assert (done.started_at.number, done.started_at.seq) == (2, 2)
    assert (done.ended_at.number, done.ended_at.seq) == (3, 4)
    assert done.differences == []
    assert done.stored.weights_digest == finished.published[3] != finished.published[0]


def test_other_data_give_other_weights_and_the_stats_that_show_it(finished: Run) -> None:
    other = random_batch(1, seq=4)
    done = finished.replay(3, replace(finished.record, batches=[*BATCHES[:3], other]))
    assert done.stored.weights_digest != finished.published[3]
    assert {"loss", "grad_norm"} <= {found.what for found in done.differences}
    assert all(found.seq == 4 for found in done.differences)


def test_one_bit_of_one_stat_is_a_difference_and_the_time_is_none(finished: Run) -> None:
    told = finished.record.commits[4]
    stats = {**told.stats, "loss": told.stats["loss"] * (1 + 2**-52), "seconds/train": 1e9}
    commits = {**finished.record.commits, 4: replace(told, stats=stats)}
    (found,) = finished.replay(3, replace(finished.record, commits=commits)).differences
    assert (found.seq, found.what) == (4, "loss")


def test_a_step_before_the_oldest_checkpoint_says_what_is_kept(finished: Run) -> None:
    with pytest.raises(StoreError, match=r"before number 2 is left in .* \(kept: 2, 3\)"):
        finished.replay(2)


def test_checkpoints_that_cannot_be_used_are_named_with_the_reason(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, policy=POLICY, every=3)
    for number in (3, 6):
        save_little(checkpoints, number)
        (checkpoints.last.folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(
        StoreError, match=r"(?s)kept: none.*step_3: opt.* is damaged\n.*step_6: opt"
    ):
        choose_start_checkpoint(checkpoints, 5, SingleRank())


def test_a_step_that_was_never_made_is_no_success(finished: Run) -> None:
    with pytest.raises(StoreError, match="number 9 was never committed"):
        finished.replay(9)


def test_a_step_is_not_compared_under_another_config_than_it_was_trained_under(
    finished: Run,
) -> None:
    then = config(finished.model_folder)
    now = then.model_copy(
        update={"training": then.training.model_copy(update={"learning_rate": 1e-3})}
    )
    with pytest.raises(
        ConfigError, match=r"(?s)of .*step_3:.*training.learning_rate: 0.002 -> 0.0"
    ):
        finished.replay(3, settings=now)
    free = then.model_copy(update={"training": then.training.model_copy(update={"steps": 9})})
    assert finished.replay(3, settings=free).differences == []


def test_steps_are_of_the_config_of_the_life_that_saved_the_next_checkpoint(tmp_path: Path) -> None:
    """A life of A saves number 3; one of B restores it, and saves 6."""

    def life(rate: str) -> Checkpoints:
        config = {"training.learning_rate": rate}
        return Checkpoints(tmp_path, policy=POLICY, every=3, config=config, accepts_changes=True)

    for number, rate in ((3, "A"), (6, "B")):
        checkpoints = life(rate)
        checkpoints.open_newest()
        save_little(checkpoints, number)

    def started_at(rate: str, number: int) -> int:
        found = choose_start_checkpoint(life(rate), number, SingleRank())
        assert found is not None
        return found.cursor.number

    assert (started_at("B", 5), started_at("B", 6), started_at("B", 7)) == (3, 3, 6)
    for number in (5, 6):
        with pytest.raises(ConfigError, match=r"(?s)of .*step_6:.*learning_rate: B -> A"):
            started_at("A", number)
    assert started_at("A", 7) == 6, "trained since the run is A again"


def save_little(checkpoints: Checkpoints, number: int) -> None:
    cursor = Cursor(number=number, seq=number, incarnation=1)
    one = {"one": torch.ones(1)}
    checkpoints.save(
        cursor, weights=ShareBuffers().copy(one), state=StateShard(tensors=one), static=[]
    )


def with_training(settings: RunConfig, **values: object) -> RunConfig:
    training = settings.training.model_copy(update=values)
    return settings.model_copy(update={"training": training})


def test_one_process_does_not_pass_for_the_two_that_trained(finished: Run) -> None:
    then = config(finished.model_folder)
    two = then.training.model_copy(update={"parallel": ParallelConfig(dp=2)})
    with pytest.raises(StoreError, match="2 ranks trained this, and 1 would compute it again"):
        finished.replay(3, settings=then.model_copy(update={"training": two}))
