# SPDX-License-Identifier: Apache-2.0
"""Where code runs that is not penstock's, and what it may reach.

Owns the shape of `sandbox:`. Rewards, workflow commands and tools have separate grants, so that
the key of a judge is not in reach of code that a model wrote. Grants hold on the machine that has
the run folder: a node that joins from elsewhere grants nothing because a run asks for it."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.base import Name, Section, matching, non_blank

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
"""A variable of the environment."""
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9-]+)*(:\d{1,5})?", re.ASCII)
"""A host by name, and a port if it is neither 80 nor 443."""

EnvName = Annotated[
    str, AfterValidator(matching(ENV_NAME, "name a variable of the environment, like LOG_LEVEL"))
]
HostName = Annotated[
    str, AfterValidator(matching(HOST, "name a host without scheme, like api.example.com:8443"))
]
PathText = Annotated[str, AfterValidator(non_blank)]


class LimitsConfig(Section):
    """Bounds of one sandbox; a program beyond one of them is ended."""

    memory_mb: int = Field(default=4096, ge=16)
    """Memory of all its processes together."""
    cpu_s: float = Field(default=3600.0, gt=0)
    """CPU seconds of one process."""
    num_processes: int = Field(default=256, ge=1)
    """Processes and threads."""
    disk_mb: int = Field(default=1024, ge=1)
    """What it may write."""
    output_mb: float = Field(default=64.0, gt=0)
    """What it may print."""


class GrantsConfig(Section):
    """What one kind of code may reach beyond its own folder. Nothing by default."""

    env: Annotated[tuple[EnvName, ...], Field(strict=False)] = ()
    """Variables of the node's environment that are passed on."""
    folders: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """Folders or files that it may read, at the same path inside; relative to the working
    directory."""
    secrets: Mapping[Name, PathText] = {}
    """Files that it may read as /run/secrets/NAME inside."""
    hosts: Annotated[tuple[HostName, ...], Field(strict=False)] = ()
    """Hosts that it may call over HTTP, through the proxy that HTTPS_PROXY names inside."""
    limits: LimitsConfig = LimitsConfig()
    """How much it may use."""


class SandboxConfig(Section):
    """Isolation of rewards, workflow commands, tools and graders."""

    backend: Literal["auto", "bubblewrap", "runsc", "container", "none"] = "auto"
    """What isolates them; auto takes bubblewrap. none runs them as ordinary processes of the node's
    user: choose it only where you wrote all that they run."""
    image: str = ""
    """The image of the container back end; it must be on this machine."""
    demand: Literal["limits", "namespaces", "gvisor"] | None = None
    """The weakest isolation with which this run starts. null: commands, tools and graders need
    namespaces; your own reward takes what the machine has, with a warning."""
    reward: GrantsConfig = GrantsConfig()
    """For reward functions."""
    workflow: GrantsConfig = GrantsConfig()
    """For the commands of workflows, and programs that a workflow starts with `ctx.run_program`."""
    tools: GrantsConfig = GrantsConfig()
    """For `ctx.sandbox`, the tool python and graders: code that a model wrote."""
    servers: GrantsConfig = GrantsConfig()
    """For the servers of `tools:`. Also the hosts that `url` may name beyond public ones, such as
    127.0.0.1:8000."""
    environment: GrantsConfig = GrantsConfig()
    """For the bridges of environments, `env:` of a source."""
