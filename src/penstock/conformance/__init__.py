# SPDX-License-Identifier: Apache-2.0
"""Doubles of the dataflow that a node or a trainer joins like a real one, and a verdict per rule of
docs/protocol.md. Knows no node and no trainer of penstock: it meets them on the wire alone."""

from penstock.conformance.scenarios import (
    conformance_rollout,
    conformance_trainer,
    examine_rollout,
    examine_trainer,
)

__all__ = ["conformance_rollout", "conformance_trainer", "examine_rollout", "examine_trainer"]
