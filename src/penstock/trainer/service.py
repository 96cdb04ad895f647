# SPDX-License-Identifier: Apache-2.0
"""Wiring of the trainer: config in, a running trainer out. The config ends here."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from penstock.config import RunConfig, identity
from penstock.config.rank_hosts import host_of_each_rank
from penstock.dataflow.client.dataflow import TrainerClient
from penstock.errors import Fenced, Unreachable
from penstock.observe.metrics import MetricsFile
from penstock.trainer.build import build_models, load_policy, parallel_layouts
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.device import CPU, select_device
from penstock.trainer.learner import SkipReason, Stats, initial_state
from penstock.trainer.loop import Trainer
from penstock.trainer.lora import adapter_tensors, init_adapter
from penstock.trainer.model_folders import init_model, set_config_dtype
from penstock.trainer.models import Models
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.progress_reports import ProgressReports
from penstock.trainer.publisher import ShareWriter
from penstock.trainer.ranks.group import Ranks, SingleRank, init_process_group, make_ranks
from penstock.trainer.ranks.rendezvous import RanksNotMet, is_of_collective
from penstock.trainer.ranks.row_fetch import fetch_rows
from penstock.trainer.ranks.supervisor import EXIT_NOT_MET, RankEnv
from penstock.trainer.ranks.worker_loop import num_ranks, worker_loop
from penstock.trainer.replay import (
    RecordedRows,
    ReplayResult,
    RunRecord,
    check_num_ranks,
    choose_start_checkpoint,
    replay,
)
from penstock.trainer.snapshots import Snapshots, unchanged_files, weights_of
from penstock.trainer.state_shards import StateShard
from penstock.trainer.takeover import take_over
from penstock.trainer.weight_shares import ShareBuffers
from penstock.types import Manifest, PolicyName
from penstock.wire.held_token import Token

EXIT_FENCED = 3
"""A newer trainer of the policy has taken over; restarting this one would take over in turn."""

EXIT_STOPPED = 128 + signal.SIGTERM
"""Stopped before its last step; the next process continues from the checkpoint it left."""

_log = structlog.get_logger(__name__)


def run_trainer(
    config: RunConfig,
    policy: str,
    *,
    url: str,
    token: Token,
    run_dir: Path,
    store_root: Path,
    rank_env: RankEnv | None = None,
    accepts_changes: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Train until the dataflow reports the end or the caller stops it; return the exit code.

    rank_env: which rank this process is. accepts_changes: resume from a checkpoint that was saved
    under another config."""
    torch.set_num_threads(config.for_policy(policy).model.torch_threads)
    checkpoints = make_checkpoints(config, policy, run_dir, accepts_changes=accepts_changes)
    device = select_device(rank_env.local_rank if rank_env else 0)
    try:
        with joined_ranks(config, policy, rank_env, device, is_stopping) as ranks:
            return _run_rank(
                config,
                policy,
                ranks,
                device,
                checkpoints=checkpoints,
                client=TrainerClient(url, token, is_stopping=is_stopping),
                metrics=MetricsFile(run_dir / "metrics.jsonl"),
                store_root=store_root,
                is_stopping=is_stopping,
            )
    except RanksNotMet as error:
        _log.warning("ranks did not meet", why=str(error))
        return EXIT_NOT_MET


def _run_rank(
    config: RunConfig,
    policy: str,
    ranks: Ranks,
    device: torch.device,
    *,
    checkpoints: Checkpoints,
    client: TrainerClient,
    metrics: MetricsFile,
    store_root: Path,
    is_stopping: Callable[[], bool],
) -> int:
    """Do the work of one rank; returns its exit code."""
    reports = ProgressReports(partial(client.progress, PolicyName(policy)))
    restore = partial(
        restore_models, config, policy, checkpoints, ranks, device, on_micro_batch=reports.count
    )
    if not ranks.position.is_rank0:
        models, checkpoint = restore()
        writer = ShareWriter(store_root, checkpoint.folder, rank=ranks.position.rank)
        worker_loop(PolicyName(policy), models, client, ranks, checkpoints.root, writer)
        return 0
    with ExitStack() as opened:
        opened.callback(client.close)
        opened.callback(metrics.close)
        try:
            open_newest(config, policy, checkpoints)
            takeover = take_over(client, PolicyName(policy), checkpoints)
            models, checkpoint = restore(newest=takeover.checkpoint)
            snapshots = Snapshots(
                store_root,
                PolicyName(policy),
                checkpoint.folder,
                anchor_every=config.weights.anchor_every,
            )
            opened.callback(snapshots.close)
            trainer = Trainer(
                policy=PolicyName(policy),
                models=models,
                ranks=ranks,
                dataflow=client,
                snapshots=snapshots,
                checkpoints=checkpoints,
                incarnation=takeover.incarnation,
                metrics=metrics,
                is_stopping=is_stopping,
                publish_every_version=config.deterministic,
                roles=config.roles,
            )
            with reports:
                is_complete = trainer.run()
        except Fenced as error:
            _log.error("trainer replaced; exiting", policy=policy, why=str(error))
            return EXIT_FENCED
        except Unreachable as error:
            if not is_stopping():
                raise
            why = str(error)
            _log.warning("stopped while the dataflow was unreachable", policy=policy, why=why)
            return EXIT_STOPPED
    ended = "training complete" if is_complete else "stopped after a checkpoint"
    _log.info(ended, policy=policy, number=checkpoints.last.cursor.number)
    return 0 if is_complete else EXIT_STOPPED


def replay_step(
    config: RunConfig,
    policy: str,
    record: RunRecord,
    *,
    number: int,
    run_dir: Path,
    scratch: Path,
    ranks: Ranks | None = None,
    device: torch.device = CPU,
) -> ReplayResult | None:
    """Recompute `number`, from the newest checkpoint before it, into a store in `scratch`. All
    ranks call it, and rank 0 gets the result."""
    ranks = ranks or SingleRank()
    torch.set_num_threads(config.for_policy(policy).model.torch_threads)
    checkpoints = make_checkpoints(config, policy, run_dir)
    check_num_ranks(num_ranks(ranks), chain_of(config, policy).num_ranks)
    checkpoint = choose_start_checkpoint(checkpoints, number, ranks)
    if checkpoint is None:
        return None
    models = build_models(config, policy, checkpoint.folder, ranks, device)
    models.restore(checkpoint.read_state())

    def step(manifest: Manifest) -> Stats:
        cost, source = models.cost, RecordedRows(record=record)
        rows = fetch_rows(source, manifest, ranks, minibatches=models.minibatches, cost=cost)
        stats = models.step(models.assemble(manifest, rows, PolicyName(policy)))
        [is_trained] = ranks.broadcast_from_rank0([int(stats.skipped is None)])
        if ranks.position.is_rank0 or is_trained:
            return stats
        return replace(stats, skipped=SkipReason.NO_TOKENS)  # for a rank that sat the actor out

    cursor, differences = replay(record, checkpoint.cursor, number, step=step)
    weights = models.gather_weights()
    if not ranks.position.is_rank0:
        return None
    snapshots = Snapshots(scratch / "weights", PolicyName(policy), checkpoint.folder)
    try:
        stored = snapshots.put(snapshots.copy(weights), cursor.number)
    finally:
        snapshots.close()
    return ReplayResult(
        started_at=checkpoint.cursor, ended_at=cursor, differences=differences, stored=stored
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


def restore_models(
    config: RunConfig,
    policy: str,
    checkpoints: Checkpoints,
    ranks: Ranks,
    device: torch.device = CPU,
    on_micro_batch: Callable[[], None] = lambda: None,
    newest: Checkpoint | None = None,
) -> tuple[Models, Checkpoint]:
    """The learners as the newest checkpoint left them. newest: the first rank's, if it has opened
    it."""
    if ranks.position.is_rank0:
        checkpoint = newest or open_newest(config, policy, checkpoints)
        ranks.broadcast_from_rank0([checkpoint.cursor.number])
    else:
        [number] = ranks.broadcast_from_rank0([0])
        checkpoint = checkpoints.read_step(number)
    models = build_models(config, policy, checkpoint.folder, ranks, device, on_micro_batch)
    models.restore(checkpoint.read_state())
    return models, checkpoint


def open_newest(config: RunConfig, policy: str, checkpoints: Checkpoints) -> Checkpoint:
    """The newest checkpoint; the first start makes the one of number 0."""
    return checkpoints.open_newest() or _init_checkpoint(config, policy, checkpoints)


def _init_checkpoint(config: RunConfig, policy: str, checkpoints: Checkpoints) -> Checkpoint:
    torch.manual_seed(config.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        init_model(config.for_policy(policy).model.init, folder, config.seed)
        return save_initial_checkpoint(config, policy, checkpoints, folder)


def save_initial_checkpoint(
    config: RunConfig, policy: str, checkpoints: Checkpoints, folder: Path
) -> Checkpoint:
    """Number 0, from the model in this folder only: other learners are initialized when they are
    built, each rank with its shard. Changes the folder."""
    torch.manual_seed(config.seed)
    settings = config.for_policy(policy)
    if settings.model.lora is not None:
        init_adapter(folder, settings.model.lora, config.seed)
    else:
        set_config_dtype(folder, settings.training.precision)
    model = load_policy(settings, folder)
    adapter = {name: tensor.detach() for name, tensor in adapter_tensors(model).items()}
    return checkpoints.save(
        Cursor(number=0, seq=0, incarnation=0),
        weights=ShareBuffers().copy(adapter or weights_of(model)),
        state=StateShard(tensors=initial_state()),
        static=unchanged_files(folder),
    )


@contextmanager
def joined_ranks(
    config: RunConfig,
    policy: str,
    rank_env: RankEnv | None,
    device: torch.device,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Generator[Ranks]:
    """The ranks that this process belongs to, or a single rank; says who is missing if they can go
    on no longer."""
    if rank_env is None:
        yield SingleRank()
        return
    watch = init_process_group(
        rank_env,
        device=device.type,
        timeout_s=config.for_policy(policy).training.rank_timeout_s,
        hosts=host_of_each_rank(config, policy),
        is_stopping=is_stopping,
    )
    try:
        yield make_ranks(parallel_layouts(chain_of(config, policy).stages), device=device.type)
    except RuntimeError as error:
        if is_of_collective(error):
            watch.explain(error)
        raise
    finally:
        watch.close()
