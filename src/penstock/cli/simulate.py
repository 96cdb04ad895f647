# SPDX-License-Identifier: Apache-2.0
"""`penstock simulate`: what other data rules would have made of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

if TYPE_CHECKING:
    from penstock.config import RunConfig


def simulate(
    run: Path, /, *, rules: Annotated[Path, Parameter(required=True)], json: bool = False
) -> int:
    """Replay a recorded run through other rules: what would be trained, skipped and wasted.

    The record stands in for nodes and trainers. A task that it never rolled out counts as unknown.

    Parameters
    ----------
    run
        The run folder, or its config file; running or finished.
    rules
        YAML with a list of rules as under `dataflow.rules`, or a mapping with the key `rules`. A
        policy's own rules stay in force.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json
    from penstock.dataflow.ledger.recorded import open_recorded_run
    from penstock.dataflow.service.build import core_spec
    from penstock.dataflow.simulate.figures import count_totals, recorded_totals
    from penstock.dataflow.simulate.run import SimulatedSource
    from penstock.dataflow.simulate.run import simulate as replay
    from penstock.dataflow.simulate.text import lines
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    config = with_rules(folder.read_config(), rules)
    recorded = open_recorded_run(folder.path / "ledger")
    try:
        before = recorded_totals(recorded)
        sources = [
            SimulatedSource(name=one.name, weight=one.weight, limit=one.limit)
            for one in config.sources
        ]
        simulated = replay(recorded, core_spec(config), sources)
    finally:
        recorded.close()
    after = count_totals(simulated.tables, simulated.rows, simulated.unknown)
    simulated.tables.close()
    if json:
        print_json(
            {"recorded": before, "simulated": after, "unfilled": simulated.num_unfilled_batches}
        )
    else:
        print("\n".join(lines(before, after, rules.name, simulated.num_unfilled_batches)))
    return 0


def with_rules(config: RunConfig, path: Path) -> RunConfig:
    """The same run under the rules of this file."""
    import yaml
    from pydantic import ValidationError

    from penstock.config import RunConfig
    from penstock.config.error_messages import path_text, problems_of
    from penstock.errors import ConfigError

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if isinstance(found, dict):
        entries = cast(dict[str, Any], found)
        if [*entries] != ["rules"]:
            raise ConfigError(
                f"{path}: has the keys {', '.join(map(str, entries))}; write one key `rules` with "
                "a list, like rules: [{admit: reward-spread}]"
            )
        found = entries["rules"]
    if not isinstance(found, list):
        raise ConfigError(f"{path}: must be a list of rules, like [{{admit: reward-spread}}]")
    values = config.model_dump(mode="json")
    values["dataflow"]["rules"] = found
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = {
            f"{path}: {path_text(problem.keys[0])}: {problem.text}"
            for problem in problems_of(error)
        }
        raise ConfigError("\n".join(sorted(problems))) from None
