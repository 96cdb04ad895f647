# SPDX-License-Identifier: Apache-2.0
"""Sampling spec of a call: the session's, overridden by the fields in the request."""

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
    """Sampling fields of a call; None keeps the session's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """`top_k` and `min_p` are not part of OpenAI's API; the names follow vLLM and others."""
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; takes precedence if both are sent."""
    seed: int | None = None
    stop: str | list[str] | None = None
    json_schema: str | None = None
    """JSON schema the answer must match; its location differs by dialect."""


def read_overrides(fields: Mapping[str, object]) -> Overrides:
    """Read overrides from keyword arguments; other keywords are ignored."""
    try:
        return msgspec.convert(fields, Overrides)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling field of the wrong type: {error}") from None


def override(spec: SamplingSpec, fields: Overrides, *, seed: int) -> SamplingSpec:
    """The spec of one call. `seed` applies unless the caller set one."""
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
        raise BadRequest(f"temperature {spec.temperature:g} must be between 0 and 100")
    if not 0.0 < spec.top_p <= 1.0:
        raise BadRequest(f"top_p {spec.top_p:g} must be above 0 and at most 1")
    if not 0 <= spec.top_k < 1 << 31:
        raise BadRequest(f"top_k {spec.top_k} must be 0 (full vocabulary) or more")
    if not 0.0 <= spec.min_p < 1.0:
        raise BadRequest(f"min_p {spec.min_p:g} must be at least 0 (off) and below 1")
    if not 1 <= spec.max_tokens <= MAX_ANSWER_TOKENS:
        raise BadRequest(f"max_tokens {spec.max_tokens} must be between 1 and {MAX_ANSWER_TOKENS}")
    if not -SIGNED_64 <= spec.seed < SIGNED_64:
        raise BadRequest("seed must fit in 64 bits")
    if len(spec.stop) > MAX_STOP_STRINGS or any(
        not 0 < len(text) <= MAX_STOP_CHARS for text in spec.stop
    ):
        raise BadRequest(
            f"stop accepts up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        )
