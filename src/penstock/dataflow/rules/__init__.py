# SPDX-License-Identifier: Apache-2.0
"""Data algorithms: small pure decisions, named in the config, composed in a declared order.

A rule is one class in one file that imports only types: no clock, no I/O, randomness only as an
argument, and all its memory in a mapping that the host gives and stores."""

from __future__ import annotations

from penstock.dataflow.rules.hooks import Admit, Curate, LearningRule, Mix, Replay, Route, Select
from penstock.dataflow.rules.registry import RULES, make_rule

__all__ = [
    "RULES",
    "Admit",
    "Curate",
    "LearningRule",
    "Mix",
    "Replay",
    "Route",
    "Select",
    "make_rule",
]
