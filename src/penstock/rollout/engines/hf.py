# SPDX-License-Identifier: Apache-2.0
"""The `hf` engine: a transformers model in the node's process.

This module does not import torch; the decoding thread does, in the background.
"""

from __future__ import annotations

from penstock.rollout.decoding.batch import Decoder
from penstock.rollout.decoding.continuous import MAX_ROWS, ContinuousEngine
from penstock.rollout.decoding.decoding_thread import DecodingThread
from penstock.rollout.engine import EngineSettings, EngineType


class HfEngine(ContinuousEngine):
    """In-process transformers model. The constructor returns immediately; `load` waits for the
    imports."""

    def __init__(
        self,
        *,
        torch_threads: int = 1,
        max_rows: int = MAX_ROWS,
        keeps_kv: bool = False,
        records_experts: bool = False,
    ) -> None:
        def open_decoder() -> Decoder:
            from penstock.rollout.decoding.hf_decoder import HfDecoder

            return HfDecoder(torch_threads=torch_threads, records_experts=records_experts)

        thread = DecodingThread(open_decoder, name="hf")
        super().__init__(thread, max_rows=max_rows, keeps_kv=keeps_kv)
        thread.start()


def _build(settings: EngineSettings) -> HfEngine:
    # Sums over a batch depend on its size, so a deterministic engine decodes one answer at a time.
    max_rows = 1 if settings.is_deterministic else MAX_ROWS
    return HfEngine(
        torch_threads=settings.torch_threads,
        max_rows=max_rows,
        keeps_kv=settings.keeps_kv,
        records_experts=settings.records_experts,
    )


ENGINE = EngineType(build=_build, serves_adapters=True, is_reproducible=True, records_experts=True)
