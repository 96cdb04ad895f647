# SPDX-License-Identifier: Apache-2.0
"""Which sampling spec a call runs under: the session's, changed by the fields the caller sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.errors import BadRequest
from penstock.types import SamplingSpec

MAX_ANSWER_TOKENS = 32_768
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
SIGNED_64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """The fields of a call that change its sampling; None keeps the session's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Not OpenAI's; vLLM and others take it and `min_p` under these names."""
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`; wins when both are sent."""
    seed: int | None = None
    stop: str | list[str] | None = None
    json_schema: str | None = None
    """JSON of a schema that the answer must fit; each dialect writes it elsewhere."""


def read_overrides(fields: Mapping[str, object]) -> Overrides:
    """From a caller's keywords; those that do not concern sampling are left out of the engine."""
    try:
        return msgspec.convert(fields, Overrides)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a sampling field has the wrong type: {error}") from None


def override(spec: SamplingSpec, fields: Overrides, *, seed: int) -> SamplingSpec:
    """The spec of one call. `seed` is used unless the caller chose one."""
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    stop = fields.stop
    changed = SamplingSpec(
        temperature=spec.temperature if fields.temperature is None else fields.temperature,
        top_p=spec.top_p if fields.top_p is None else fields.top_p,
        top_k=spec.top_k if fields.top_k is None else fields.top_k,
        min_p=spec.min_p if fields.min_p is None else fields.min_p,
        max_tokens=spec.max_tokens if max_tokens is None else max_tokens,
        seed=seed if fields.seed is None else fields.seed,
        stop=spec.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        json_schema=spec.json_schema if fields.json_schema is None else fields.json_schema,
    )
    _check(changed)
    return changed


def _check(spec: SamplingSpec) -> None:
    if not 0.0 <= spec.temperature <= 100.0:
        raise BadRequest(f"temperature {spec.temperature:g} is not between 0 and 100")
    if not 0.0 < spec.top_p <= 1.0:
        raise BadRequest(f"top_p {spec.top_p:g} is not above 0 and at most 1")
    if not 0 <= spec.top_k < 1 << 31:
        raise BadRequest(f"top_k {spec.top_k} is not 0 (whole vocabulary) or above")
    if not 0.0 <= spec.min_p < 1.0:
        raise BadRequest(f"min_p {spec.min_p:g} is not 0 (drops none) or below 1")
    if not 1 <= spec.max_tokens <= MAX_ANSWER_TOKENS:
        raise BadRequest(f"max_tokens {spec.max_tokens} is not between 1 and {MAX_ANSWER_TOKENS}")
    if not -SIGNED_64 <= spec.seed < SIGNED_64:
        raise BadRequest("seed does not fit 64 bits")
    if len(spec.stop) > MAX_STOP_STRINGS or any(
        not 0 < len(text) <= MAX_STOP_CHARS for text in spec.stop
    ):
        raise BadRequest(
            f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        )
