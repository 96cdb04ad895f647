# SPDX-License-Identifier: Apache-2.0
"""The contract of tools: what a call returns, and what a server offers. Types only.

A tool that fails is a result: its text goes to the model and the episode goes on. A sandbox that
fails raises SandboxError, which ends the attempt without a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered."""

    text: str
    """For the model, as the `content` of a message with the role `tool`."""
    is_error: bool = False
    """Whether the text is an error: of the tool, its server or the arguments."""
    cost: float = 0.0
    """What the server says that it cost, in its own unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as its server offers it."""

    name: str
    description: str
    parameters: JsonObject
    """JSON schema of the arguments."""


class ToolFailed(Exception):
    """The server did not answer the call; the text says why, for the model."""


class ToolSession(Protocol):
    """One open server, of an attempt or shared by all attempts of a node. Starts when it is first
    used, and again after it ended."""

    async def list(self) -> Sequence[ToolSpec]:
        """What it offers. Raises ToolFailed or SandboxError."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolFailed or SandboxError. The caller has a deadline and may cancel it."""
        ...

    async def recover(self) -> None:
        """A call was cancelled at its deadline: end the server unless it can answer the next."""
        ...

    async def close(self) -> None:
        """End the server. May be repeated."""
        ...
