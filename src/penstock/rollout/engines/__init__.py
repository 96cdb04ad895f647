# SPDX-License-Identifier: Apache-2.0
"""Inference engines behind two small Protocols: `Generate` and `Loadable`. `make_engine` is the
one place that turns a kind named in a config into an engine; torch is imported by the thread
that decodes, never here.
"""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.rollout.engines.base import Engine, Loadable
from penstock.rollout.engines.batch import Decoder
from penstock.rollout.engines.continuous import ContinuousEngine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.engines.simulated import SimulatedEngine

__all__ = [
    "Engine",
    "HfEngine",
    "Loadable",
    "ScriptedEngine",
    "SimulatedEngine",
    "make_engine",
]

KINDS = ("hf", "simulated", "scripted")


class HfEngine(ContinuousEngine):
    """In-process transformers model. The constructor returns at once; `load` waits for the
    imports."""

    def __init__(self, *, torch_threads: int = 1) -> None:
        def open_decoder() -> Decoder:
            from penstock.rollout.engines.hf import HfDecoder

            return HfDecoder(torch_threads=torch_threads)

        super().__init__(open_decoder, name="hf")


def make_engine(kind: str, *, seed: int, torch_threads: int) -> Engine:
    """`seed` moves what a simulated engine draws; real sampling is seeded per request."""
    if kind == "hf":
        return HfEngine(torch_threads=torch_threads)
    if kind == "simulated":
        return SimulatedEngine(seed=seed)
    if kind == "scripted":
        return ScriptedEngine()
    raise ConfigError(f"no engine of kind {kind!r}; `engine` is one of: {', '.join(KINDS)}")
