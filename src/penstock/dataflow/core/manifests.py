# SPDX-License-Identifier: Apache-2.0
"""Manifests and their sealed bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from penstock.types import Manifest
from penstock.wire.codec import decode, encode


class ManifestCache:
    """The newest manifests of one process, with their bytes. Right after a batch is sealed, every
    rank requests it and the report counts it; the cache saves decoding it each time."""

    def __init__(self) -> None:
        self._newest: deque[tuple[bytes, Manifest]] = deque(maxlen=2)

    def encode(self, manifest: Manifest) -> bytes:
        """The manifest's bytes; these never change."""
        body = encode(manifest)
        self._newest.append((body, manifest))
        return body

    def decode(self, body: bytes) -> Manifest:
        """Decode a manifest. The result is shared by all callers: treat it as read-only."""
        for known, manifest in self._newest:
            if known == body:
                return manifest
        manifest = decode(body, Manifest)
        self._newest.append((body, manifest))
        return manifest


def join_manifests(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of a batch, from the manifests of all its instalments: the groups in order."""
    groups = tuple(group for part in parts for group in part.groups)
    if parts[0].visible_roles is None:
        return replace(parts[0], groups=groups)
    visible_roles = sorted({pair for part in parts for pair in part.visible_roles or ()})
    return replace(parts[0], groups=groups, visible_roles=tuple(visible_roles))
