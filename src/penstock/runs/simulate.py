# SPDX-License-Identifier: Apache-2.0
"""Simulates a recorded run under other data rules."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from penstock.config import RunConfig
from penstock.config.error_messages import path_text, problems_of
from penstock.config.yaml_positions import read_values
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.service.build import core_spec
from penstock.dataflow.simulate.figures import RunTotals, count_totals, recorded_totals
from penstock.dataflow.simulate.run import SimulatedSource, simulate
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    recorded: RunTotals
    simulated: RunTotals
    num_unfilled_batches: int
    """Recorded batches that the other rules could not fill."""


def simulate_run(folder: RunFolder, config: RunConfig) -> SimulatedRun:
    """Feed the run's recorded rollouts through the rules of `config`."""
    sources = [
        SimulatedSource(name=source.name, weight=source.weight, limit=source.limit)
        for source in config.sources
    ]
    with closing(open_recorded_run(folder.path / "ledger")) as recorded:
        before = recorded_totals(recorded)
        simulated = simulate(recorded, core_spec(config), sources)
    after = count_totals(simulated.tables, simulated.rows, simulated.unknown)
    simulated.tables.close()
    num_unfilled = simulated.num_unfilled_batches
    return SimulatedRun(recorded=before, simulated=after, num_unfilled_batches=num_unfilled)


def with_rules(config: RunConfig, path: Path) -> RunConfig:
    """The same config with the data rules of this file."""
    values = config.model_dump(mode="json")
    values["dataflow"]["rules"] = _read_rules(path)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = {
            f"{path}: {path_text(problem.keys[0])}: {problem.text}"
            for problem in problems_of(error)
        }
        raise ConfigError("\n".join(sorted(problems))) from None


def _read_rules(path: Path) -> list[Any]:
    try:
        found = read_values(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the rules file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(found, dict):
        entries = cast(dict[str, Any], found)
        if [*entries] != ["rules"]:
            raise ConfigError(
                f"{path}: unexpected keys {', '.join(map(str, entries))}; expected a single key "
                "`rules` with a list, such as rules: [{admit: reward-spread}]"
            )
        found = entries["rules"]
    if not isinstance(found, list):
        raise ConfigError(
            f"{path}: expected a list of rules, such as [{{admit: reward-spread}}], got "
            f"{type(found).__name__}"
        )
    return cast(list[Any], found)
