# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_moving.py` do: whole lives of a trainer whose stages are spread
differently, with the first rank's loop, the other's following, checkpoints, and a dataflow in each
process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.trainer import rank_jobs
from tests.unit.trainer.doubles import (
    POLICY,
    VOCAB_SIZE,
    MemoryDataflow,
    Sealed,
    make_turn,
    random_batch,
    seal,
    settings,
)
from tests.unit.trainer.shard_jobs import lead

from penstock.config import RunConfig
from penstock.config.pipeline import PipelineStageConfig
from penstock.config.stages import ParallelConfig
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.publisher import ShareWriter
from penstock.trainer.ranks import batch_repartition
from penstock.trainer.ranks.group import Ranks, StagedRanks, make_ranks
from penstock.trainer.ranks.row_fetch import fetch_rows
from penstock.trainer.ranks.worker_loop import worker_loop
from penstock.trainer.samples import TOKEN_COLUMNS
from penstock.trainer.service import make_checkpoints, restore_models
from penstock.types import FinishReason

MODULE = "tests.unit.trainer.spread_jobs"
NUM_STEPS = 3
SAVED_AT = 2
ONE, TWO, TENSOR = ParallelConfig(), ParallelConfig(dp=2), ParallelConfig(tp=2)
SPREADS = {
    "from one rank to two": {"reference": ONE, "critic": TWO, "actor": TENSOR},
    "from two ranks to one": {"reference": TWO, "critic": ONE, "actor": ONE},
    "all the same": {"reference": TWO, "critic": TWO, "actor": TWO},
}
"""By role; a critic looks before it learns, so its stages stand on both sides of a function."""


def spread_settings(folder: Path, name: str) -> RunConfig:
    from penstock.trainer.pipeline.builtin import builtin

    training: dict[str, Any] = {"minibatches": 2, "micro_batch_tokens": 24, "checkpoint_every": 1}
    plain = settings(folder / "model", "ppo", **training)
    stages = [
        stage.model_dump() | {"parallel": _parallel(name, stage).model_dump()}
        for stage in builtin(plain.for_policy(POLICY).algorithm, max_tokens=8)
    ]
    return settings(folder / "model", "ppo", **training, pipeline={"stages": stages})


def _parallel(name: str, stage: PipelineStageConfig) -> ParallelConfig:
    return ONE if stage.type == "compute" else SPREADS[name][stage.role]


def batches(num: int) -> list[Sealed]:
    return [random_batch(7, seq=seq, num_groups=4, size=2) for seq in range(1, num + 1)]


class Heard(MemoryDataflow):
    """As a rank that is not the first sees it: which incarnation is right is told elsewhere."""

    def _require(self, incarnation: int) -> None: ...


def live(
    config: RunConfig, ranks: Ranks, folder: Path, num_batches: int, *, begun: int = 0
) -> list[dict[str, float]]:
    """One life of a trainer, up to the end of these batches; what it committed."""
    checkpoints = make_checkpoints(config, POLICY, folder)
    models, checkpoint = restore_models(config, POLICY, checkpoints, ranks)
    if not ranks.position.is_rank0:
        dataflow = Heard(batches=batches(num_batches))
        writer = ShareWriter(folder / "weights", checkpoint.folder, rank=ranks.position.rank)
        worker_loop(POLICY, models, dataflow, ranks, checkpoints.root, writer)
        return []
    dataflow = MemoryDataflow(
        batches=batches(num_batches), incarnation=int(begun > 0), number=begun, seq=begun
    )
    lead(dataflow, models, checkpoints, ranks, folder)
    return [dict(commit.stats) for _, commit in dataflow.commits]


# --- jobs ---------------------------------------------------------------------------------------


def spread(folder: Path) -> dict[str, Any]:
    return {"lives": {name: _lives(folder, name) for name in SPREADS}, "moves": _all_moves()}


def _lives(folder: Path, name: str) -> dict[str, Any]:
    """One life, and one that goes on from its middle; rows are counted where they pass."""
    from penstock.trainer.build import parallel_layouts
    from penstock.trainer.pipeline.builtin import chain_of

    moves, exchanged = _count_moves(), rank_jobs.count_exchanged()
    config = spread_settings(folder, name)
    ranks = make_ranks(parallel_layouts(chain_of(config, POLICY).stages))
    whole = live(config, ranks, folder / name / "whole", NUM_STEPS)
    found = {
        "whole": whole,
        "moves": len(moves),
        "sent_bytes": sum(sent for sent, _ in exchanged),
        "received_bytes": sum(received for _, received in exchanged),
    }
    if isinstance(ranks, StagedRanks):
        if ranks.position.is_rank0:
            saved = f"checkpoints/step_{SAVED_AT}"
            shutil.copytree(folder / name / "whole" / saved, folder / name / "cut" / saved)
        found["rest"] = live(config, ranks, folder / name / "cut", NUM_STEPS, begun=SAVED_AT)
    return found


def _count_moves() -> list[int]:
    """Rows that this rank holds after each move from now on."""
    moves: list[int] = []
    original = getattr(batch_repartition.repartition, "original", batch_repartition.repartition)

    def count(*args: Any, **kwargs: Any) -> Any:
        rows = original(*args, **kwargs)
        moves.append(len(rows))
        return rows

    count.original = original  # pyright: ignore[reportFunctionMemberAccess]
    batch_repartition.repartition = count
    return moves


def _all_moves() -> dict[str, list[str]]:
    """For each way between two spreads, what differs from a batch drawn where the way ends."""
    company = make_ranks([ONE, TWO, TENSOR])
    assert isinstance(company, StagedRanks)
    return {
        f"{name}: {before} to {after}": _differences(
            sealed, company.at_stage(before), company.at_stage(after)
        )
        for name, sealed in (("ragged", _ragged()), ("as many tokens as rows", _level()))
        for before in (ONE, TWO, TENSOR)
        for after in (ONE, TWO, TENSOR)
    }


def _ragged() -> Sealed:
    """With a row that was cut short, one that nobody trains, and one that is gone."""
    draw = np.random.default_rng(1)
    turns = [make_turn([3, 4], draw.integers(0, 9, size).tolist()) for size in (1, 4, 2, 3, 5, 1)]
    turns[1] = replace(turns[1], finish=FinishReason.LENGTH)
    turns[2] = replace(turns[2], reached_agent=False)
    sealed = seal([[(turn, 1.0) for turn in turns]] * 2, nodes=("one", "other"))
    return replace(sealed, rows=(*sealed.rows[:-1], replace(sealed.rows[-1], payload=None)))


def _level() -> Sealed:
    """As many tokens as rows on each of two ranks."""
    turn = make_turn([3], [5])
    return seal([[(turn, 1.0), (turn, 0.0)], [(turn, 0.5), (turn, 0.25)]])


def _differences(sealed: Sealed, before: StagedRanks, after: StagedRanks) -> list[str]:
    dataflow = MemoryDataflow(batches=[sealed])

    def drawn(ranks: StagedRanks) -> Batch:
        rows = fetch_rows(dataflow, sealed.manifest, ranks, minibatches=2)
        batch = assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE, ranks=ranks)
        noise_R = np.random.default_rng(2).standard_normal(len(sealed.rows))
        samples = batch.samples
        token_T = samples.ids_T * 0.1 + samples.turns_T + noise_R[batch.rows_T]
        in_sample_T = np.zeros(samples.ids_T.shape)
        for start, end in zip(samples.starts_S, samples.ends_S, strict=True):
            in_sample_T[start:end] = token_T[start:end]
        return batch.with_columns(
            row_columns={"noise": noise_R}, token_columns={"credit": in_sample_T}
        )

    found = batch_repartition.repartition_batch(
        drawn(before), before.position.parallel, after.position.parallel, minibatches=2
    )
    return _unequal(found, drawn(after))


def _unequal(one: Batch, other: Batch) -> list[str]:
    names = ("starts_S", "ends_S", "rows_S", *TOKEN_COLUMNS)
    pairs = {name: (getattr(one.samples, name), getattr(other.samples, name)) for name in names}
    for ours, theirs in (
        (one.row_columns, other.row_columns),
        (one.token_columns, other.token_columns),
    ):
        if ours.keys() != theirs.keys():
            return ["names of columns"]
        pairs |= {name: (ours[name], theirs[name]) for name in ours}
    unequal = [
        name
        for name, (ours, theirs) in pairs.items()
        if ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes()
    ]
    return unequal + ([] if one.subjects == other.subjects else ["subjects"])


if __name__ == "__main__":
    rank_jobs.JOBS["spread"] = spread
    rank_jobs.main()
