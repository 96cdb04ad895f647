# SPDX-License-Identifier: Apache-2.0
"""Inference engines behind two small Protocols: `Generate` and `Loadable`. `make_engine` is the
one place that turns a kind named in a config into an engine; torch is imported by the thread
that decodes, never here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.rollout.engines.base import Engine, Loadable
from penstock.rollout.engines.batch import Decoder
from penstock.rollout.engines.continuous import MAX_ROWS, ContinuousEngine
from penstock.rollout.engines.decoding_thread import DecodingThread
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.engines.simulated import SimulatedEngine

__all__ = [
    "Engine",
    "EngineSettings",
    "HfEngine",
    "Loadable",
    "ScriptedEngine",
    "SimulatedEngine",
    "make_engine",
]

KINDS = ("hf", "vllm", "sglang", "simulated", "scripted")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Where a program that is an engine runs: at an address, else as a child (vLLM only) in an
    environment."""

    url: str = ""
    environment: str = ""
    """Empty is the one that `make setup-engine` makes."""
    options: Sequence[str] = ()
    """More words for `vllm serve`."""
    state_dir: Path | None = None
    """Takes the child's log."""
    num_policies: int = 1
    """Most that share a child, as adapters of one model."""
    adapter_rank: int = 16
    """The largest of their adapters."""


class HfEngine(ContinuousEngine):
    """In-process transformers model. The constructor returns at once; `load` waits for the
    imports."""

    def __init__(self, *, torch_threads: int = 1, max_rows: int = MAX_ROWS) -> None:
        def open_decoder() -> Decoder:
            from penstock.rollout.engines.hf import HfDecoder

            return HfDecoder(torch_threads=torch_threads)

        thread = DecodingThread(open_decoder, name="hf")
        super().__init__(thread, max_rows=max_rows)
        thread.start()


def make_engine(
    kind: str,
    *,
    seed: int,
    torch_threads: int,
    settings: EngineSettings | None = None,
    is_deterministic: bool = False,
) -> Engine:
    """`seed` moves what a simulated engine draws; real sampling is seeded per request. A
    deterministic one decodes one answer at a time, because sums over a batch depend on its size."""
    if kind == "hf":
        return HfEngine(torch_threads=torch_threads, max_rows=1 if is_deterministic else MAX_ROWS)
    if kind == "vllm":
        return _make_vllm(settings or EngineSettings())
    if kind == "sglang":
        from penstock.rollout.engines.sglang import SglangEngine

        if settings is None or not settings.url:
            raise ConfigError("engine sglang needs a server that runs; set sglang: {url: ...}")
        return SglangEngine(settings.url)
    if kind == "simulated":
        return SimulatedEngine(seed=seed)
    if kind == "scripted":
        return ScriptedEngine()
    raise ConfigError(f"no engine of kind {kind!r}; `engine` is one of: {', '.join(KINDS)}")


def _make_vllm(settings: EngineSettings) -> Engine:
    from penstock.rollout.engines.vllm import (
        ChildServer,
        LoraCapacity,
        RemoteServer,
        VllmEngine,
        default_environment,
    )

    if settings.url:
        return VllmEngine(RemoteServer(settings.url))
    environment = Path(settings.environment).expanduser() if settings.environment else None
    server = ChildServer(
        environment or default_environment(),
        settings.options,
        state_dir=settings.state_dir,
        lora_capacity=LoraCapacity(num_policies=settings.num_policies, rank=settings.adapter_rank),
    )
    return VllmEngine(server)
