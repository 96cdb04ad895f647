# SPDX-License-Identifier: Apache-2.0
"""Sampling spec of a call: the session's, overridden by the fields in the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from penstock.errors import BadRequest
from penstock.seeds import derive
from penstock.types import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingSpec

MAX_ANSWER_TOKENS = 32_768
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
SIGNED_64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """Sampling fields that every dialect has; None keeps the session's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """`top_k` and `min_p` are not part of OpenAI's API; the names follow vLLM and others."""
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def overrides(
        self, *, max_tokens: int | None, json_schema: str | None = None, choice: int = 0
    ) -> Overrides:
        """Overrides of one choice. Choices of a seeded request get different seeds."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED_FIELDS}
        if self.seed is not None and choice:
            shared["seed"] = derive(self.seed, choice)
        return Overrides(**shared, max_tokens=max_tokens, json_schema=json_schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides(SamplingFields):
    """All sampling fields of a call."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; takes precedence if both are sent."""
    json_schema: str | None = None
    """JSON schema the answer must match; its location differs by dialect."""


_SHARED_FIELDS = tuple(field.name for field in fields(SamplingFields))
_FIELDS = tuple(field.name for field in fields(Overrides))


def read_overrides(arguments: Mapping[str, object]) -> Overrides | None:
    """Read overrides from keyword arguments; other keywords are ignored. None if all are None."""
    if all(value is None for value in arguments.values()):
        return None
    try:
        return msgspec.convert(arguments, Overrides)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling field of the wrong type: {error}") from None


def override(spec: SamplingSpec, overrides: Overrides, *, seed: int) -> SamplingSpec:
    """The spec of one call. `seed` applies unless the caller set one."""
    values = {name: getattr(overrides, name) for name in _FIELDS}
    given = {name: value for name, value in values.items() if value is not None}
    if max_tokens := given.pop("max_completion_tokens", 0):
        given["max_tokens"] = max_tokens
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    changed = replace(spec, **{"seed": seed, **given})
    check_spec(changed)
    return changed


def check_spec(spec: SamplingSpec) -> None:
    """Raises BadRequest for what no engine can sample with."""
    if spec.temperature != 0 and not MIN_TEMPERATURE <= spec.temperature <= MAX_TEMPERATURE:
        raise BadRequest(
            f"temperature {spec.temperature:g} must be 0, or between {MIN_TEMPERATURE:g} and "
            f"{MAX_TEMPERATURE:g}"
        )
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
