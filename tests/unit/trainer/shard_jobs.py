# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_shares.py` do: `python -m … JOB FOLDER NUM_RANKS`.

Real ranks with gloo between them run the trainer's own loop and its followers, with a dataflow in
memory that serves all of them the same batches. The runs of one process are the same functions with
a team that is alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch.distributed as dist
from tests.unit.trainer import rank_jobs
from tests.unit.trainer.doubles import (
    POLICY,
    MemoryDataflow,
    make_turn,
    random_batch,
    seal,
    settings,
)
from tests.unit.trainer.test_replay import MemoryRecord

from penstock.config.stages import ParallelConfig
from penstock.dataflow.service.trainers.messages import CommitRequest
from penstock.observe.metrics import MetricsFile
from penstock.trainer import state_shards
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.checkpoint_saver import Saver
from penstock.trainer.loop import Trainer
from penstock.trainer.models import Models
from penstock.trainer.publisher import ShareWriter
from penstock.trainer.ranks.group import RankGroup, Ranks, SingleRank, make_rank_group
from penstock.trainer.ranks.worker_loop import worker_loop
from penstock.trainer.replay import RecordedCommit
from penstock.trainer.service import make_checkpoints, replay_step, restore_models
from penstock.trainer.snapshots import Snapshots
from penstock.trainer.takeover import take_over
from penstock.wire.codec import JSON, decode, encode_json

NUM_STEPS = 4
EVERY = 2
BATCHES = [random_batch(5, seq=seq, num_groups=3, size=3) for seq in range(1, NUM_STEPS + 1)]
_SAME = [(make_turn([3, 4], [token]), 0.5) for token in (5, 6, 7)]
BATCHES.append(seal([_SAME, _SAME], seq=NUM_STEPS + 1, trains_from=NUM_STEPS))
"""The last one makes no version; only the critic learns from it."""


def configured(folder: Path, ranks: Ranks) -> Any:
    dp = ranks.position.parallel.dp
    return settings(
        folder / "model", "ppo", checkpoint_every=EVERY, minibatches=2, parallel={"dp": dp}
    )


def opened(folder: Path, name: str, ranks: Ranks | None = None) -> Checkpoints:
    chosen = configured(folder, ranks or SingleRank())
    return make_checkpoints(chosen, POLICY, folder / name, accepts_changes=True)


def lead(
    dataflow: MemoryDataflow, models: Models, checkpoints: Checkpoints, ranks: Ranks, run_dir: Path
) -> None:
    """The life of a first rank."""
    snapshots = Snapshots(run_dir / "weights", POLICY, checkpoints.last.folder)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    trainer = Trainer(
        policy=POLICY,
        models=models,
        ranks=ranks,
        dataflow=dataflow,
        snapshots=snapshots,
        checkpoints=checkpoints,
        incarnation=take_over(dataflow, POLICY, checkpoints).incarnation,
        metrics=metrics,
    )
    try:
        with mock.patch.object(Saver, "is_due", _is_due_once_idle):
            assert trainer.run()
    finally:
        metrics.close()
        snapshots.close()


_is_due = Saver.is_due


def _is_due_once_idle(saver: Saver, cursor: Cursor) -> bool:
    """Waits for the last save, so that a slow disk skips no checkpoint that a test reads."""
    saver.flush()
    return _is_due(saver, cursor)


def lived(folder: Path, name: str, ranks: Ranks) -> list[list[float]]:
    """One life of a trainer with a critic, from the newest checkpoint on; the loss and the critic's
    loss of each step, in the first rank."""
    checkpoints = opened(folder, name, ranks)
    models, checkpoint = restore_models(configured(folder, ranks), POLICY, checkpoints, ranks)
    cursor = checkpoint.cursor
    dataflow = MemoryDataflow(batches=BATCHES, number=cursor.number, seq=cursor.seq)
    if not ranks.position.is_rank0:
        dataflow.incarnation = 1
        writer = ShareWriter(folder / name / "weights", checkpoint.folder, rank=ranks.position.rank)
        worker_loop(POLICY, models, dataflow, ranks, checkpoints.root, writer)
        return []
    lead(dataflow, models, checkpoints, ranks, folder / name)
    (folder / name / "commits.json").write_bytes(encode_json(dataflow.commits))
    (folder / name / "published.json").write_bytes(encode_json(dataflow.published))
    return [
        [body.stats.get("loss", 0.0), body.stats["critic/loss"]] for _, body in dataflow.commits
    ]


# --- jobs -----------------------------------------------------------------------------------------


def pair(folder: Path) -> dict[str, Any]:
    """Two ranks: a straight life, one that goes on in the middle of it, and one that goes on from
    what a single process saved. Last, a life in which the second rank dies."""
    parts, inside = make_rank_group(ParallelConfig(dp=2)), make_rank_group(ParallelConfig(tp=2))
    assert parts is not None and inside is not None
    result = {
        "straight": lived(folder, "straight", parts),
        "state": _state_of(folder, parts),
        "resumed": _in_the_middle(folder, "straight", "resumed", parts),
        "replayed": _replayed(folder, "straight", parts),
        "widened": _in_the_middle(folder, "alone", "widened", parts),
        "inside": _put_together(folder / "inside", folder / "model", inside),
    }
    (folder / f"pair.{dist.get_rank()}.json").write_text(json.dumps(result))
    _die_between(folder, parts)
    return result


def _in_the_middle(folder: Path, before: str, after: str, ranks: Ranks) -> list[list[float]]:
    """Go on from the older checkpoint of another life."""
    if ranks.position.is_rank0:
        between = Path("checkpoints", f"step_{EVERY}")
        shutil.copytree(folder / before / between, folder / after / between)
    dist.barrier()
    return lived(folder, after, ranks)


def _replayed(folder: Path, name: str, ranks: Ranks) -> dict[str, Any]:
    """The last version of another life, computed again by the same ranks."""
    run_dir = folder / name
    commits = decode(
        (run_dir / "commits.json").read_bytes(),
        list[tuple[int, CommitRequest]],
        media_type=JSON,
    )
    record = MemoryRecord(
        batches=BATCHES,
        commits={
            seq: RecordedCommit(number=body.number, skipped=body.skipped, stats=body.stats)
            for seq, body in commits
        },
    )
    done = replay_step(
        configured(folder, ranks),
        POLICY,
        record,
        number=NUM_STEPS,
        run_dir=run_dir,
        scratch=folder / "scratch",
        ranks=ranks,
    )
    if done is None:
        return {}
    published = json.loads((run_dir / "published.json").read_bytes())
    return {
        "begun_at": done.started_at.number,
        "differences": [str(found) for found in done.differences],
        "is_equal": done.stored.weights_digest == published[-1]["weights_digest"],
    }


def _state_of(folder: Path, ranks: RankGroup) -> dict[str, Any]:
    """Bytes that pass between ranks while they keep their state and while they restore it."""
    from torch.distributed.tensor.debug import CommDebugMode

    from penstock.trainer.ranks.sharding import gather
    from penstock.trainer.weight_shares import ShareBuffers

    models, checkpoint = restore_models(
        configured(folder, ranks), POLICY, opened(folder, "straight", ranks), ranks
    )
    with CommDebugMode() as saving:
        kept = state_shards.copy_shard(models.state_tensors())
    with CommDebugMode() as restoring:
        models.restore(checkpoint.read_state())
    with CommDebugMode() as publishing:
        ShareBuffers().copy(models.weights(), is_rank0=ranks.position.is_rank0)
    with CommDebugMode() as gathering:
        gather(cast(Any, models.weights()), ranks)
    return {
        "saving": saving.get_total_counts(),
        "restoring": restoring.get_total_counts(),
        "publishing": publishing.get_total_counts(),
        "gathering": gathering.get_total_counts(),
        "kept": sum(tensor.nbytes for name, tensor in kept.tensors.items() if name in kept.regions),
    }


def square(folder: Path) -> dict[str, Any]:
    """Four ranks, a model cut both ways."""
    ranks = make_rank_group(ParallelConfig(dp=2, tp=2))
    assert ranks is not None
    return _put_together(folder / "square", folder / "model", ranks)


def _put_together(where: Path, model: Path, ranks: RankGroup) -> dict[str, Any]:
    """A model cut inside its matrices: what its ranks wrote, put together, is what is gathered, and
    each gets back what it had."""
    from penstock.trainer.build import build_models
    from penstock.trainer.ranks.sharding import gather

    models = build_models(settings(model, "grpo"), POLICY, model, ranks)
    _step(models, ranks)
    rank, num_ranks = ranks.position.rank, ranks.position.parallel.num_ranks
    before = state_shards.copy_shard(models.state_tensors())
    state_shards.write_shard(where, rank, num_ranks, before)
    dist.barrier()
    found = state_shards.open_state([where / name for name in state_shards.state_names(num_ranks)])
    whole = gather(models.state_tensors(), ranks)
    models.restore(found)
    after = state_shards.copy_shard(models.state_tensors())
    return {
        "is_equal": all(found[name].equal(whole[name]) for name in whole),
        "is_given_back": after.regions == before.regions
        and all(after.tensors[name].equal(value) for name, value in before.tensors.items()),
        "names": len(whole),
        "parts": len(before.regions),
    }


def _step(models: Models, ranks: Ranks) -> None:
    from penstock.trainer.batches import assemble

    sealed, position = BATCHES[0], ranks.position
    rows = [
        row if index % position.parallel.dp == position.part else replace(row, payload=None)
        for index, row in enumerate(sealed.rows)
    ]
    models.step(assemble(sealed.manifest, rows, POLICY, rank_jobs.VOCAB, ranks=ranks))


def _die_between(folder: Path, ranks: RankGroup) -> None:
    """The second rank is killed when its share of the second checkpoint is on disk, and before it
    could say so; the first one must not wait for ever."""
    receipts = state_shards.write_durably

    def deadly(path: Path, content: bytes) -> None:
        if list(opened(folder, "killed").root.glob(f"step_{EVERY}")):
            os.kill(os.getpid(), signal.SIGKILL)
        receipts(path, content)

    if ranks.position.rank == 1:
        state_shards.write_durably = deadly
    try:
        lived(folder, "killed", ranks)
    except RuntimeError as error:
        if ranks.position.is_rank0:
            (folder / "survived").write_text(str(error))
    os._exit(0)


if __name__ == "__main__":
    rank_jobs.JOBS.update(pair=pair, square=square)
    rank_jobs.main()
