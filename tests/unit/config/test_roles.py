# SPDX-License-Identifier: Apache-2.0
"""Roles: which policy plays each part of a workflow."""

from collections.abc import Callable

import pytest

from penstock.config import RunConfig
from penstock.dataflow.service.build import run_info
from penstock.errors import ConfigError

RUN = """\
name: pair
models:
  big: {init: builtin:tiny-qwen3}
  small: {init: builtin:tiny-qwen3}
roles: {solver: big, verifier: small, small: small}
sources: [{name: train, task: penstock.tasks.reverse}]
workflow: my_pair:run
training: {steps: 1}
"""
Load = Callable[[str], RunConfig]


def test_nodes_learn_which_policy_plays_a_role(load_text: Load) -> None:
    info = run_info(load_text(RUN))
    assert info.roles == {"solver": "big", "verifier": "small", "small": "small"}
    assert run_info(load_text(RUN.replace("roles: {", "roles: {} #"))).roles == {}


@pytest.mark.parametrize(
    ("written", "expected_text"),
    [
        ("solver: bigg", 'unknown policy "bigg".*did you mean "big"'),
        ("big: small", "role big is also the name of a policy.*rename the role"),
        ("a b: big", "is not valid here"),
    ],
)
def test_roles_of_no_policy_are_refused_at_their_key(
    load_text: Load, written: str, expected_text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"run.yaml:5.*roles.*{expected_text}"):
        load_text(RUN.replace("solver: big,", f"{written},"))
