# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine: generate, load a version between two decoding steps, close.

Also the settings an engine is built from, and the record that declares an engine (`EngineType`).
The engines themselves are in `rollout.engines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.types import (
    ExpertChoices,
    FinishReason,
    KvAge,
    PolicyName,
    Version,
    VersionSpan,
    log_probs,
    token_ids,
)

CLOSED = "the engine is closed; its node is shutting down, and another node takes over the work"


class Engine(Generate, Protocol):
    """Generates with one live version, and loads the next one while it runs.

    A class of yours with these methods is an engine. A run file names it as `engine:
    my_module:MyEngine`; it is built from `EngineSettings`."""

    @property
    def live(self) -> Version | None:
        """The version that new requests are sampled from; None while the engine cannot answer:
        before the first load, after a failed swap, closed or dead."""
        ...

    async def load(self, folder: Path, version: Version) -> None:
        """Serve the snapshot in `folder` from the next decoding step. Running answers continue
        from their tokens under the new weights. If it raises EngineError, the old version stays
        live."""
        ...

    async def close(self) -> None:
        """Fail running requests with EngineError and accept no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings an engine is built from; each engine reads those it needs."""

    seed: int = 0
    """Seeds the random draws of a simulated engine; real sampling is seeded per request."""
    torch_threads: int = 1
    is_deterministic: bool = False
    """Whether the same requests must give the same bits."""
    url: str = ""
    """Address of a running engine server; if empty, the engine starts its own where it can."""
    environment: str = ""
    """Virtual environment of the engine server; empty: the one from `make setup-engine`."""
    options: Sequence[str] = ()
    """Additional arguments of the engine server."""
    devices: Sequence[str] = ()
    """Devices of the engine server, as in CUDA_VISIBLE_DEVICES; empty: what this process sees."""
    keeps_kv: bool = False
    """Whether a swap of weights keeps the keys and values of running answers."""
    state_dir: Path | None = None
    """Folder for the log of the engine server."""
    num_policies: int = 1
    """Most policies that share the engine, as adapters of one model."""
    adapter_rank: int = 16
    """The largest rank of their adapters."""
    records_experts: bool = False
    """Whether answers carry the experts that a mixture chose for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineType:
    """Declares an engine: how to build it, and what config may combine it with."""

    build: Callable[[EngineSettings], Engine]
    serves_adapters: bool = False
    """Whether it loads LoRA adapters, or needs no weights at all."""
    is_reproducible: bool = False
    """Whether it honors `EngineSettings.is_deterministic`."""
    records_experts: bool = False
    """Whether it honors `EngineSettings.records_experts`."""


@runtime_checkable
class Shareable(Protocol):
    """An engine that can serve several policies as adapters of one model."""

    def share(self) -> Engine:
        """An engine for one more policy, with a separate `live`. Process and base model are
        shared; a load on one does not interrupt answers of the other."""
        ...


@runtime_checkable
class Pausable(Protocol):
    """An engine that can make room for a trainer on its resource."""

    async def pause(self) -> int:
        """Sample nothing until `resume`. Running answers keep their tokens and lose their keys and
        values; new requests wait. Returns how many tokens have to be computed again."""
        ...

    async def resume(self) -> None: ...


@runtime_checkable
class Startable(Protocol):
    """An engine that answers without a task for each request."""

    def start(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        """A call's completion, later. Raises EngineError if the engine takes no request now."""
        ...


@runtime_checkable
class Patchable(Protocol):
    """An engine whose `load` writes only what changed, if a patch leads from the version that it
    has loaded to the new one (`weights.patches`). Without a patch it loads the full files."""

    @property
    def loaded(self) -> Path | None:
        """The folder of the weights that it has loaded; None if they cannot be patched."""
        ...


class AnswerLost(EngineError):
    """The engine failed in the middle of an answer."""

    def __init__(self, message: str, partial: Completion) -> None:
        super().__init__(message)
        self.partial = partial
        """What it had sampled."""


def returns_lost(engine: Engine) -> bool:
    """An engine in this process hands a lost answer over as AnswerLost, so that no caller needs a
    callback for each of its tokens. A separate program may die with it."""
    return getattr(engine, "returns_lost", False)


class SpanLog:
    """Records which version sampled which tokens of one answer."""

    __slots__ = ("_starts",)

    def __init__(self, version: Version) -> None:
        self._starts = [(0, version)]

    def switch(self, at: int, version: Version) -> None:
        """Tokens from index `at` are sampled by `version`."""
        if self._starts[-1][0] == at:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((at, version))

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from this index on."""
        self._starts = [start for start in self._starts if start[0] < num_tokens]

    def complete(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason,
        kv: KvAge | None = None,
        experts: ExpertChoices | None = None,
    ) -> Completion:
        """The answer with these tokens."""
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs(logprobs),
            spans=self.spans(len(ids)),
            finish=finish,
            kv=kv,
            experts=experts,
        )

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        if len(self._starts) == 1 and num_tokens:
            _, version = self._starts[0]
            number = version.number
            return (
                VersionSpan(
                    start=0, end=num_tokens, incarnation=version.incarnation, number=number
                ),
            )
        ends = [start for start, _ in self._starts[1:]] + [num_tokens]
        return tuple(
            VersionSpan(
                start=start, end=end, incarnation=version.incarnation, number=version.number
            )
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < end
        )


def live_for(policy: PolicyName, live: Version | None, *, is_closed: bool = False) -> Version:
    """The live version; raises if the engine is closed, has none, or serves another policy."""
    if is_closed:
        raise EngineError(CLOSED)
    if live is None:
        raise EngineError(
            f"no version of {policy!r} is live on this engine; load a snapshot before generating"
        )
    if live.policy != policy:
        raise RequestRejected(f"this engine serves {live.policy!r}, not {policy!r}")
    return live
