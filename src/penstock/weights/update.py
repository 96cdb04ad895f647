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
from msgspec import Meta, Raw, Struct

from penstock.bounds import Digest
from penstock.errors import BadRequest, WeightsError
from penstock.weights.deltas.chain import MAX_STEPS, DeltaEntry
from penstock.weights.manifest import MAX_MANIFEST_BYTES, digest_of
from penstock.wire.codec import decode

KEPT_S = 600
"""How long a node keeps its connections to a weight server for the next version: over a long link
new ones cost as much as a delta."""
SERVER_KEPT_S = KEPT_S + 15
MAX_CHAINS = 256
"""Files of a version for which chains are named; further ones are fetched in full."""
MAX_PACKED_BYTES = 64 << 20
"""Of a packed manifest: digests of a million tensors hardly shrink. A longer one is fetched by
itself."""
MAX_CHAINS_BYTES = 4 << 20
MAX_UPDATE_BYTES = MAX_PACKED_BYTES + MAX_CHAINS_BYTES

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


class _Parts(Struct):
    manifest: Raw
    chains: Raw = Raw(b"\x80")


def read_update(data: bytes, digest: str) -> tuple[bytes, Chains]:
    """The manifest with this digest, and the chains. Raises WeightsError or BadRequest for any
    other answer, before more of it is built than one has. For a thread: it may unpack much."""
    parts = decode(data, _Parts)
    num_bytes = len(data) - len(memoryview(parts.manifest))
    if num_bytes > MAX_CHAINS_BYTES:  # also fields that stand there again and again
        raise BadRequest(f"an update of {num_bytes} bytes beside its manifest")
    update = decode(data, Update)
    manifest = unpack_manifest(update)
    if digest_of(manifest) != digest:
        raise WeightsError(f"the manifest of an update does not match digest {digest}")
    return manifest, update.chains


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
