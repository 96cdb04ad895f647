# SPDX-License-Identifier: Apache-2.0
"""Data algorithms: small pure decisions, named in the config, composed in a declared order.

A rule imports only types and errors: no clock, no I/O, randomness only as an argument.
"""

from __future__ import annotations

from penstock.dataflow.rules.admit import ADMIT, Admit
from penstock.dataflow.rules.mix import MIX, Mix
from penstock.dataflow.rules.select import SELECT, Select

__all__ = ["ADMIT", "MIX", "SELECT", "Admit", "Mix", "Select"]
