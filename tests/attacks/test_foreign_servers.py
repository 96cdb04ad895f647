# SPDX-License-Identifier: Apache-2.0
"""A server that the run folder of somebody else names is cut off: it may drip, or never end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from penstock.dataflow.client import dataflow
from penstock.dataflow.client.dataflow import StatusClient
from penstock.errors import WireError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n"


def _endless() -> Iterator[bytes]:
    while True:
        yield bytes(1 << 16)


def _dripping(pause: threading.Event) -> Iterator[bytes]:
    while not pause.wait(0.05):
        yield b"x"


@contextmanager
def _answering(start: bytes, body: Callable[[threading.Event], Iterator[bytes]]) -> Generator[str]:
    """A server that answers every call so: its address."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(start)
                    for piece in body(is_over):
                        connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    "start",
    [HEAD + b"\r\n", HEAD + b"content-length: 100000000000000\r\n\r\n", HEAD],
    ids=["until its end", "declared", "headers"],
)
def test_an_answer_that_drips_is_cut_off(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataflow, "STATUS_ANSWER_S", 0.3)
    monkeypatch.setattr(dataflow, "MAX_STATUS_BYTES", 1 << 50)
    with (
        _answering(start, _dripping) as url,
        closing(StatusClient(url, "token", patience_s=0.0)) as client,
    ):
        for _ in range(2):  # the client is of use again
            with pytest.raises(WireError):
                client.status()


@pytest.mark.parametrize(
    "start",
    [
        HEAD + b"\r\n",
        HEAD + b"content-length: 100000000000000\r\n\r\n",
        HEAD + b"content-encoding: gzip\r\n\r\n",
    ],
    ids=["until its end", "declared", "packed"],
)
def test_an_answer_fills_no_memory(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataflow, "MAX_STATUS_BYTES", 1 << 20)
    with (
        _answering(start, lambda _: _endless()) as url,
        closing(StatusClient(url, "token", patience_s=0.0)) as client,
        pytest.raises(WireError, match="the limit is 1048576"),
    ):
        client.status()
