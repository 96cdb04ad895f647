# SPDX-License-Identifier: Apache-2.0
"""Manifests and their sealed bytes."""

from __future__ import annotations

from collections import deque

from penstock.types import Manifest
from penstock.wire.codec import decode, encode


class ManifestCache:
    """The newest manifests of one process, with their bytes. Every rank requests a batch, and the
    report counts it, right after it is sealed; none of them decodes it again."""

    def __init__(self) -> None:
        self._newest: deque[tuple[bytes, Manifest]] = deque(maxlen=2)

    def encode(self, manifest: Manifest) -> bytes:
        """Its bytes, for ever."""
        body = encode(manifest)
        self._newest.append((body, manifest))
        return body

    def decode(self, body: bytes) -> Manifest:
        """Shared by all callers: read it, and change nothing in it."""
        for known, manifest in self._newest:
            if known == body:
                return manifest
        manifest = decode(body, Manifest)
        self._newest.append((body, manifest))
        return manifest
