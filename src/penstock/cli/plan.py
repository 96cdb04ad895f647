# SPDX-License-Identifier: Apache-2.0
"""`penstock plan`: the training pipeline with stages, placement, memory and predicted steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import print_json, print_note, print_text
from penstock.cli.plan_lines import engine_lines, lines, step_lines

if TYPE_CHECKING:
    from penstock.fleet.prediction import MeasuredRates, Prediction
    from penstock.runs.target import RunTarget
    from penstock.trainer.pipeline.plan import Plan


def plan(
    target: Path,
    /,
    *overrides: str,
    rates: Path | None = None,
    svg: Path | None = None,
    json: bool = False,
) -> int:
    """Show the training pipeline: stages, placement and memory.

    If this run, or another one, has measured its rates, also predict step time, the split between
    rollout and training, and how long each side waits.

    Args:
        target: Config file, or run folder.
        overrides: Settings that override the file, such as algorithm.name=ppo.
        rates: Run folder whose measured rates to predict with; by default the run's own.
        svg: Also draw the pipeline into this SVG file.
        json: Print one JSON object as the last line.
    """
    from penstock.devices import visible_devices
    from penstock.fleet.device_plan import layout_here, this_host
    from penstock.runs.target import read_target
    from penstock.trainer.pipeline.builtin import plan_of

    known = read_target(target, overrides)
    config = known.config
    num_devices = len(visible_devices())
    found = plan_of(config, this_host(config.all_hosts), has_gpus=num_devices > 0)
    names = {name: config.for_policy(name).algorithm.name for name in config.trained}
    is_custom = config.pipeline is not None and bool(config.pipeline.stages)
    kind = "custom pipeline" if is_custom else ", ".join(dict.fromkeys(names.values()))
    if svg is not None:
        _write_svg(found, f"{config.name}: {kind}", svg)
    engines = layout_here(config, num_devices).engines
    predicted = _predict(known, found, rates)
    if json:
        body = {"run": config.name, "svg": None if svg is None else str(svg), **as_json(found)}
        steps = [{"measured": rates, "predicted": step} for rates, step in predicted]
        print_json({**body, "engine_devices": engines, "steps": steps})
    else:
        shown = [*lines(found), *engine_lines(engines), *step_lines(predicted)]
        print_text("\n".join([f"{config.name}: {kind}", *shown]))
    return 0


def _predict(
    known: RunTarget, plan: Plan, rates: Path | None
) -> list[tuple[MeasuredRates, Prediction]]:
    from penstock.errors import ConfigError
    from penstock.runs.step_plan import predict_steps
    from penstock.runs.target import find_run_folder

    ranks = {str(chain.policy): chain.num_ranks for chain in plan.chains}
    if rates is not None:
        return predict_steps(known.config, find_run_folder(rates), ranks)
    try:
        return predict_steps(known.config, known.folder, ranks)
    except ConfigError:  # it never ran
        return []


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
