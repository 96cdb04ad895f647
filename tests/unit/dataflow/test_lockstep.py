# SPDX-License-Identifier: Apache-2.0
"""Lockstep: which version may sample which group is fixed by the order of issue alone, and every
life of a trainer must make the same versions again."""

from __future__ import annotations

import pytest
from tests.unit.dataflow.core.test_version_gate import A, lineage, live

from penstock.config import RunConfig, demo_config
from penstock.dataflow.core.version_gate import VersionGate
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import IncarnationRecord
from penstock.errors import Conflict


def lockstep(found: Lineage, *, lag: int = 1) -> VersionGate:
    return VersionGate({A: found}, {A: lag}, is_lockstep=True)


def rewind(found: Lineage, number: int) -> None:
    record = IncarnationRecord(
        policy=A,
        incarnation=found.incarnation + 1,
        number=number,
        seq=number,
        request_id=f"r{found.incarnation}",
        at=0.0,
    )
    found.apply_incarnation(record)


def publish(found: Lineage, number: int, digest: str | None = None) -> None:
    digest = digest or f"w{number}"
    made = found.publish(
        incarnation=found.incarnation,
        number=number,
        manifest_digest=f"m{digest}",
        weights_digest=digest,
        now=0.0,
    )
    found.apply_version(made)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_group_is_for_one_version_alone(lag: int) -> None:
    gate = lockstep(lineage(A, committed=6, published=6), lag=lag)
    for due in range(12):
        allowed = [number for number in range(7) if gate.can_lease({A: due}, live(a=number))]
        needed = max(0, due - lag)
        assert allowed == ([needed] if needed <= 6 else []), (due, lag)


def test_nodes_keep_the_version_of_the_oldest_open_group_until_it_has_ended() -> None:
    gate = lockstep(lineage(A, committed=6, published=6))
    assert [version.number for version in gate.target_versions({A: 5})] == [4]
    assert [version.number for version in gate.target_versions({A: 7})] == [6]
    assert [version.number for version in gate.target_versions(None)] == [6]


def test_a_rewind_changes_nothing_for_an_answer_that_is_being_sampled() -> None:
    found = lineage(A, committed=6, published=6)
    gate = lockstep(found)
    before = gate.target_versions({A: 7})
    rewind(found, 2)
    publish(found, 2)
    assert gate.target_versions({A: 7}) == before, "not to the restore point"
    assert not gate.can_lease({A: 7}, live(a=6)), "number 6 is not made again yet"
    repeated = lineage(A, committed=6, published=6)
    rewind(repeated, 6)
    publish(repeated, 6)
    gate = lockstep(repeated)
    assert gate.target_versions({A: 7}) == before, "nor to its twin, whose bits are the same"
    assert gate.can_lease({A: 7}, live(a=6))


def test_a_life_that_does_not_repeat_the_one_before_is_refused() -> None:
    found = lineage(A, committed=6, published=6)
    rewind(found, 3)
    found.is_deterministic = True
    publish(found, 3)
    rewind(found, 3)
    with pytest.raises(Conflict, match="number 3 differs from the same number in incarnation 1"):
        publish(found, 3, "other")
    publish(found, 3)


def test_versions_made_again_bit_for_bit_are_one_version_over_any_number_of_lives() -> None:
    """The second life died before it came to number 5; the third made it again."""
    found = lineage(A, committed=6, published=6)
    found.is_deterministic = True
    rewind(found, 3)
    publish(found, 3)
    rewind(found, 3)
    assert found.effective_number(1, 5) == 3
    found.number = 5
    for number in (3, 4, 5):
        publish(found, number)
    assert found.effective_number(1, 5) == 5
    assert found.effective_number(1, 6) == 3, "which nobody made again"
    found.is_deterministic = False
    assert found.effective_number(1, 5) == 3, (
        "an age that could fall again would confuse all others"
    )


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("models", {"policy": {"init": "builtin:tiny-qwen3", "engine": "simulated"}}),
        ("dataflow", {"partitions": 2}),
        ("dataflow", {"rules": [{"admit": "reward-spread"}]}),
    ],
)
def test_what_cannot_be_deterministic_is_refused(section: str, change: object) -> None:
    values = {**demo_config(0).model_dump(mode="json"), "deterministic": True}
    assert RunConfig.model_validate(values).deterministic
    with pytest.raises(ValueError, match=r"deterministic|is not deterministic|remove it"):
        RunConfig.model_validate({**values, section: change})
