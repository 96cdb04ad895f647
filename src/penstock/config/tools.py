# SPDX-License-Identifier: Apache-2.0
"""Servers whose tools a workflow offers to its models.

Owns the shape of `tools:`. `sandbox.servers` says what their programs may reach. Starts nothing."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.base import Name, Section, is_url
from penstock.config.sandbox import PathText
from penstock.options import Contradiction, non_empty
from penstock.plugins import quoted


def _url(value: str) -> str:
    if not is_url(value, "http", "https"):
        raise ValueError(f"{quoted(value)} is not a URL; write it like https://tools.example/mcp")
    return value


class ToolServerConfig(Section):
    """One server: a program, a URL, or a built-in one."""

    command: Annotated[tuple[str, ...], Field(strict=False), non_empty()] | None = None
    """A program that speaks MCP over its standard streams, and its arguments. It runs in a sandbox
    with the grants of `sandbox.servers`."""
    url: Annotated[str, AfterValidator(_url)] | None = None
    """An MCP server over HTTP. An address such as 127.0.0.1:8000 must also be in
    `sandbox.servers.hosts`."""
    builtin: Literal["python", "search", "files"] | None = None
    """python runs code, search finds passages, files reads and writes. python and files work in the
    folder of `ctx.sandbox`."""
    folder: PathText | None = None
    """For search: the folder with .txt, .md and .jsonl files; relative to the working directory."""
    token: Name | None = None
    """For url: the name of a file in `sandbox.servers.secrets`, sent as the bearer token."""
    lease: Literal["attempt", "node"] | None = None
    """Who shares a server: each attempt has its own, or all attempts of a node have one. null:
    attempt, except for search."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds for one call; then the model reads that it took too long."""
    max_result_chars: int = Field(default=8000, ge=100, le=1_000_000)
    """Most characters of a result; the middle of a longer one is cut."""

    @property
    def is_shared(self) -> bool:
        """Whether all attempts of a node have one server."""
        return self.lease == "node" if self.lease else self.builtin == "search"

    def _contradictions(self) -> Iterator[Contradiction]:
        kinds = [key for key in ("command", "url", "builtin") if getattr(self, key) is not None]
        if len(kinds) != 1:
            text = "a tool server needs exactly one of command: [PROGRAM, ...], url: and builtin:"
            yield Contradiction(text=text, keys=tuple((kind,) for kind in kinds[1:]) or ((),))
        for key, owner, has_it in (
            ("folder", "builtin: search", self.builtin == "search"),
            ("token", "url", self.url is not None),
        ):
            if getattr(self, key) is not None and not has_it:
                text = f"{key} belongs to {owner}; remove it"
                yield Contradiction(text=text, keys=((key,),))
        if self.builtin == "search" and self.folder is None:
            text = "search needs the folder of its documents; add folder: PATH"
            yield Contradiction(text=text, keys=(("builtin",),))
        if self.lease == "node" and self.builtin in ("python", "files"):
            text = f"{self.builtin} keeps files and variables of one attempt; remove lease: node"
            yield Contradiction(text=text, keys=(("lease",), ("builtin",)))
