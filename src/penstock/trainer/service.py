# SPDX-License-Identifier: Apache-2.0
"""Wiring of the trainer: config in, a running trainer out. The config ends here."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch

from penstock.config import RunConfig, identity
from penstock.dataflow.client import TrainerClient
from penstock.dataflow.protocol import RowPayload
from penstock.errors import Fenced, StoreError, Unreachable
from penstock.observe.metrics import MetricsFile
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_crew, spread_of
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.crew import Crew
from penstock.trainer.gang.following import follow
from penstock.trainer.gang.ranks import Membership
from penstock.trainer.gang.team import Alone, Team, form_all, join
from penstock.trainer.loop import Trainer
from penstock.trainer.lora import begin_adapter
from penstock.trainer.models import init_model, name_precision
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.replay import Record, Replayed, replay
from penstock.trainer.snapshots import Snapshots, constant_files
from penstock.types import Manifest, PolicyName

EXIT_FENCED = 3
"""A newer trainer of the policy has taken over; starting this one again would take it back."""

EXIT_STOPPED = 128 + signal.SIGTERM
"""Told to stop before its last step; the next life goes on from the checkpoint it left."""

_log = structlog.get_logger(__name__)


def run_trainer(
    config: RunConfig,
    policy: str,
    *,
    url: str,
    token: str,
    run_dir: Path,
    store_root: Path,
    member: Membership | None = None,
    accepts_changes: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Train until the dataflow says `end` or the caller says stop; the exit code of the process.

    member: which rank of a gang this process is. accepts_changes: go on from a checkpoint that was
    saved under another config."""
    client = TrainerClient(url, token, is_stopping=is_stopping)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    torch.set_num_threads(config.for_policy(policy).model.torch_threads)
    checkpoints = make_checkpoints(config, policy, run_dir, accepts_changes=accepts_changes)
    team = _form(config, policy, member)
    crew, checkpoint = make_crew(config, policy, checkpoints, team)
    if not team.place.is_first:
        follow(PolicyName(policy), crew, client, team, checkpoints.root)
        return 0
    snapshots = Snapshots(
        store_root,
        PolicyName(policy),
        checkpoint.folder,
        anchor_every=config.weights.anchor_every,
    )
    try:
        is_complete = Trainer(
            policy=PolicyName(policy),
            crew=crew,
            team=team,
            dataflow=client,
            snapshots=snapshots,
            checkpoints=checkpoints,
            metrics=metrics,
            is_stopping=is_stopping,
            publishes_all=config.deterministic,
        ).run()
    except Fenced as error:
        _log.error("trainer was replaced and exits", policy=policy, why=str(error))
        return EXIT_FENCED
    except Unreachable as error:
        if not is_stopping():
            raise
        _log.warning("stopped while the dataflow was away", policy=policy, why=str(error))
        return EXIT_STOPPED
    finally:
        snapshots.close()
        metrics.close()
        client.close()
    if not is_complete:
        _log.info(
            "stopped after a checkpoint", policy=policy, number=checkpoints.last.cursor.number
        )
        return EXIT_STOPPED
    _log.info("training complete", policy=policy, number=checkpoints.last.cursor.number)
    return 0


def replay_step(
    config: RunConfig, policy: str, record: Record, *, number: int, run_dir: Path, scratch: Path
) -> Replayed:
    """Compute `number` again, from the newest checkpoint before it, into a store in `scratch`."""
    settings = config.for_policy(policy)
    torch.set_num_threads(settings.model.torch_threads)
    complete = make_checkpoints(config, policy, run_dir).complete()
    before = [found for found in complete if found.cursor.number < number]
    if not before:
        known = ", ".join(str(found.cursor.number) for found in complete) or "none"
        raise StoreError(
            f"no checkpoint of {policy} before number {number} is left (kept: {known}); a step can "
            "be computed again only after the oldest of them"
        )
    checkpoint = before[-1]
    crew = build_crew(config, policy, checkpoint.folder)
    crew.restore(checkpoint.read_state())

    def assembled(manifest: Manifest, rows: Sequence[RowPayload]) -> Batch:
        return assemble(manifest, rows, PolicyName(policy), crew.vocab_size)

    cursor, differences = replay(
        record, checkpoint.cursor, number, assemble=assembled, step=crew.step
    )
    snapshots = Snapshots(scratch / "weights", PolicyName(policy), checkpoint.folder)
    try:
        stored = snapshots.put(snapshots.copy(crew.weights()), cursor.number)
    finally:
        snapshots.close()
    return Replayed(
        begun_at=checkpoint.cursor, ended_at=cursor, differences=differences, stored=stored
    )


def make_checkpoints(
    config: RunConfig, policy: str, run_dir: Path, *, accepts_changes: bool = False
) -> Checkpoints:
    """`checkpoints/step_N`, with a folder per policy between when the run has several."""
    root = run_dir / "checkpoints"
    return Checkpoints(
        root / policy if len(config.models) > 1 else root,
        policy=policy,
        config=identity(config),
        accepts_changes=accepts_changes,
        every=config.for_policy(policy).training.checkpoint_every,
    )


def make_crew(
    config: RunConfig, policy: str, checkpoints: Checkpoints, team: Team
) -> tuple[Crew, Checkpoint]:
    """The learners as the newest checkpoint left them; the first start makes the one of number
    0."""
    if team.place.is_first:
        checkpoint = checkpoints.newest() or _begin(config, policy, checkpoints)
        team.first_says([checkpoint.cursor.number])
    else:
        [number] = team.first_says([0])
        checkpoint = checkpoints.at(number)
    crew = build_crew(config, policy, checkpoint.folder, team)
    crew.restore(checkpoint.read_state())
    return crew, checkpoint


def _begin(config: RunConfig, policy: str, checkpoints: Checkpoints) -> Checkpoint:
    torch.manual_seed(config.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        settings = config.for_policy(policy)
        init_model(settings.model.init, folder, config.seed)
        if settings.model.lora is not None:
            begin_adapter(folder, settings.model.lora, config.seed)
        else:
            name_precision(folder, settings.training.precision)
        crew = build_crew(config, policy, folder)
        return checkpoints.save(
            Cursor(number=0, seq=0, incarnation=0),
            weights=crew.weights(),
            state=crew.state_tensors(),
            static=constant_files(folder),
        )


def _form(config: RunConfig, policy: str, member: Membership | None) -> Team:
    """The gang this process is a rank of, or a team of its own."""
    if member is None:
        return Alone()
    join(member)
    return form_all(spread_of(chain_of(config, policy).stages))
