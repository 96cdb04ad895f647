# SPDX-License-Identifier: Apache-2.0
"""Opens a dashboard: its socket, its own key, and the address for the browser.

The key lives as long as the dashboard and signs one token, for reading from this dashboard: it is
worth nothing to the run's services, and a copy of it nothing after the end.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from starlette.applications import Starlette

from penstock.dashboard.server import build
from penstock.dashboard.shown_run import name_runs
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.serving import Tls, require_tls_off_loopback, serve_on_socket, server

NAME = "dashboard"
TOKEN_TTL_S = 365 * 86_400.0
"""The key ends with the process, and the token with the key."""
LOOPBACK = "127.0.0.1"
LOOK_S = 0.3
END_S = 5.0
NOTICE_S = 0.5
"""Between the notice to open pages and the end: they ask nothing more then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDashboard:
    app: Starlette
    listener: socket.socket
    url: str
    """With the token behind `#`, which browsers keep to themselves."""
    tls: Tls | None
    ending: threading.Event
    """Set when it ends, before connections close, so that open pages are notified."""

    async def serve(self) -> None:
        """Until SIGINT or SIGTERM."""
        host, port, *_ = self.listener.getsockname()
        served, loop = server(self.app, host, port, self.tls), asyncio.get_running_loop()
        close = served.handle_exit

        def on_signal(sig: int, frame: FrameType | None) -> None:
            if self.ending.is_set():
                close(sig, frame)
            self.ending.set()
            loop.call_soon_threadsafe(loop.call_later, NOTICE_S, close, sig, frame)

        served.handle_exit = on_signal
        await served.serve(sockets=[self.listener])


@contextmanager
def open_dashboard(
    folders: Sequence[RunFolder], host: str, port: int, tls: Tls | None = None
) -> Generator[OpenDashboard]:
    """A dashboard of these runs, ready to serve."""
    require_tls_off_loopback(host, tls)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-dashboard-") as keys,
        _listen(host, port) as listener,
    ):
        signer = Signer.create(Path(keys), NAME)
        token = signer.mint(Role.READER, [Audience.DASHBOARD], ttl_s=TOKEN_TTL_S)
        scheme = "http" if tls is None else "https"
        shown_host = f"[{host}]" if ":" in host else host
        ending = threading.Event()
        verifier = signer.verifier(Audience.DASHBOARD)
        yield OpenDashboard(
            app=build(name_runs([*folders]), verifier, ending.is_set),
            listener=listener,
            url=f"{scheme}://{shown_host}:{listener.getsockname()[1]}/#token={token}",
            tls=tls,
            ending=ending,
        )


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from None


# --- in the process that launches a run --------------------------------------------------------


@contextmanager
def background_dashboard(folder: RunFolder, notify: Callable[[str], None]) -> Generator[None]:
    """Serve a run from a thread of its launcher as soon as its folder is there, and say where.
    Whatever happens to the dashboard, the run goes on."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_serve_until, args=(folder, notify, ended), name="dashboard", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=END_S)


def _serve_until(folder: RunFolder, notify: Callable[[str], None], ended: threading.Event) -> None:
    while not folder.config_file.exists():
        if ended.wait(timeout=LOOK_S):
            return

    async def serve(opened: OpenDashboard) -> None:
        serving = asyncio.create_task(serve_on_socket(opened.app, opened.listener))
        while not ended.is_set() and not serving.done():
            await asyncio.wait({serving}, timeout=LOOK_S)
        opened.ending.set()
        await asyncio.sleep(NOTICE_S)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    try:
        with open_dashboard([folder], LOOPBACK, 0) as opened:
            notify(f"dashboard: {opened.url}")
            asyncio.run(serve(opened))
    except (PenstockError, OSError) as error:
        notify(f"no dashboard: {error}; the run goes on")
