# SPDX-License-Identifier: Apache-2.0
"""What a node and a bridge tell each other: one JSON object per line, over the standard input and
output of the bridge. The node asks, the bridge answers with the same `id`, in any order.

    {"id": 1, "call": "hello", "protocol": 1, "settings": {…}, "max_episodes": 32}
                                                                → {"id": 1, "protocol": 1}
    {"id": 2, "call": "reset", "episode": "r.1", "lease_s": 60, "payload": {…}, "seed": 7,
     "model": {"base_url": …, "api_key": …, "name": …}}         → {"id": 2, "observation": {…}}
    {"id": 3, "call": "step", "episode": "r.1", "text": "left", "tool_calls": […]}
                                                                → {"id": 3, "observation": {…}}
    {"id": 4, "call": "score", "episode": "r.1"}                → {"id": 4, "score": 1.0}
    {"id": 5, "call": "renew", "episodes": ["r.1"]}             → {"id": 5}
    {"id": 6, "call": "close", "episode": "r.1"}                → {"id": 6}
    anything that went wrong in the environment                 → {"id": 3, "error": "…"}

Pipes and not a socket: they pass every wall of a sandbox, nothing listens, and the bridge ends with
its node. Owns the shapes and their bounds; starts no process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.bounds import Count, Reward
from penstock.errors import BadRequest
from penstock.rollout.environments.types import Observation
from penstock.types import JsonObject
from penstock.wire.json_parts import require_few_parts

PROTOCOL = 1
"""A bridge that answers another number is refused."""
MAX_MESSAGE_BYTES = 16 << 20
MAX_TEXT_CHARS = 4 << 20
"""Of one observation: as much as a window of a million tokens holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationBody:
    """As in Observation."""

    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] = ""
    messages: Annotated[tuple[JsonObject, ...], Meta(max_length=1024)] = ()
    tools: Annotated[tuple[JsonObject, ...], Meta(max_length=1024)] = ()
    done: bool = False
    reward: Reward | None = None
    info: JsonObject = field(default_factory=JsonObject)

    def observation(self) -> Observation:
        return Observation(
            text=self.text,
            messages=self.messages,
            tools=self.tools,
            done=self.done,
            reward=self.reward,
            info=self.info,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeAnswer:
    """An answer to any call."""

    id: Count
    protocol: Count = 0
    """Of hello only."""
    observation: ObservationBody | None = None
    """Of reset and step."""
    score: Reward | None = None
    error: str = ""
    """What went wrong in the environment; empty if nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    id: Count


class WrongAnswer(ValueError):
    """To the call with this id: a value has another type, or is out of bounds."""

    def __init__(self, id: int, why: str) -> None:
        super().__init__(why)
        self.id = id


_ANSWERS = msgspec.json.Decoder(BridgeAnswer)
_NUMBERED = msgspec.json.Decoder(_Numbered)


def parse_answer(line: bytes) -> BridgeAnswer:
    """Raises WrongAnswer, and ValueError for anything else."""
    try:
        require_few_parts(line)
        try:
            return _ANSWERS.decode(line)
        except msgspec.ValidationError as error:
            why = f"{_shown(line)} is not a valid answer of protocol {PROTOCOL}: {error}"
            raise WrongAnswer(_NUMBERED.decode(line).id, why) from None
    except (BadRequest, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{_shown(line)} is not a valid answer of protocol {PROTOCOL}: {error}"
        ) from None


def pack_call(number: int, call: str, **values: object) -> bytes:
    """One line."""
    return msgspec.json.encode({"id": number, "call": call, **values}) + b"\n"


def _shown(line: bytes) -> str:
    text = line[:80].decode(errors="replace")
    return repr(text + ("…" if len(line) > 80 else ""))
