# SPDX-License-Identifier: Apache-2.0
"""Takes attempts of the probe through the training graph to a loss, on a tiny model.

Owns the stand-ins: the built-in model for every model of the run, with token ids folded into its
vocabulary, and rewards that differ. What is checked is the user's stages and losses, and the shapes
between them; not whether the run's own models load."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from msgspec import structs

from penstock.config import PipelineStageConfig, RunConfig
from penstock.config.builtin_stages import Axis, known_axis
from penstock.dataflow.service.nodes.validate import summarise
from penstock.errors import ConfigError
from penstock.hub import TINY_QWEN3
from penstock.plugins import load_module
from penstock.runs.probe_report import Reporter, code_of, code_of_error, user_traceback
from penstock.trainer.model_folders import initial_folder, tiny_shapes
from penstock.types import (
    FinishReason,
    GroupId,
    Manifest,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SamplingSpec,
    SealedGroup,
    Trajectory,
    Turn,
    log_probs,
    token_ids,
    view_ids,
)
from penstock.wire.codec import encode

if TYPE_CHECKING:
    from penstock.trainer.learner import Stats

GROUP_SIZE = 4
GROUP = GroupId("check")


def check_loss(config: RunConfig, trajectories: Sequence[Trajectory], reporter: Reporter) -> None:
    """Train each policy once on a group made of the first attempt with its turns."""
    reporter.begin("torch", "")
    before = time.process_time()
    load_module("penstock.trainer.build")  # with torch and transformers

    reporter.result.import_cpu_s = time.process_time() - before
    small = with_tiny_models(config)
    for policy in config.trained:
        reporter.begin(f"loss of {policy}", "pipeline" if config.pipeline else "algorithm")
        made_by = [t for t in trajectories if any(turn.policy == policy for turn in t.turns)]
        if not made_by:
            reporter.result.notes.append(
                f"models.{policy}: the workflow did not call this policy, so its loss was not "
                "computed"
            )
            continue
        _check_policy(small, PolicyName(policy), made_by[0], reporter)


def _check_policy(
    config: RunConfig, policy: PolicyName, trajectory: Trajectory, reporter: Reporter
) -> None:
    try:
        stats = _train_once(config, policy, trajectory)
    except (Exception, SystemExit) as error:
        made_up = [name for name, axis in _service_columns(config).items() if axis is None]
        if made_up:
            reporter.result.notes.append(
                f"pipeline: the loss was not computed, since only a service can say what "
                f"{', '.join(made_up)} holds ({type(error).__name__}: {error})"
            )
            return
        key, stage = _failed_stage(config, error)
        what = f"stage {stage.id}: {stage.fn}" if stage else "the training graph"
        text = str(error)
        if not isinstance(error, ConfigError):
            text = f"{what} raised {type(error).__name__}: {error}; mend it, or its options"
        code = code_of_error(error) or (code_of(stage.fn or "") if stage else "")
        detail = "" if isinstance(error, ConfigError) else user_traceback(error)
        reporter.add(key, text, code=code, detail=detail)
        return
    loss = stats.values.get("loss", math.nan)
    if stats.skipped is not None or not math.isfinite(loss):
        _add_skipped(config, policy, stats, reporter)
    else:
        reporter.result.losses[policy] = loss


def _add_skipped(config: RunConfig, policy: str, stats: Stats, reporter: Reporter) -> None:
    own = [
        (index, stage)
        for index, stage in enumerate(config.pipeline.stages if config.pipeline else ())
        if stage.fn
    ]
    why = stats.skipped or "its loss is not finite"
    if not own:
        reporter.result.notes.append(f"models.{policy}: the tiny batch was skipped ({why})")
        return
    index, stage = own[-1]
    reporter.add(
        f"pipeline.stages[{index}].fn",
        f"policy {policy} learns nothing from a tiny batch: {why}; check that {stage.fn} returns "
        "finite numbers, not all 0",
        code=code_of(stage.fn or ""),
    )


def with_tiny_models(config: RunConfig) -> RunConfig:
    """The config with the built-in model in place of every model, on one rank."""
    values: dict[str, Any] = config.model_dump(mode="json")
    one_rank = {"dp": 1, "tp": 1}
    for section in (values, *values["models"].values()):
        if section.get("training"):
            section["training"] |= {"parallel": one_rank, "minibatches": 1, "epochs": 1}
            section["training"] |= {"hosts": None, "devices": None, "router_replay": False}
        if section.get("algorithm") and section["algorithm"].get("teacher"):
            section["algorithm"]["teacher"] = TINY_QWEN3
    for model in values["models"].values():
        model |= {"init": TINY_QWEN3, "lora": None}
    values["hosts"] = {}
    if pipeline := values["pipeline"]:
        for stage in pipeline["stages"]:
            stage["parallel"] = one_rank
            if stage["model"] and not stage["place"]:
                stage["model"] = TINY_QWEN3
    return RunConfig.model_validate(values)


def _train_once(config: RunConfig, policy: PolicyName, trajectory: Trajectory) -> Stats:
    from penstock.trainer.build import build_models

    with initial_folder(TINY_QWEN3, config.seed) as folder:
        models = build_models(config, policy, folder)
        manifest, rows = _tiny_batch(config, policy, trajectory)
        return models.step(models.assemble(manifest, rows, policy))


def _tiny_batch(
    config: RunConfig, policy: PolicyName, trajectory: Trajectory
) -> tuple[Manifest, list[RowPayload]]:
    """A group of copies of one attempt, with rewards 0 and 1 in turn."""
    vocab_size, _ = tiny_shapes()["model.embed_tokens.weight"]
    turns = tuple(_folded(turn, vocab_size) for turn in trajectory.turns)
    columns = _service_columns(config)
    num_sampled = sum(len(view_ids(turn.sampled_ids)) for turn in turns)
    by_row = {name: 0.5 for name, axis in columns.items() if axis is not Axis.TOKEN}
    zeros = bytes(log_probs([0.0] * num_sampled))
    by_token = {name: zeros for name, axis in columns.items() if axis is Axis.TOKEN}
    summaries: list[RowSummary] = []
    rows: list[RowPayload] = []
    for slot in range(GROUP_SIZE):
        row_id = RowId(f"{GROUP}.{slot}.1")
        member = replace(
            trajectory,
            turns=turns,
            row_id=row_id,
            group_id=GROUP,
            slot=slot,
            reward=slot % 2.0,
            outcome=Outcome(kind=OutcomeKind.COMPLETED),
        )
        payload = encode(member)
        digest = blake3(payload).hexdigest()
        summary = summarise(member, digest, lambda policy, incarnation, number: True)
        assert isinstance(summary, RowSummary), summary
        digests = {name: blake3(values).hexdigest() for name, values in by_token.items()}
        summaries.append(structs.replace(summary, values=by_row, columns=digests))
        rows.append(RowPayload(row_id=row_id, payload=payload, columns=by_token))
    group = SealedGroup(group_id=GROUP, task_key="check", rows=tuple(summaries))
    return Manifest(consumer=policy, seq=1, trains_from=0, groups=(group,)), rows


def _folded(turn: Turn, vocab_size: int) -> Turn:
    """The turn in the tiny model's tokens, as that model samples them before it has learned: all
    alike."""
    sampled = view_ids(turn.sampled_ids).tolist()
    return replace(
        turn,
        prompt_ids=token_ids(token % vocab_size for token in view_ids(turn.prompt_ids)),
        sampled_ids=token_ids(token % vocab_size for token in sampled),
        logprobs=log_probs([-math.log(vocab_size)] * len(sampled)),
        sampling=SamplingSpec(max_tokens=turn.sampling.max_tokens),
        finish=FinishReason.STOP,  # some algorithms leave out truncated answers
    )


def _service_columns(config: RunConfig) -> Mapping[str, Axis | None]:
    """The columns that stages outside the trainer write, with their axis where the name tells it;
    the reward has its own value. Their functions are not called: they may need another host."""
    services = config.pipeline.services if config.pipeline else ()
    written = {column for _, stage in services for column in stage.writes}
    return {column: known_axis(column) for column in written - {"reward"}}


def _failed_stage(
    config: RunConfig, error: BaseException
) -> tuple[str, PipelineStageConfig | None]:
    """(config key, stage) of the user's function that an error came from, as far as one knows."""
    stages = config.pipeline.stages if config.pipeline else ()
    raised_in = code_of_error(error).rpartition(":")[0]
    own = [(index, stage) for index, stage in enumerate(stages) if stage.fn]
    for index, stage in own:
        is_named = f"stage {stage.id}" in str(error)
        is_loss = stage.type == "train" and "the loss returned" in str(error)
        if is_named or is_loss:
            return f"pipeline.stages[{index}].fn", stage
    for index, stage in own:
        if raised_in and code_of(stage.fn or "").rpartition(":")[0] == raised_in:
            return f"pipeline.stages[{index}].fn", stage
    return ("pipeline.stages" if stages else "algorithm"), None
