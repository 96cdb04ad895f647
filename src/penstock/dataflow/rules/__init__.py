# SPDX-License-Identifier: Apache-2.0
"""Data algorithms: small pure decisions, named in the config, composed in a declared order.

A rule is one class in one file: no clock, no I/O, randomness only as an argument, and all its
memory in a mapping that the dataflow passes in and stores. To add a built-in rule, add one file: a
subclass of `Rule` with hook, name and options, and the line `RULE = TheClass`."""

from __future__ import annotations

from penstock.dataflow.rules.hooks import Admit, Curate, LearningRule, Mix, Replay, Route, Select
from penstock.dataflow.rules.registry import builtin_rules, make_rule
from penstock.dataflow.rules.rule import Rule

__all__ = [
    "Admit",
    "Curate",
    "LearningRule",
    "Mix",
    "Replay",
    "Route",
    "Rule",
    "Select",
    "builtin_rules",
    "make_rule",
]
