# SPDX-License-Identifier: Apache-2.0
"""The plan of a pipeline as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.output import pluralise, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.config.pipeline import PipelineStageConfig
    from penstock.fleet.prediction import MeasuredRates, Prediction
    from penstock.trainer.pipeline.memory_estimate import MemoryEstimate
    from penstock.trainer.pipeline.plan import Chain, Plan, Service


def lines(plan: Plan) -> Iterator[str]:
    """As text: the stages of each trainer, then the services."""
    for chain in plan.chains:
        yield ""
        yield f"trainer for {chain.policy}: {pluralise(chain.num_ranks, 'rank')}" + _on(chain)
        yield from _table({f"{n}. {stage.id}": stage for n, stage in enumerate(chain.stages, 1)})
        memory = _memory(chain.memory, chain.unknown_models, chain.unknown_passes)
        yield f"  peak memory per rank: {memory}"
    if plan.services:
        yield ""
        yield "stages outside the trainers (`penstock stage RUN ID` runs a worker)"
        yield from _table({service.stage.id: service.stage for service in plan.services})
        for service in plan.services:
            tags = ", ".join(service.stage.place or ())
            memory = _memory(service.memory, service.unknown_models)
            yield f"  {service.stage.id} on [{tags}]{_on(service)}: {memory}"


def _table(stages: Mapping[str, PipelineStageConfig]) -> Iterator[str]:
    headers = ("stage", "type", "role", "reads", "writes", "ranks")
    rows: list[tuple[str, ...]] = []
    for name, stage in stages.items():
        reads, writes = ", ".join(stage.reads), ", ".join(stage.writes) or "-"
        rows.append((name, stage.type, stage.role, reads, writes, str(stage.parallel.num_ranks)))
    return (f"  {line}" for line in table(headers, rows, num_left_aligned=5))


def _on(placed: Chain | Service) -> str:
    """Where it is, like `gpu0:0, 1, 2, 3; gpu1:0, 1`."""
    devices: dict[str, list[str]] = {}
    for label in placed.hosts:
        host, _, device = label.partition(":")
        devices.setdefault(host, []).extend([device] if device else [])
    shown = (f"{host}:{', '.join(own)}" if own else host for host, own in devices.items())
    return f", on {'; '.join(shown)}" if devices else ""


def _memory(
    memory: MemoryEstimate, unknown_models: tuple[str, ...], unknown_passes: tuple[str, ...] = ()
) -> str:
    text = memory.text or "no model"
    text += "".join(f"; size of {model} unknown" for model in unknown_models)
    return text + "".join(f"; without the passes of {model}" for model in unknown_passes)


def engine_lines(engines: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Which devices engines get."""
    if engines:
        yield ""
        yield "devices of engines, dealt in order"
        yield from (f"  {name}: {', '.join(map(str, dealt))}" for name, dealt in engines.items())


def step_lines(steps: list[tuple[MeasuredRates, Prediction]]) -> Iterator[str]:
    """What a step would take, as text."""
    for rates, step in steps:
        yield ""
        yield (
            f"steps of {step.policy}, from {rates.tokens_per_gpu_s:,.0f} tokens/s per rollout GPU "
            f"and {rates.train_s:.2f} s of training, measured"
        )
        yield (
            f"  {step.step_s:.2f} s per step: rollout {step.rollout_s:.2f} s on "
            f"{pluralise(step.rollout_gpus, 'GPU')}, training {step.train_s:.2f} s"
        )
        yield f"  waiting: trainer {step.trainer_idle:.0%}, nodes {step.nodes_idle:.0%}"
        yield f"  neither waits at {step.rollout_per_train:.2g} rollout GPUs per training GPU"
