# SPDX-License-Identifier: Apache-2.0
"""What a node needs of an engine: generate, load a version between two decoding steps, close."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Generate
from penstock.types import PolicyName, Version, VersionSpan

CLOSED = "the engine is closed; its node is shutting down, so another will take the work"


class Loadable(Protocol):
    @property
    def live(self) -> Version | None:
        """What new requests are sampled from; None while it cannot answer: before the first load,
        half swapped, closed or dead."""
        ...

    async def load(self, folder: Path, version: Version) -> None:
        """Serve the snapshot in `folder` from the next decoding step on; running answers
        continue from their own tokens under the new weights. Raises EngineError and keeps the
        old version."""
        ...


class Engine(Generate, Loadable, Protocol):
    async def close(self) -> None:
        """Requests still running fail with EngineError; the engine answers nothing any more."""
        ...


@runtime_checkable
class Shareable(Protocol):
    """An engine that can serve several policies whose versions are adapters of one model."""

    def share(self) -> Engine:
        """An engine for one more of them, with a `live` of its own: the process and the base in
        memory are shared, and a load here interrupts no answer there."""
        ...


class SpanLog:
    """Which version sampled which token of one answer."""

    __slots__ = ("_starts",)

    def __init__(self, version: Version) -> None:
        self._starts = [(0, version)]

    def switch(self, at: int, version: Version) -> None:
        """Tokens from index `at` on are sampled by `version`."""
        if self._starts[-1][0] == at:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((at, version))

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        ends = [start for start, _ in self._starts[1:]] + [num_tokens]
        return tuple(
            VersionSpan(
                start=start, end=end, incarnation=version.incarnation, number=version.number
            )
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < end
        )


def live_for(policy: PolicyName, live: Version | None) -> Version:
    """The live version, if it is one of this policy."""
    if live is None:
        raise EngineError(
            f"no version of {policy!r} is live on this engine; load a snapshot before generating"
        )
    if live.policy != policy:
        raise RequestRejected(f"this engine serves {live.policy!r}, not {policy!r}")
    return live
