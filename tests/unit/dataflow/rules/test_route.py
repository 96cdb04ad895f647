# SPDX-License-Identifier: Apache-2.0
"""Which consumers see which turns."""

from itertools import product

from tests.unit.dataflow.rules.rule_inputs import Assigned

from penstock.dataflow.rules import Route, make_rule
from penstock.types import PolicyName

POLICIES = ("student", "teacher")


def seen(route: Route, role: str = "solve") -> set[tuple[str, str]]:
    return {
        (policy, turn)
        for policy, turn in product(POLICIES, POLICIES)
        if route.sees(PolicyName(policy), PolicyName(turn), role)
    }


def test_by_policy() -> None:
    route = make_rule("route", "by-policy", {}, Assigned())
    assert seen(route) == {("student", "student"), ("teacher", "teacher")}


def test_by_role() -> None:
    route = make_rule("route", "by-role", {"roles": {"student": ["solve"]}}, Assigned())
    assert seen(route) == {("student", "student"), ("teacher", "teacher")}
    assert seen(route, "verify") == {("teacher", "teacher")}


def test_shared() -> None:
    declared = {"turns_of": {"student": ["student", "teacher"]}}
    route = make_rule("route", "shared", declared, Assigned())
    assert seen(route) == {
        ("student", "student"),
        ("student", "teacher"),
        ("teacher", "teacher"),
    }
