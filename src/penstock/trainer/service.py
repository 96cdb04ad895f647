# SPDX-License-Identifier: Apache-2.0
"""Wiring of the trainer: config in, a running trainer out. The config ends here."""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from penstock.config import PolicyConfig, RunConfig, digest
from penstock.dataflow.client import TrainerClient
from penstock.errors import Fenced, Unreachable
from penstock.observe.metrics import MetricsFile
from penstock.trainer.advantages import batch_advantages, group_advantages
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.learner import Learner, UpdateSpec
from penstock.trainer.loop import Trainer
from penstock.trainer.losses import LossSpec
from penstock.trainer.models import init_model, load_model, static_files
from penstock.trainer.snapshots import Snapshots, weights_of
from penstock.types import PolicyName

EXIT_FENCED = 3
"""A newer trainer of the policy has taken over; starting this one again would take it back."""

EXIT_STOPPED = 128 + signal.SIGTERM
"""Told to stop before its last step; the next life goes on from the checkpoint it left."""

CREDITS = {"grpo": group_advantages, "reinforce": batch_advantages}
"""By the algorithm's name."""

_log = structlog.get_logger(__name__)


def run_trainer(
    config: RunConfig,
    policy: str,
    *,
    url: str,
    token: str,
    run_dir: Path,
    store_root: Path,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Train until the dataflow says `end` or the caller says stop; the exit code of the process."""
    client = TrainerClient(url, token, is_stopping=is_stopping)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    torch.set_num_threads(config.for_policy(policy).model.torch_threads)
    checkpoints = make_checkpoints(config, policy, run_dir)
    learner, checkpoint = make_learner(config.for_policy(policy), checkpoints, seed=config.seed)
    snapshots = Snapshots(
        store_root,
        PolicyName(policy),
        checkpoint.folder,
        anchor_every=config.weights.anchor_every,
    )
    try:
        is_complete = Trainer(
            policy=PolicyName(policy),
            learner=learner,
            dataflow=client,
            snapshots=snapshots,
            checkpoints=checkpoints,
            metrics=metrics,
            credit=CREDITS[config.for_policy(policy).algorithm.name],
            is_stopping=is_stopping,
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


def make_checkpoints(config: RunConfig, policy: str, run_dir: Path) -> Checkpoints:
    """`checkpoints/step_N`, with a folder per policy between when the run has several."""
    root = run_dir / "checkpoints"
    return Checkpoints(
        root / policy if len(config.models) > 1 else root,
        policy=policy,
        config_digest=digest(config),
        every=config.for_policy(policy).training.checkpoint_every,
    )


def make_learner(
    config: PolicyConfig, checkpoints: Checkpoints, *, seed: int
) -> tuple[Learner, Checkpoint]:
    """The learner as its newest checkpoint left it; the first start makes the one of number 0."""
    checkpoint = checkpoints.newest()
    if checkpoint is not None:
        learner = _new_learner(config, checkpoint.folder)
        learner.restore(checkpoint.read_state())
        return learner, checkpoint
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        init_model(config.model.init, folder, seed)
        learner = _new_learner(config, folder)
        checkpoint = checkpoints.save(
            Cursor(number=0, seq=0, incarnation=0),
            weights=weights_of(learner.model),
            state=learner.state_tensors(),
            static=static_files(folder),
        )
    return learner, checkpoint


def _new_learner(config: PolicyConfig, folder: Path) -> Learner:
    algorithm, training = config.algorithm, config.training
    high = algorithm.epsilon_high
    return Learner(
        load_model(folder),
        LossSpec(
            epsilon=algorithm.epsilon,
            epsilon_high=algorithm.epsilon if high is None else high,
            delta=math.inf if algorithm.delta is None else algorithm.delta,
            entropy_coef=algorithm.entropy_coef,
        ),
        UpdateSpec(
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            minibatches=training.minibatches,
            epochs=training.epochs,
        ),
    )
