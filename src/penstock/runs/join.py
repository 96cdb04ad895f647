# SPDX-License-Identifier: Apache-2.0
"""What a node or gateway needs before it joins a run: a name, a state folder, engine options."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import tempfile
import time
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.types import is_safe_name
from penstock.wire.auth import expires_at

if TYPE_CHECKING:
    from penstock.rollout.node import NodeOptions

CONNECT_TIMEOUT_S = 20.0
WARN_BEFORE_S = (3600.0, 600.0, 60.0)
"""How long before its token expires a joined node warns."""
log = structlog.get_logger(__name__)


def local_node_options(folder: RunFolder, model: ModelConfig, node: str) -> NodeOptions:
    """Options of a node on the machine that has the run folder."""
    folder.acks.mkdir(exist_ok=True)
    return {
        "state_dir": folder.nodes / require_safe(node),
        "acks": folder.acks / f"{node}.txt",
        "engine": model.engine,
        "engine_url": model.engine_url,
        "vllm_environment": model.vllm.environment or "",
        "num_engines": model.engines,
        "max_paused": model.max_paused,
    }


def check_reachable(url: str, token: str) -> None:
    """Fail fast on a wrong URL; later outages are retried."""
    from penstock.wire.client import ServiceClient
    from penstock.wire.routes import Health

    with closing(ServiceClient(url, token)) as client:
        client.call("GET", "/healthz", None, Health, deadline_s=CONNECT_TIMEOUT_S)


async def with_expiry_warnings(work: Coroutine[None, None, None], token: str) -> None:
    """Do the work of a joined node; log warnings before its token expires."""
    warnings = asyncio.create_task(_warn_before_expiry(token))
    try:
        await work
    finally:
        warnings.cancel()


async def _warn_before_expiry(token: str) -> None:
    """consumes: time · produces: a warning WARN_BEFORE_S before the token expires, and more as the
    end comes nearer · waits for: the next of these moments"""
    end = expires_at(token)
    for before_s in WARN_BEFORE_S if end is not None else ():
        assert end is not None
        left_s = end - time.time()
        if left_s > before_s:
            await asyncio.sleep(left_s - before_s)
            left_s = before_s
        elif before_s != WARN_BEFORE_S[-1]:
            continue  # it was nearer than that from the start: the next warning is due
        log.warning(
            "token expires soon; then this process ends",
            minutes_left=round(left_s / 60, 1),
            fix="get a new one with `penstock token RUN`, then start this again with it",
        )


def host_name() -> str:
    """This machine's name, in characters that a node's name may have."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:40] or "node"


def require_safe(node: str) -> str:
    """The name of a node, which becomes part of paths: from a command line, or from the token of
    another run's owner."""
    if not is_safe_name(node):
        raise ConfigError(
            f"{node[:128]!r} is not a name for a node; use 1 to 128 characters of [A-Za-z0-9._-], "
            "not starting with a dot (--name)"
        )
    return node


def node_state_dir(node: str) -> Path:
    """A folder in the user's cache, or a temporary one if that is not writable."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        folder = Path(root) / "penstock" / "nodes" / require_safe(node)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{node}-"))
    return folder
