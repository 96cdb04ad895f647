# SPDX-License-Identifier: Apache-2.0
"""`penstock plan`: the training pipeline with stages, placement and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import pluralise, print_json, print_note, print_text, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.config.pipeline import PipelineStageConfig
    from penstock.trainer.pipeline.memory_estimate import MemoryEstimate
    from penstock.trainer.pipeline.plan import Chain, Plan, Service


def plan(target: Path, /, *overrides: str, svg: Path | None = None, json: bool = False) -> int:
    """Show the training pipeline: stages, placement and memory.

    Args:
        target: Config file, or run folder.
        overrides: Settings that override the file, such as algorithm.name=ppo.
        svg: Also draw the pipeline into this SVG file.
        json: Print one JSON object as the last line.
    """
    from penstock.devices import visible_devices
    from penstock.fleet.device_plan import layout_here, this_host
    from penstock.runs.target import read_target
    from penstock.trainer.pipeline.builtin import plan_of

    config = read_target(target, overrides).config
    num_devices = len(visible_devices())
    found = plan_of(config, this_host(config.all_hosts), has_gpus=num_devices > 0)
    names = {name: config.for_policy(name).algorithm.name for name in config.trained}
    is_custom = config.pipeline is not None and bool(config.pipeline.stages)
    kind = "custom pipeline" if is_custom else ", ".join(dict.fromkeys(names.values()))
    if svg is not None:
        _write_svg(found, f"{config.name}: {kind}", svg)
    engines = layout_here(config, num_devices).engines
    if json:
        body = {"run": config.name, "svg": None if svg is None else str(svg), **as_json(found)}
        print_json({**body, "engine_devices": engines})
    else:
        print_text("\n".join([f"{config.name}: {kind}", *lines(found), *_engine_lines(engines)]))
    return 0


def _engine_lines(engines: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    if engines:
        yield ""
        yield "devices of engines, dealt in order"
        yield from (f"  {name}: {', '.join(map(str, dealt))}" for name, dealt in engines.items())


def _write_svg(plan: Plan, title: str, path: Path) -> None:
    from penstock.errors import ConfigError
    from penstock.trainer.pipeline.svg import to_svg

    try:
        path.write_text(to_svg(plan, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another file with --svg"
        ) from None
    print_note(f"wrote {path}")


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


def as_json(plan: Plan) -> dict[str, object]:
    """The plan as JSON."""
    return {
        "chains": [
            {
                "policy": chain.policy,
                "stages": [stage.model_dump(mode="json") for stage in chain.stages],
                "ranks": chain.num_ranks,
                "memory_bytes": chain.memory.total_bytes,
                "memory": chain.memory.parts,
                "hosts": chain.hosts,
                "uncounted": chain.unknown_models,
            }
            for chain in plan.chains
        ],
        "services": [
            {
                "stage": service.stage.model_dump(mode="json"),
                "memory_bytes": service.memory.total_bytes,
                "hosts": service.hosts,
                "uncounted": service.unknown_models,
            }
            for service in plan.services
        ],
    }
