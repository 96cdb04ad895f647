# SPDX-License-Identifier: Apache-2.0
"""Makes unix sockets look like ports of 127.0.0.1, inside a sandbox without a network, then execs a
program there: `python port_forwarder.py FOLDER PORT=SOCKET … -- PROGRAM ARG…`.

So a program that takes a base URL reaches the gateway, and nothing else. A child serves the ports
and dies with the program. Standard library only; imports nothing of penstock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

CHUNK_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


def main() -> None:
    folder, *words = sys.argv[1:]
    split = words.index("--")
    ports = dict(word.split("=", 1) for word in words[:split])
    argv = words[split + 1 :]
    listeners = {socket.create_server(("127.0.0.1", int(p)), backlog=128): ports[p] for p in ports}
    if listeners and os.fork() == 0:
        _detach()
        _serve(listeners)
    for listener in listeners:
        listener.close()
    # Python ignores these signals by default, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.chdir(folder)
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def _detach() -> None:
    """End with the program, and keep none of its pipes open: a reader waits for their end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _serve(listeners: Mapping[socket.socket, str]) -> None:
    for listener, path in listeners.items():
        threading.Thread(target=_accept, args=(listener, path)).start()
    threading.Event().wait()  # until the sandbox ends


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=pair).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
