# SPDX-License-Identifier: Apache-2.0
"""Checks evaluations: each question is asked once, answered by the pinned version only, and no
batch has any of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from penstock.audit.evidence import Evidence
from penstock.audit.records import EvaluatedGroup, EvaluationRow, decode_json
from penstock.audit.report import NUM_SHOWN, Check, Violations

SCORED = ("completed", "truncated")
Pins = dict[str, list[tuple[int, int]]]


def check_evaluations(evidence: Evidence) -> Check:
    """Every done evaluation has all its questions, each with a scored row or a reason in every
    slot; every row of an evaluation was sampled by its pinned versions."""
    violations = Violations("evaluations")
    evaluations = {
        (one.policy, one.incarnation, one.number): one for one in evidence.tables.evaluations
    }
    found: defaultdict[str, list[EvaluatedGroup]] = defaultdict(list)
    for one in evidence.tables.evaluated:
        owner = evaluations.get((one.policy, one.incarnation, one.number))
        if owner is None:
            violations.add(one.group_id, "answered, but its evaluation does not exist")
        else:
            found[owner.name].append(one)
    slots = _scored_slots(evidence)
    for evaluation in evaluations.values():
        violations.extend(evaluation.name, _faults(evaluation, found[evaluation.name]))
        for one in found[evaluation.name]:
            if not evidence.is_exempt(one.group_id):
                violations.extend(one.group_id, _slot_faults(one, slots[one.group_id]))
    _check_versions(evidence, violations)
    _check_batches(evidence, violations)
    return violations.result(len(evaluations))


def _scored_slots(evidence: Evidence) -> defaultdict[str, set[int]]:
    slots: defaultdict[str, set[int]] = defaultdict(set)
    for row in evidence.rows.values():
        if row.outcome in SCORED:
            slots[row.group_id].add(row.slot)
    return slots


def _faults(evaluation: EvaluationRow, found: list[EvaluatedGroup]) -> Iterator[str]:
    questions = {(one.suite, one.ordinal) for one in found}
    if len(questions) != len(found):
        yield f"{len(found) - len(questions)} questions were asked twice"
    if evaluation.state == "done" and len(found) != evaluation.num_groups:
        yield f"done with {len(found)} of {evaluation.num_groups} questions"


def _slot_faults(one: EvaluatedGroup, scored: set[int]) -> Iterator[str]:
    failed = {int(slot) for slot in decode_json(one.failures, dict[str, str]) or {}}
    if scored & failed:
        yield f"slots {sorted(scored & failed)} have an answer and a failure"
    known = scored | failed
    missing = (slot for slot in range(one.num_slots) if slot not in known)
    if first := list(islice(missing, NUM_SHOWN)):
        yield f"slots {first} have neither an answer nor a failure"


def _check_versions(evidence: Evidence, violations: Violations) -> None:
    pins = {
        (one.incarnation, one.number): decode_json(one.pins, dict[str, tuple[int, int]]) or {}
        for one in evidence.tables.evaluations
    }
    for row in evidence.rows.values():
        group = evidence.groups.get(row.group_id)
        if group is None or not group.is_evaluation:
            continue
        _, incarnation, number, _ = row.group_id.replace("-e", "-").split("-")
        expected = pins.get((int(incarnation), int(number)), {})
        for policy, versions in (decode_json(row.versions, Pins) or {}).items():
            if any(version != expected.get(policy) for version in versions):
                why = f"sampled by {policy} {versions}; pinned are {expected}"
                violations.add(row.row_id, why)


def _check_batches(evidence: Evidence, violations: Violations) -> None:
    for manifest in evidence.manifests.values():
        for group in manifest.groups:
            issued = evidence.coordinator.issued.get(group.group_id)
            if issued is not None and issued.is_evaluation:
                name = f"{manifest.consumer}.{manifest.seq}"
                violations.add(group.group_id, f"of an evaluation, but in batch {name}")
