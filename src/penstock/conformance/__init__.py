# SPDX-License-Identifier: Apache-2.0
"""Conformance tests for third-party nodes and trainers: a test double of the dataflow to join over
HTTP, and a verdict per rule of docs/reference/protocol.md. Imports no node or trainer."""

from penstock.conformance.scenarios import (
    conformance_rollout,
    conformance_trainer,
    examine_rollout,
    examine_trainer,
)

__all__ = ["conformance_rollout", "conformance_trainer", "examine_rollout", "examine_trainer"]
