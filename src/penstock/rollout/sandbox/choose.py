# SPDX-License-Identifier: Apache-2.0
"""Which back end a node uses, and the refusal when none is as strong as demanded.

Fails closed: a back end is used only after its self-test, and nothing weaker takes its place.
`auto` is bubblewrap. `limits` and `none` are used only when named.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.container import ContainerBackend
from penstock.rollout.sandbox.limits import LimitsBackend, NoneBackend
from penstock.rollout.sandbox.probe import probe
from penstock.rollout.sandbox.runsc import RunscBackend
from penstock.rollout.sandbox.types import Backend, Level

BACKENDS = ("auto", "bubblewrap", "runsc", "container", "limits", "none")
_FIX = {
    "bubblewrap": "install bubblewrap (Debian: apt install bubblewrap) and allow user namespaces",
    "runsc": "install gVisor's runsc (Debian: apt install runsc) and run the node as root",
    "container": "start podman or docker on this host, and name an image that it has",
}
_PROGRAMS = {"bubblewrap": ("bwrap", "nsenter", "unshare", "setpriv"), "runsc": ("runsc",)}
_SYSCTLS = {
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/user/max_user_namespaces": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Settings that forbid user namespaces, and the value that does."""


async def choose(name: str, *, demand: Level, image: str = "") -> Backend:
    """The back end of this name, tested; raises SandboxError if it is not as strong as demanded."""
    kind = "bubblewrap" if name == "auto" else name
    makers: dict[str, Callable[[], Backend]] = {
        "bubblewrap": BubblewrapBackend,
        "runsc": RunscBackend,
        "container": lambda: ContainerBackend(image),
        "limits": LimitsBackend,
        "none": NoneBackend,
    }
    if kind not in makers:
        raise SandboxError(f"there is no sandbox {name!r}; choose one of {', '.join(BACKENDS)}")
    if missing := [one for one in _PROGRAMS.get(kind, ()) if not shutil.which(one)]:
        raise refusal(kind, demand, f"{', '.join(missing)} not found on PATH")
    backend = makers[kind]()
    if backend.level < demand:
        raise refusal(kind, demand, f"it declares only the level {backend.level.name.lower()}")
    if backend.level >= Level.NAMESPACES and (reason := await probe(backend)):
        raise refusal(kind, demand, reason)
    return backend


def refusal(kind: str, demand: Level, reason: str) -> SandboxError:
    found = [path for path, value in _SYSCTLS.items() if _reads(path, value)]
    settings = f" ({', '.join(found)} forbids it)" if found else ""
    fix = _FIX.get(kind, "set `sandbox.backend: auto`")
    return SandboxError(
        f"no sandbox of level {demand.name.lower()} on this host: {kind}: {reason}{settings}; "
        f"{fix}, or demand less in the section `sandbox` of the run file"
    )


def _reads(path: str, value: str) -> bool:
    try:
        return Path(path).read_text().strip() == value
    except OSError:
        return False
