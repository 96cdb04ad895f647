# SPDX-License-Identifier: Apache-2.0
"""Turns a delivery into a stored row under a valid lease, or into the reason for refusing it.

Decodes, validates and places payload. Trusts only the lease; decides nothing about groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from blake3 import blake3
from msgspec import Struct, structs

from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.core.names import EVAL, NUM_TOKENS, NUM_TURNS, TRAIN
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import RowRecord, row_id
from penstock.dataflow.service.nodes import validate
from penstock.dataflow.service.nodes.messages import Delivery, DeliveryResult
from penstock.dataflow.service.nodes.outline import MAX_PARTS_BYTES, parts_bytes
from penstock.dataflow.service.nodes.trust import LeaseSampling, call_problem, version_problem
from penstock.dataflow.sources import slot_seeds
from penstock.errors import BadRequest
from penstock.redaction import for_people
from penstock.types import GroupId, NodeId, Outcome, RowId, RowSummary, Trajectory
from penstock.wire.codec import decode_zero_copy

_USUAL_REASONS = frozenset({"", "length", "deadline"})
"""Of trajectories with a reward; there is nothing to hide in them."""


class IntakeResult(Struct, frozen=True, kw_only=True):
    """One delivery, judged; durable with the ledger's next write."""

    result: DeliveryResult
    row: RowRecord | None = None
    """The stored row, if any."""
    outcome: Outcome | None = None
    """Outcome of the stored row."""
    is_unknown_version: bool = False
    """It names a version that only the coordinator may know: nothing was decided."""


class DeliveryIntake:
    def __init__(
        self,
        partition: Partition,
        ledger: Ledger,
        is_published: validate.IsPublished,
        *,
        next_arrival: Callable[[], int],
        is_scored: bool = True,
    ) -> None:
        """`is_scored`: nodes give the reward, not a stage."""
        self._partition = partition
        self._ledger = ledger
        self._is_published = is_published
        self._is_scored = is_scored
        self._next_arrival = next_arrival
        self.limits = validate.NO_LIMITS
        """Window and vocabulary of the run's models, as far as they are known."""
        self.roles: frozenset[str] = frozenset()
        """Roles that the run file names; rows may have rewards of these though none acted."""
        self.sampling = LeaseSampling()
        """What leases of untrusted nodes fix."""

    def store_or_refuse(
        self,
        node_id: NodeId,
        deliveries: Sequence[Delivery],
        now: float,
        *,
        is_authoritative: bool = True,
    ) -> list[IntakeResult]:
        """What `refuse_unread` let pass. `is_authoritative`: a version unknown here was never
        published."""
        holds = self._partition.holds
        read = [  # a lease may have ended while a blob was fetched
            ""
            if delivery.blob and not holds(node_id, *parse_row_id(delivery.row_id))
            else _decode(delivery)
            for delivery in deliveries
        ]
        valid = [one for one in read if not isinstance(one, str)]
        are_sound = validate.have_sound_numbers(valid, self.limits.max_id)
        return [
            self._store_or_refuse(node_id, delivery, one, now, are_sound, is_authoritative)
            for delivery, one in zip(deliveries, read, strict=True)
        ]

    def refuse_unread(
        self, node_id: NodeId, deliveries: Sequence[Delivery]
    ) -> list[IntakeResult | None]:
        """Refusals that need no payload: without a valid lease, or named before in this call. The
        secret of a lease outlives it, so these must cost next to nothing."""
        seen: set[RowId] = set()
        found: list[IntakeResult | None] = []
        for delivery in deliveries:
            name, refused = delivery.row_id, None
            try:
                if name in seen or not self._partition.holds(node_id, *parse_row_id(name)):
                    refused = _refused(delivery, DeliveryStatus.FENCED)
                seen.add(name)
            except BadRequest as error:
                refused = _refused(delivery, DeliveryStatus.INVALID, str(error))
            found.append(refused)
        return found

    def _store_or_refuse(
        self,
        node_id: NodeId,
        delivery: Delivery,
        read: Trajectory | str,
        now: float,
        are_sound: bool,
        is_authoritative: bool,
    ) -> IntakeResult:
        group_id, slot, epoch = parse_row_id(delivery.row_id)
        if not self._partition.holds(node_id, group_id, slot, epoch):  # a row before it ended it
            return _refused(delivery, DeliveryStatus.FENCED)
        judged = read if isinstance(read, str) else self._judge(node_id, delivery, read, are_sound)
        if isinstance(judged, validate.UnknownVersion) and not is_authoritative:
            refused = _refused(delivery, DeliveryStatus.INVALID)
            return structs.replace(refused, is_unknown_version=True)
        if isinstance(judged, str):
            self._partition.reject(group_id, slot, for_people(judged), now)
            return _refused(delivery, DeliveryStatus.INVALID, str(judged))
        return self._store(delivery, *judged, now)

    def _judge(
        self, node_id: NodeId, delivery: Delivery, trajectory: Trajectory, are_sound: bool
    ) -> tuple[Trajectory, RowSummary] | str:
        """The valid trajectory in this payload, or the reason it is invalid."""
        named = row_id(trajectory.group_id, trajectory.slot, trajectory.epoch)
        if not (trajectory.row_id == named == delivery.row_id and trajectory.node_id == node_id):
            return f"the trajectory is {named} of {trajectory.node_id}, not the row of the lease"
        node = self._partition.nodes[node_id]
        if trajectory.boot_id not in ("", node.record.boot_id):
            return f"the trajectory has boot_id {trajectory.boot_id[:128]}, the lease another one"
        is_untrusted = node.is_untrusted
        if is_untrusted and (wrong := self._lease_problem(trajectory)):
            return wrong
        is_question = is_evaluation(trajectory.group_id)
        digest = digest_of(delivery)
        summary = validate.summarise(
            trajectory,
            digest,
            self._is_published,
            is_scored=(self._is_scored or is_question) and not is_untrusted,
            limits=self.limits,
            roles=self.roles,
            policies=self._partition.gate.lineages.keys(),
            has_sound_numbers=are_sound,
        )
        if isinstance(summary, str):
            return summary
        return trajectory, _with_counts(summary, trajectory) if is_question else summary

    def _lease_problem(self, trajectory: Trajectory) -> str:
        group_id, slot, turns = trajectory.group_id, trajectory.slot, trajectory.turns
        task = self._partition.groups[group_id].task
        [seed] = slot_seeds(task.seed, range(slot, slot + 1))
        live = self._partition.live_at_lease(trajectory.node_id, group_id, slot)
        return (
            self.sampling.problem(turns, task.source, seed)
            or call_problem(turns, task.workflow)
            or version_problem(turns, live)
        )

    def _store(
        self, delivery: Delivery, trajectory: Trajectory, summary: RowSummary, now: float
    ) -> IntakeResult:
        if delivery.blob:
            location = Location(segment=0, offset=0, length=len(delivery.payload))
        else:
            location = self._ledger.place(delivery.payload)
        row = RowRecord(
            summary=summary,
            group_id=trajectory.group_id,
            slot=trajectory.slot,
            epoch=trajectory.epoch,
            node_id=trajectory.node_id,
            segment=location.segment,
            offset=location.offset,
            length=location.length,
            delivered_at=now,
            arrival=self._next_arrival(),
            space=EVAL if is_evaluation(trajectory.group_id) else TRAIN,
            blob=delivery.blob,
        )
        status = self._partition.deliver(row, _shown(trajectory.outcome), now)
        return IntakeResult(
            result=DeliveryResult(row_id=delivery.row_id, status=status),
            row=row,
            outcome=trajectory.outcome,
        )

    def release(self, node_id: NodeId, name: RowId, now: float) -> DeliveryResult:
        """Release a slot, named by the row it would have become."""
        try:
            group_id, slot, epoch = parse_row_id(name)
        except BadRequest as error:
            return DeliveryResult(row_id=name, status=DeliveryStatus.INVALID, detail=str(error))
        held = self._partition.release(node_id, group_id, slot, epoch, now)
        status = DeliveryStatus.STORED if held else DeliveryStatus.FENCED
        return DeliveryResult(row_id=name, status=status)

    def recheck_fenced(
        self, result: DeliveryResult, digest_for: Callable[[RowId], str]
    ) -> DeliveryResult:
        """Without a valid lease: a duplicate, a conflict with stored bytes, or too late.
        `digest_for`: of what was delivered for a row; empty if it was only released."""
        if result.status is not DeliveryStatus.FENCED:
            return result
        known = self._ledger.row(result.row_id)
        digest = "" if known is None else digest_for(result.row_id)
        if known is None or not digest:
            return result
        is_same = known.summary.digest == digest
        status = DeliveryStatus.DUPLICATE if is_same else DeliveryStatus.CONFLICT
        return replace(result, status=status)


def digest_of(delivery: Delivery) -> str:
    """BLAKE3 of the payload; a blob has it as its name, verified when it was stored and is read."""
    return delivery.blob or blake3(delivery.payload).hexdigest()


def _decode(delivery: Delivery) -> Trajectory | str:
    """The trajectory in this payload, or why there is none."""
    try:
        if len(delivery.payload) > MAX_PARTS_BYTES:
            num_bytes = parts_bytes(delivery.payload)
            if num_bytes > MAX_PARTS_BYTES:
                return (
                    f"the trajectory has {num_bytes} bytes beside tokens, log-probs, experts and "
                    f"texts; at most {MAX_PARTS_BYTES}: it has too many spans or other fields"
                )
        return decode_zero_copy(delivery.payload, Trajectory)
    except BadRequest as error:
        return str(error)


def _shown(outcome: Outcome) -> Outcome:
    """As the ledger records it: a node of strangers hides nothing itself."""
    if outcome.reason in _USUAL_REASONS and not outcome.detail:
        return outcome
    return replace(outcome, reason=for_people(outcome.reason), detail=for_people(outcome.detail))


def _with_counts(summary: RowSummary, trajectory: Trajectory) -> RowSummary:
    """The summary of an answer in an evaluation: greedy tokens are not trainable, and count."""
    num_tokens = sum(len(turn.sampled_ids) // 4 for turn in trajectory.turns)
    values = {NUM_TURNS: float(len(trajectory.turns)), NUM_TOKENS: float(num_tokens)}
    return structs.replace(summary, values={**summary.values, **values})


def _refused(delivery: Delivery, status: DeliveryStatus, detail: str = "") -> IntakeResult:
    return IntakeResult(result=DeliveryResult(row_id=delivery.row_id, status=status, detail=detail))


@lru_cache(maxsize=4096)  # each is parsed for its lease, for its result and for its turns
def parse_row_id(text: RowId) -> tuple[GroupId, int, int]:
    group_id, _, rest = text.partition(".")
    slot, _, epoch = rest.partition(".")
    if not (len(text) <= 128 and text.isascii() and slot.isdecimal() and epoch.isdecimal()):
        raise BadRequest(f"invalid row id {text[:128]!r}; expected GROUP.SLOT.EPOCH")
    parts = GroupId(group_id), int(slot), int(epoch)
    if row_id(*parts) != text:
        raise BadRequest(f"row id {text!r} is not canonical; write {row_id(*parts)}")
    return parts
