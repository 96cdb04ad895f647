# SPDX-License-Identifier: Apache-2.0
"""Group ids: `p3-17` is the 17th group of the run, issued to partition 3; `p3-e1-20-7` is question
7 of the evaluation of version 1.20, at partition 3."""

from __future__ import annotations

from penstock.types import GroupId


def partition_of(group_id: GroupId) -> int:
    return int(group_id[1:].partition("-")[0])


def issue_number(group_id: GroupId) -> int:
    """Position in the order of issue, from 1."""
    return int(group_id.rpartition("-")[2])


def evaluation_group(partition: int, incarnation: int, number: int, index: int) -> GroupId:
    """Question `index`, counted over all suites, of the evaluation of this version."""
    return GroupId(f"p{partition}-e{incarnation}-{number}-{index}")


def is_evaluation(group_id: GroupId) -> bool:
    """Does the group belong to an evaluation? No consumer is trained on such a group."""
    return "-e" in group_id
