# SPDX-License-Identifier: Apache-2.0
"""A new version in one answer: its manifest, and the deltas to its files from what a node has.

Owns the record and its packing; over a long link each question costs more than its answer. The
manifest is compressed, because digests of a large model outgrow the first packets of a connection.
Trusts nothing: the caller checks the manifest by its digest and the chains by `is_valid_chain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import zstandard
from msgspec import Meta

from penstock.bounds import Digest
from penstock.errors import WeightsError
from penstock.weights.deltas.chain import MAX_STEPS, DeltaEntry
from penstock.weights.manifest import MAX_MANIFEST_BYTES

KEPT_S = 600
"""How long a node keeps its connections to a weight server for the next version: over a long link
new ones cost as much as a delta."""
SERVER_KEPT_S = KEPT_S + 15
MAX_CHAINS = 256
"""Files of a version for which chains are named; further ones are fetched in full."""
MAX_UPDATE_BYTES = MAX_MANIFEST_BYTES + (64 << 10)

Chains = Mapping[str, tuple[DeltaEntry, ...]]
"""Deltas by the blob to which they lead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    """A zstd frame of the manifest's JSON."""
    chains: Annotated[
        dict[Digest, Annotated[tuple[DeltaEntry, ...], Meta(max_length=MAX_STEPS)]],
        Meta(max_length=MAX_CHAINS),
    ] = field(default_factory=dict[Digest, tuple[DeltaEntry, ...]])


def pack_manifest(data: bytes) -> bytes:
    return zstandard.compress(data)


def unpack_manifest(update: Update) -> bytes:
    """Raises WeightsError for anything but one frame that says its size and keeps within it."""
    try:
        size = zstandard.get_frame_parameters(update.manifest).content_size
        if size > MAX_MANIFEST_BYTES:  # also one that is not said
            raise WeightsError(f"manifest of {size} bytes; the limit is {MAX_MANIFEST_BYTES}")
        return zstandard.decompress(update.manifest)
    except zstandard.ZstdError as error:
        raise WeightsError(f"manifest cannot be unpacked: {error}") from None
