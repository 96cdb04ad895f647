# SPDX-License-Identifier: Apache-2.0
"""Names of metrics as MLflow takes them; `tests/contract/test_trackers.py` asks the library."""

from __future__ import annotations

import posixpath
import re

import pytest

from penstock.observe.trackers.mlflow import MAX_NAME_CHARS, with_accepted_names

PLAIN = ("reward/mean", "reward/role/solver of riddles", "ratio/log_q001", "a:b-c.d", "rôle", ".x")
STRANGE = {
    "reward/role/a(b": "reward/role/a_b",
    "reward/role/x//y": "reward/role/x/_/y",
    "reward/role/../../loss": "reward/role/__/__/loss",
    "reward/role/.": "reward/role/_",
    "reward/role/": "reward/role/_",
    "/": "_/_",
    "": "_",
    "..x": "_.x",
    "a\n": "a_",
    "\U0001f600": "_",
    "/" * 300: "_/" * 124 + "_",
    "x" * 248 + "/yz": "x" * 248 + "/y",
    "x" * 249 + "/y": "x" * 249,
}


def _takes(name: str) -> bool:
    """As mlflow.utils.validation does."""
    norm = posixpath.normpath(name)
    return (
        0 < len(name) <= MAX_NAME_CHARS
        and re.fullmatch(r"[/\w.\- :]*", name) is not None
        and norm == name
        and norm != "."
        and not norm.startswith(("..", "/"))
    )


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_name_stays(name: str) -> None:
    assert _takes(name)
    assert with_accepted_names({name: 1.0}) == {name: 1.0}


@pytest.mark.parametrize("name", STRANGE)
def test_a_name_that_mlflow_refuses_is_replaced(name: str) -> None:
    assert not _takes(name)
    [found] = with_accepted_names({name: 1.0})
    assert found == STRANGE[name] and _takes(found)


def test_of_names_that_become_the_same_the_first_counts() -> None:
    assert with_accepted_names({"a_b": 1.0, "a(b": 2.0, "a)b": 3.0}) == {"a_b": 1.0}
