# SPDX-License-Identifier: Apache-2.0
"""Group ids: `p3-17` is the 17th group of the run, issued to partition 3."""

from __future__ import annotations

from penstock.types import GroupId


def partition_of(group_id: GroupId) -> int:
    return int(group_id[1:].partition("-")[0])


def issue_number(group_id: GroupId) -> int:
    """Position in the order of issue, from 1."""
    return int(group_id.rpartition("-")[2])
