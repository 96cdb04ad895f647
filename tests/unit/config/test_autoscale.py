# SPDX-License-Identifier: Apache-2.0
"""`autoscale`: commands with placeholders, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config import RunConfig
from penstock.errors import ConfigError

LoadText = Callable[..., RunConfig]
STOP = 'stop: [scancel, "{name}"]'


def with_types(example: str, *types: str, mode: str = "recommend") -> str:
    lines = "".join(f"    {one}\n" for one in types)
    return f"{example}autoscale:\n  mode: {mode}\n  node_types:\n{lines}"


def test_a_file_without_it_recommends_and_can_start_nodes_here(
    example: str, load_text: LoadText
) -> None:
    found = load_text(example).autoscale
    assert (found.mode, found.launched_type) == ("recommend", "local")
    assert found.node_types["local"].tags == ()


def test_types_say_what_they_cost(example: str, load_text: LoadText) -> None:
    spot = f'a: {{spot: true, gpus: 8, cost_per_hour: 9.5, start: [sbatch, "{{name}}"], {STOP}}}'
    found = load_text(with_types(example, spot)).autoscale
    assert found.node_types["a"].tags == ("gpus=8", "cost=9.5", "spot")
    assert found.launched_type is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (f'a: {{start: [sbatch, "{{node}}"], {STOP}}}', "unknown placeholder"),
        (f'a: {{start: [sbatch, "{{name.__class__}}"], {STOP}}}', "unknown placeholder"),
        (f'a: {{start: [sbatch, "{{name!r}}"], {STOP}}}', "unknown placeholder"),
        (f'a: {{start: [sbatch, "{{name"], {STOP}}}', "write a literal brace twice"),
        ('a: {start: [sbatch, "{name}"]}', "start and stop belong together"),
        (f"a: {{start: [sbatch], {STOP}}}", "start does not contain {name}"),
    ],
)
def test_a_command_that_could_not_work_is_refused(
    example: str, load_text: LoadText, entry: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(with_types(example, entry))
    assert message in str(error.value)


def test_two_types_of_the_launcher_are_refused(example: str, load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="a and b have no start command"):
        load_text(with_types(example, "a: {}", "b: {}"))


def test_act_needs_a_limit(example: str, load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match=r"dataflow\.report\.max_gpus"):
        load_text(with_types(example, "local: {}", mode="act"))
    load_text(with_types(example, "local: {max_nodes: 4}", mode="act"))
    load_text(with_types(example, "local: {}", mode="act"), ["dataflow.report.max_gpus=4"])
