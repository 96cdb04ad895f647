# SPDX-License-Identifier: Apache-2.0
"""A bound on what a caller may send before it says who it is.

The fast HTTP parser collects a request's line and headers however long they are; nobody has been
asked for a credential by then."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10


class HeaderLimitProtocol(HttpToolsProtocol):
    """As its base, but a request whose head is longer is refused and its connection closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = False
        self._header_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response(f"a request's head has at most {MAX_HEADER_BYTES} bytes")
