# SPDX-License-Identifier: Apache-2.0
"""Policies of sources and frozen policies: what each node serves, and what is refused."""

from collections.abc import Callable

import pytest

from penstock.config import RunConfig
from penstock.dataflow.service.build import core_spec, run_info
from penstock.errors import ConfigError

RUN = """\
name: pools
models:
  a: {init: builtin:tiny-qwen3, replicas: 9, engines: 2}
  b: {init: builtin:tiny-qwen3, replicas: 3, training: {groups_per_batch: 2, max_staleness: 3}}
  judge: {init: builtin:tiny-qwen3, frozen: true, replicas: 0, engine: scripted}
sources:
  - {name: left, task: penstock.tasks.reverse, policies: [a, judge]}
  - {name: right, task: penstock.tasks.reverse, policies: [b]}
workflow: my_pair:run
training: {steps: 1, groups_per_batch: 4}
"""
Load = Callable[[str], RunConfig]


def test_nodes_serve_what_shares_a_source_with_their_policy(load_text: Load) -> None:
    config = load_text(RUN)
    assert config.served_with("a") == ("a", "judge")
    assert config.served_with("b") == ("b",)
    everything = load_text(RUN.replace("policies: [a, judge]", "weight: 2.0"))
    assert everything.served_with("a") == () == everything.served_with("b")


def test_only_policies_in_training_are_consumers(load_text: Load) -> None:
    spec = core_spec(load_text(RUN))
    assert {p.policy: (p.groups_per_batch, p.max_staleness) for p in spec.policies} == {
        "a": (4, 1),
        "b": (2, 3),
    }
    assert spec.issue.frozen == ("judge",)
    assert spec.lease.policies == spec.issue.policies == {"left": {"a", "judge"}, "right": {"b"}}


def test_nodes_learn_the_engines_of_each_policy_and_the_policies_of_each_source(
    load_text: Load,
) -> None:
    info = run_info(load_text(RUN))
    assert {name: (e.kind, e.num_engines) for name, e in info.engines.items()} == {
        "a": ("hf", 2),
        "b": ("hf", 1),
        "judge": ("scripted", 1),
    }
    assert {source.name: source.policies for source in info.sources} == {
        "left": ("a", "judge"),
        "right": ("b",),
    }


@pytest.mark.parametrize(
    ("old", "new", "expected_text"),
    [
        ("[a, judge]", "[a, judgex]", r'run.yaml:7.*policies.*"judgex".*did you mean "judge"'),
        ("[a, judge]", "[judge]", r"run.yaml:7.*source left has no policy in training"),
        ("[b]", "[a]", r"models.b.*no source has policy b"),
        ("replicas: 9,", "frozen: true, training: {},", r"training has no effect on a frozen"),
        ("replicas: 9,", "frozen: true, lora: {},", r"lora has no effect on a frozen"),
    ],
)
def test_policies_that_do_not_fit_are_refused(
    load_text: Load, old: str, new: str, expected_text: str
) -> None:
    with pytest.raises(ConfigError, match=expected_text):
        load_text(RUN.replace(old, new, 1))
