# SPDX-License-Identifier: Apache-2.0
"""Evaluation suites: fixed questions with a scorer each, by name or by the user's definition.

Owns which rows of which data set are the questions of a suite, their ids and their prompts. Runs
and scores nothing."""

from penstock.dataflow.sources.suites.known import KNOWN_SUITES
from penstock.dataflow.sources.suites.suite import Suite, open_suite

__all__ = ["KNOWN_SUITES", "Suite", "open_suite"]
