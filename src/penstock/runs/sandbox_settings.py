# SPDX-License-Identifier: Apache-2.0
"""From `sandbox:` in a run file to what a node does with it on this machine.

Owns the paths: relative ones are of the working directory, and the folder of all runs is hidden, so
that no program sees a ledger, a key or a token of any run in it. So are Harbor tasks, which have
the answers. Starts nothing."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import GrantsConfig, RunConfig
from penstock.config.sandbox import HOST
from penstock.rollout.isolation import (
    FOREVER_S,
    IsolationSettings,
    ToolGrants,
    Use,
    UseSettings,
)
from penstock.rollout.sandbox.types import Grants, Level, Limits
from penstock.rollout.visible_folders import python_folders

KEYS = "keys"
"""Every run folder has it."""


def isolation_settings(config: RunConfig, run_folder: Path) -> IsolationSettings:
    """What `sandbox:` of this run means here."""
    sandbox = config.sandbox
    return IsolationSettings(
        backend=sandbox.backend,
        image=sandbox.image,
        demand=None if sandbox.demand is None else Level[sandbox.demand.upper()],
        uses={use: _use(getattr(sandbox, use)) for use in Use},
        hidden=(*_folders_of_runs(run_folder.resolve()), *_verifiers(config)),
        tools=_tool_grants(config),
    )


def _folders_of_runs(run_folder: Path) -> tuple[Path, ...]:
    """The folder of all runs; or each of those runs, where programs run or import from there."""
    root = run_folder.parent
    needed = (folder.resolve() for folder in (Path.cwd(), *python_folders()))
    if not any(folder.is_relative_to(root) for folder in needed):
        return (root,)
    runs = (path for path in root.iterdir() if (path / KEYS).is_dir()) if root.is_dir() else ()
    return (run_folder, *runs)


def _tool_grants(config: RunConfig) -> ToolGrants:
    """What `tools:` of this machine's run file names: folders, and hosts by name. An address, which
    may be an internal one, must be granted under `sandbox.servers`."""
    servers = config.tools.values()
    hosts = (urlsplit(server.url).netloc for server in servers if server.url)
    return ToolGrants(
        folders=tuple(_path(server.folder) for server in servers if server.folder),
        hosts=tuple(host for host in hosts if HOST.fullmatch(host) and not _is_address(host)),
    )


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition(":")[0])
    except ValueError:
        return False
    return True


def _verifiers(config: RunConfig) -> tuple[Path, ...]:
    """Folders of Harbor tasks, where the answers are."""
    return tuple(_path(source.harbor.path) for source in config.sources if source.harbor)


def _use(grants: GrantsConfig) -> UseSettings:
    limits = grants.limits
    return UseSettings(
        limits=Limits(
            wall_s=FOREVER_S,
            cpu_s=limits.cpu_s,
            memory_mb=limits.memory_mb,
            num_processes=limits.num_processes,
            disk_mb=limits.disk_mb,
            output_bytes=round(limits.output_mb * (1 << 20)),
        ),
        grants=Grants(
            hosts=grants.hosts,
            folders=tuple(map(_path, grants.folders)),
            secrets={name: _path(path) for name, path in grants.secrets.items()},
        ),
        env=grants.env,
    )


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()
