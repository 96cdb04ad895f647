# SPDX-License-Identifier: Apache-2.0
"""What a node or gateway needs before it joins a run: a name, a state folder, engine options."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bounds import is_safe_name
from penstock.config import ModelConfig, RunConfig
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.types import (
    RESERVED_TAGS,
    NodeId,
    PolicyName,
    subject_of_node,
)
from penstock.wire.auth import subject_of
from penstock.wire.held_token import Token
from penstock.wire.keys import make_private_folder

if TYPE_CHECKING:
    from penstock.rollout.node import NodeOptions

CONNECT_TIMEOUT_S = 20.0
MAX_TAGS = 15
"""One more is the node's own."""


def split_policies(text: str | None) -> tuple[PolicyName, ...]:
    """The names in `a,b`; none for None."""
    names = [name.strip() for name in (text or "").split(",")]
    if text is not None and not all(names):
        raise ConfigError(
            f"--policies {text!r}: write names separated by commas, like solver,judge"
        )
    return tuple(PolicyName(name) for name in names if name)


def split_tags(text: str | None) -> tuple[str, ...]:
    """The tags in `gpus=8,cost=12.5,spot`; none for None."""
    tags = tuple(tag.strip() for tag in (text or "").split(","))
    if text is None:
        return ()
    for tag in tags:
        if not re.fullmatch(r"[A-Za-z0-9_.=-]{1,64}", tag) or tag in RESERVED_TAGS:
            raise ConfigError(
                f"--tags {text!r}: {tag!r} is not a tag; write up to 15 of up to 64 letters, "
                "digits, _, -, . and =, separated by commas, like gpus=8,cost=12.5,spot"
            )
    if len(tags) > MAX_TAGS:
        raise ConfigError(f"--tags {text!r} has {len(tags)} tags; write {MAX_TAGS} at most")
    return tags


def local_node_options(folder: RunFolder, config: RunConfig, policy: str, node: str) -> NodeOptions:
    """Options of a node for this policy, on the machine that has the run folder."""
    model = config.models[policy]
    from penstock.runs.sandbox_settings import isolation_settings

    folder.acks.mkdir(exist_ok=True)
    return {
        "state_dir": folder.nodes / require_safe(node),
        "acks": folder.acks / f"{node}.txt",
        "engine_servers": {
            name: (_urls_of(other, node), other.vllm.environment or "")
            for name, other in config.models.items()
        },
        "max_paused": model.max_paused,
        "policies": tuple(map(PolicyName, config.served_with(policy))),
        "isolation": isolation_settings(config, folder.path),
    }


def _urls_of(model: ModelConfig, node: str) -> tuple[str, ...]:
    """The running servers of the engines of this node: each replica has its own part of the list,
    by the number at the end of its name."""
    replica = node.rpartition("-")[2]
    start = int(replica) * model.engines if replica.isdecimal() else 0
    return model.engine_urls[start : start + model.engines] or model.engine_urls[: model.engines]


def check_reachable(url: str, token: Token) -> None:
    """Fail fast on a wrong URL; later outages are retried."""
    from penstock.wire.client import ServiceClient
    from penstock.wire.routes import Health

    with closing(ServiceClient(url, token)) as client:
        client.call("GET", "/healthz", None, Health, deadline_s=CONNECT_TIMEOUT_S)


def host_name() -> str:
    """This machine's name, in characters that a node's name may have."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:40] or "node"


def node_name(token: str, name: str) -> NodeId:
    """A node id that the token may use: NAME under the token's own name."""
    subject = subject_of(token)
    if not subject or subject_of_node(NodeId(name)) == subject:
        return NodeId(name)
    return NodeId(f"{subject}.{name}")


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
    """A folder in the user's cache, or a temporary one if that is not writable. It holds weights
    and logs of a run, so other users of this machine do not see inside."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        folder = Path(root) / "penstock" / "nodes" / require_safe(node)
        make_private_folder(folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{node}-"))
    return folder
