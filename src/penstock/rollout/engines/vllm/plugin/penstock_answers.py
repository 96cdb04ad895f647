# SPDX-License-Identifier: Apache-2.0
"""Whole answers of vLLM's generate route as numbers in a row.

vLLM writes two objects for the log-prob of each token, ten times the bytes of its numbers, and to
read them is a quarter of what a call costs the gateway. A request whose `extra_args` have
`penstock_packed` gets `packed` in each choice instead: base64 of its token ids (int32), then its
log-probs (float32), as sampled. Anything else, and every stream, stays vLLM's own.

`penstock_worker` installs it in vLLM's server, where penstock is not installed.
"""

from __future__ import annotations

import base64
import importlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

WANTED, PACKED = "penstock_packed", "packed"
ROUTE = "vllm.entrypoints.scale_out.token_in_token_out"


def pack_answers() -> None:
    serving: Any = importlib.import_module(ROUTE + ".serving").ServingTokens
    response: Any = importlib.import_module(ROUTE + ".protocol").GenerateTokensResponse
    answer_in_objects = serving.serve_tokens_full_generator

    class PackedResponse(response):
        _packed: list[str] = []  # noqa: RUF012 (pydantic copies it)

        def model_dump(self, **options: Any) -> dict[str, Any]:
            fields: dict[str, Any] = super().model_dump(**options)
            for choice, packed in zip(fields["choices"], self._packed):  # noqa: B905 (Python 3.9)
                choice |= {"token_ids": None, PACKED: packed}
            return fields

    async def answer(self: Any, request: Any, results: Any, *rest: Any) -> Any:
        params = request.sampling_params
        if not (params.extra_args or {}).get(WANTED) or params.logprobs is None:
            return await answer_in_objects(self, request, results, *rest)
        packed: list[str] = []

        async def without_logprobs() -> AsyncIterator[Any]:
            async for result in results:
                packed[:] = map(pack, result.outputs)
                params.logprobs = None  # vLLM has read them, and now makes no objects of them
                yield result

        found = await answer_in_objects(self, request, without_logprobs(), *rest)
        if type(found) is not response:
            return found  # an error
        made = PackedResponse.model_construct(**dict(found))
        made._packed = packed
        return made

    serving.serve_tokens_full_generator = answer


def pack(output: Any) -> str:
    """A log-prob that vLLM does not have is NaN."""
    ids = array("i", output.token_ids)
    found = (entry.get(token) for token, entry in zip(ids, output.logprobs))  # noqa: B905
    logprobs = array("f", (float("nan") if one is None else one.logprob for one in found))
    return base64.b64encode(ids.tobytes() + logprobs.tobytes()).decode()
