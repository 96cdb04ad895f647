# SPDX-License-Identifier: Apache-2.0
"""Wiring of the trainer: config in, a running trainer out. The config ends here."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from penstock.config import RunConfig, identity
from penstock.dataflow.client.dataflow import TrainerClient
from penstock.errors import Fenced, Unreachable
from penstock.observe.metrics import MetricsFile
from penstock.trainer.batches import assemble
from penstock.trainer.build import build_crew, load_policy, spread_of
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.config_upgrade import as_written_now
from penstock.trainer.device import CPU, own_device
from penstock.trainer.learner import SkipReason, Stats, first_state
from penstock.trainer.loop import Trainer
from penstock.trainer.lora import adapter_tensors, begin_adapter
from penstock.trainer.model_folders import init_model, name_precision
from penstock.trainer.models import Crew
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.ranks.group import Alone, Team, form_all, join
from penstock.trainer.ranks.row_fetch import draw_rows
from penstock.trainer.ranks.supervisor import Membership
from penstock.trainer.ranks.worker_loop import follow, num_ranks
from penstock.trainer.replay import (
    Record,
    RecordedRows,
    Replayed,
    agree_on_beginning,
    refuse_other_ranks,
    replay,
)
from penstock.trainer.snapshots import Snapshots, constant_files, weights_of
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
    device = own_device(member.local_rank if member else 0)
    team = form_team(config, policy, member, device)
    crew, checkpoint = make_crew(config, policy, checkpoints, team, device)
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
    config: RunConfig,
    policy: str,
    record: Record,
    *,
    number: int,
    run_dir: Path,
    scratch: Path,
    team: Team | None = None,
    device: torch.device = CPU,
) -> Replayed | None:
    """Compute `number` again, from the newest checkpoint before it, into a store in `scratch`. All
    ranks of a team call it, and the first one gets what came of it."""
    team = team or Alone()
    torch.set_num_threads(config.for_policy(policy).model.torch_threads)
    checkpoints = make_checkpoints(config, policy, run_dir)
    refuse_other_ranks(num_ranks(team), chain_of(config, policy).num_ranks)
    checkpoint = agree_on_beginning(checkpoints, number, team)
    if checkpoint is None:
        return None
    crew = build_crew(config, policy, checkpoint.folder, team, device)
    crew.restore(checkpoint.read_state())

    def step(manifest: Manifest) -> Stats:
        rows = draw_rows(RecordedRows(record=record), manifest, team, minibatches=crew.minibatches)
        batch = assemble(manifest, rows, PolicyName(policy), crew.vocab_size, ranks=team)
        stats = crew.step(batch)
        [is_trained] = team.first_says([int(stats.skipped is None)])
        if team.place.is_first or is_trained:
            return stats
        return replace(stats, skipped=SkipReason.NO_TOKENS)  # for a rank that sat the actor out

    cursor, differences = replay(record, checkpoint.cursor, number, step=step)
    weights = crew.weights()
    if not team.place.is_first:
        return None
    snapshots = Snapshots(scratch / "weights", PolicyName(policy), checkpoint.folder)
    try:
        stored = snapshots.put(snapshots.copy(weights), cursor.number)
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
        complete_config=lambda saved: as_written_now(saved, config),
        every=config.for_policy(policy).training.checkpoint_every,
    )


def make_crew(
    config: RunConfig,
    policy: str,
    checkpoints: Checkpoints,
    team: Team,
    device: torch.device = CPU,
) -> tuple[Crew, Checkpoint]:
    """The learners as the newest checkpoint left them; the first start makes the one of number
    0."""
    if team.place.is_first:
        checkpoint = checkpoints.newest() or _begin(config, policy, checkpoints)
        team.first_says([checkpoint.cursor.number])
    else:
        [number] = team.first_says([0])
        checkpoint = checkpoints.at(number)
    crew = build_crew(config, policy, checkpoint.folder, team, device)
    crew.restore(checkpoint.read_state())
    return crew, checkpoint


def _begin(config: RunConfig, policy: str, checkpoints: Checkpoints) -> Checkpoint:
    torch.manual_seed(config.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        init_model(config.for_policy(policy).model.init, folder, config.seed)
        return begin_with(config, policy, checkpoints, folder)


def begin_with(
    config: RunConfig, policy: str, checkpoints: Checkpoints, folder: Path
) -> Checkpoint:
    """Number 0, of the model in this folder alone: what else learns begins when it is built, each
    rank with its share. The folder is changed."""
    torch.manual_seed(config.seed)
    settings = config.for_policy(policy)
    if settings.model.lora is not None:
        begin_adapter(folder, settings.model.lora, config.seed)
    else:
        name_precision(folder, settings.training.precision)
    model = load_policy(settings, folder)
    adapter = {name: tensor.detach() for name, tensor in adapter_tensors(model).items()}
    return checkpoints.save(
        Cursor(number=0, seq=0, incarnation=0),
        weights=adapter or weights_of(model),
        state=first_state(),
        static=constant_files(folder),
    )


def form_team(
    config: RunConfig, policy: str, member: Membership | None, device: torch.device
) -> Team:
    """The gang this process is a rank of, or a team of its own."""
    if member is None:
        return Alone()
    join(member, device=device.type)
    return form_all(spread_of(chain_of(config, policy).stages), device=device.type)
