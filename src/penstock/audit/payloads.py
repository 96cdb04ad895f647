# SPDX-License-Identifier: Apache-2.0
"""Reads trajectories from segments and blobs, verifies checksum and digest, and summarises them.

Has its own definitions of segment records, blobs and trajectories, and on purpose repeats the turn
checks of `penstock.conformance.row_rules`. Compares only the digest with the ledger's tables.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

import crc32c
import msgspec
import numpy as np
from blake3 import blake3

from penstock.durable import read_regular, regular_descriptor

MAGIC = b"PSR1"
HEADER = struct.Struct("<4sII")
"""Magic, length of the payload, CRC32C of the payload."""
MAX_BYTES = 1 << 30
"""Of one payload."""
MAX_LOG_PROB = 1e-3
"""Log-probabilities are at most 0; tolerance for rounding in engines."""
TOKEN_BYTES = 4

Versions = dict[str, tuple[tuple[int, int], ...]]
"""By policy: each distinct (incarnation, number) that sampled any of the tokens."""


class Span(msgspec.Struct, frozen=True, gc=False):
    start: int
    end: int
    incarnation: int
    number: int


class Sampling(msgspec.Struct, frozen=True, gc=False):
    json_schema: str = ""


class Turn(msgspec.Struct, frozen=True, gc=False):
    policy: str
    sampled_ids: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    finish: str
    sampling: Sampling = Sampling()
    reached_agent: bool = True
    kv: tuple[int, int] | None = None

    @property
    def is_trainable(self) -> bool:
        return self.reached_agent and self.finish != "abort" and not self.sampling.json_schema


class Outcome(msgspec.Struct, frozen=True, gc=False):
    kind: str


class Trajectory(msgspec.Struct, frozen=True, gc=False):
    row_id: str
    group_id: str
    slot: int
    epoch: int
    node_id: str
    turns: tuple[Turn, ...]
    reward: float | None
    outcome: Outcome
    role_rewards: dict[str, float] = {}


class PayloadSummary(msgspec.Struct, frozen=True, gc=False):
    """One payload, without its tokens."""

    is_freed: bool = False
    """The payload is not needed any more and was not read; all fields below are empty."""
    damage: str = ""
    """Why it cannot be read, or differs from the delivered bytes; all fields below are empty."""
    name: tuple[str, str, int, int, str] = ("", "", 0, 0, "")
    """(row id, group, slot, epoch, node) in the record."""
    outcome: str = ""
    reward: float | None = None
    role_rewards: dict[str, float] = {}
    fault: str = ""
    """What is wrong with its tokens; empty if nothing."""
    sampled: dict[str, int] = {}
    """Trainable sampled tokens by policy."""
    trainable: Versions = {}
    """Versions that sampled the trainable tokens."""
    all_versions: Versions = {}
    """Versions that sampled any token, trainable or not."""


class SegmentReader:
    """The segment files of one ledger, opened on demand, and its blobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}
        self._decoder = msgspec.msgpack.Decoder(Trajectory)
        self._count = cache(_count)  # many rows have the same counts; they share one copy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            if descriptor >= 0:
                os.close(descriptor)

    def content(
        self, segment: int, offset: int, length: int, digest: str, blob: str = ""
    ) -> PayloadSummary:
        payload = self._read_blob(blob) if blob else self._read(segment, offset, length)
        if isinstance(payload, str):
            return PayloadSummary(damage=payload)
        if blake3(payload).hexdigest() != digest:
            return PayloadSummary(damage="its bytes do not match the digest in the ledger")
        try:
            trajectory = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            return PayloadSummary(damage=f"its payload is not a valid trajectory: {error}")
        return self._summarise_payload(trajectory)

    def _read(self, segment: int, offset: int, length: int) -> bytes | str:
        """The payload, or what is wrong with it."""
        name = f"seg-{segment:08d}.dat"
        if segment not in self._open:
            self._open[segment] = -1
            with suppress(OSError):
                self._open[segment] = regular_descriptor(self._folder / name)
        descriptor = self._open[segment]
        if descriptor < 0 or offset < 0 or not 0 <= length <= MAX_BYTES:
            return f"{name} at offset {offset} cannot be opened"
        if offset + HEADER.size + length > os.fstat(descriptor).st_size:
            return f"{name} at offset {offset} is truncated"
        data = os.pread(descriptor, HEADER.size + length, offset)
        if len(data) != HEADER.size + length:
            return f"{name} at offset {offset} is truncated"
        magic, written, checksum = HEADER.unpack_from(data)
        payload = data[HEADER.size :]
        if (magic, written) != (MAGIC, length):
            return f"{name} at offset {offset} is not a record of {length} bytes"
        if checksum != crc32c.crc32c(payload):
            return f"{name} at offset {offset} has a wrong checksum"
        return payload

    def _read_blob(self, digest: str) -> bytes | str:
        if len(digest) != 64 or not digest.isalnum():
            return f"{digest[:80]!r} is not a blob digest"
        try:
            path = self._folder.parent / "blobs" / digest[:2] / digest
            return read_regular(path, MAX_BYTES)
        except OSError as error:
            return f"its blob {digest} cannot be read: {error.strerror}"

    def _summarise_payload(self, row: Trajectory) -> PayloadSummary:
        turns = row.turns
        counted = tuple(
            (t.policy, len(t.sampled_ids), t.is_trainable, t.spans, t.kv) for t in turns
        )
        sampled, trainable, all_versions = self._count(counted)
        return PayloadSummary(
            name=(row.row_id, row.group_id, row.slot, row.epoch, row.node_id),
            outcome=row.outcome.kind,
            reward=row.reward,
            role_rewards=row.role_rewards,
            fault=_fault(turns),
            sampled=sampled,
            trainable=trainable,
            all_versions=all_versions,
        )


def _count(
    turns: tuple[tuple[str, int, bool, tuple[Span, ...], tuple[int, int] | None], ...],
) -> tuple[dict[str, int], Versions, Versions]:
    """From policy, bytes of sampled ids, `is_trainable`, spans and `kv` of each turn."""
    sampled: Counter[str] = Counter()
    trainable: dict[str, dict[tuple[int, int], None]] = {}
    everything: dict[str, dict[tuple[int, int], None]] = {}
    for policy, num_bytes, is_trainable, spans, kv in turns:
        pairs = {(span.incarnation, span.number): None for span in spans}
        if kv is not None:
            pairs[kv] = None
        everything.setdefault(policy, {}).update(pairs)
        if is_trainable and num_bytes:
            sampled[policy] += num_bytes // TOKEN_BYTES
            trainable.setdefault(policy, {}).update(pairs)
    return dict(sampled), _frozen(trainable), _frozen(everything)


def _frozen(pairs: dict[str, dict[tuple[int, int], None]]) -> Versions:
    return {policy: tuple(found) for policy, found in pairs.items()}


def _fault(turns: tuple[Turn, ...]) -> str:
    for index, turn in enumerate(turns):
        if wrong := _turn_fault(turn):
            return f"turn {index}: {wrong}"
    return ""


def _turn_fault(turn: Turn) -> str:
    if len(turn.sampled_ids) % TOKEN_BYTES or len(turn.logprobs) != len(turn.sampled_ids):
        return "the number of log-probs and sampled tokens differs"
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= span.start:
            return f"span {span.start} to {span.end}, but the next token is {position}"
        position = span.end
    num_tokens = len(turn.sampled_ids) // TOKEN_BYTES
    if position != num_tokens:
        return f"spans cover {position} of {num_tokens} sampled tokens"
    values = np.frombuffer(turn.logprobs, "<f4")
    # With a NaN, min and max are NaN and every comparison is false.
    if values.size and not -np.inf < values.min() <= values.max() <= MAX_LOG_PROB:
        return "a log-prob is above 0 or not finite"
    return ""
