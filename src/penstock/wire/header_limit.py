# SPDX-License-Identifier: Apache-2.0
"""Limits the size of request headers.

The fast HTTP parser buffers the request line and headers without a limit, before any credential is
checked."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10


class HeaderLimitProtocol(HttpToolsProtocol):
    """Rejects requests with longer headers and closes their connection."""

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
                self.send_400_response(f"request headers exceed {MAX_HEADER_BYTES} bytes")
