# SPDX-License-Identifier: Apache-2.0
"""Manifest of a snapshot: its files and tensors with their digests.

Owns the record, its canonical encoding and the validation of untrusted manifests. A manifest has no
incarnation and no time: bit-identical weights have the same manifest and so the same digest. Knows
nothing of stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.bounds import is_digest, is_safe_name
from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.deltas.chain import MAX_FILE_BYTES
from penstock.weights.tensors import MAX_TENSORS, TensorEntry, check_tensor, new_hash

FORMAT = 1
MAX_MANIFEST_BYTES = 256 << 20
"""A million tensors of 200 bytes each."""
MAX_FILES = 4096
SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Allowed file types of a snapshot. No code and no pickle: an engine could execute a `.py` or
`.bin` file."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File names of a PEFT adapter."""
ADAPTER_PREFIX = "base_model.model."
"""Prefix of every tensor name in an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    blob: str
    """BLAKE3 (hex) of the file; also its name in the store."""
    bytes: int


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: int
    policy: PolicyName
    number: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    weights_digest: str
    """Digest of the tensors alone, independent of how they are split into files."""
    base: str = ""
    """For an adapter, the `weights_digest` of its base model, which may be in the same folder.
    Empty for a full model, and then omitted from the encoding."""

    @property
    def is_adapter(self) -> bool:
        return self.base != ""


_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(SnapshotManifest)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file, hashed with all cores."""
    return new_hash(path.stat().st_size).update_mmap(path).hexdigest()


def is_file_name(name: str) -> bool:
    """True for a plain file name allowed in a snapshot: no path, not hidden, of an allowed type."""
    return is_safe_name(name) and name.endswith(SUFFIXES)


def weights_digest(tensors: Iterable[TensorEntry]) -> str:
    lines = (
        f"{tensor.name} {tensor.dtype} {'x'.join(map(str, tensor.shape))} {tensor.digest}\n"
        for tensor in sorted(tensors, key=lambda tensor: tensor.name)
    )
    return digest_of("".join(lines).encode())


def base_digest(tensors: Iterable[TensorEntry]) -> str:
    """The `weights_digest` of the base model, without the adapter in the same folder."""
    return weights_digest(
        tensor for tensor in tensors if not tensor.name.startswith(ADAPTER_PREFIX)
    )


def make_manifest(
    policy: PolicyName,
    number: int,
    files: Iterable[FileEntry],
    tensors: Iterable[TensorEntry],
    *,
    base: str = "",
) -> SnapshotManifest:
    """A validated manifest in canonical order."""
    entries = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    manifest = SnapshotManifest(
        format=FORMAT,
        policy=policy,
        number=number,
        files=tuple(sorted(files, key=lambda file: file.name)),
        tensors=entries,
        weights_digest=weights_digest(entries),
        base=base,
    )
    _check(manifest)
    return manifest


def encode_manifest(manifest: SnapshotManifest) -> bytes:
    """Canonical JSON (sorted keys, no spaces), so that a manifest has exactly one digest."""
    return _encoder.encode(manifest)


def parse_manifest(data: bytes) -> SnapshotManifest:
    """Parse and validate an untrusted manifest; raises WeightsError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(
            f"manifest of {len(data)} bytes exceeds the limit of {MAX_MANIFEST_BYTES}"
        )
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"manifest is damaged: {error}") from None
    _check(manifest)
    return manifest


def _check(manifest: SnapshotManifest) -> None:
    if manifest.format != FORMAT:
        raise WeightsError(
            f"manifest has format {manifest.format}, this node supports {FORMAT}; update penstock"
        )
    if not is_safe_name(manifest.policy):
        raise WeightsError(f"manifest: policy {manifest.policy[:80]!r} is not a valid name")
    if manifest.number < 0:
        raise WeightsError(f"manifest: number {manifest.number} is negative")
    if len(manifest.files) > MAX_FILES or len(manifest.tensors) > MAX_TENSORS:
        raise WeightsError(
            f"manifest: {len(manifest.files)} files and {len(manifest.tensors)} tensors exceed "
            f"the limits of {MAX_FILES} and {MAX_TENSORS}"
        )
    _check_files(manifest.files)
    _check_adapter(manifest)
    _check_entries(manifest.tensors)
    if weights_digest(manifest.tensors) != manifest.weights_digest:
        raise WeightsError("manifest: weights_digest does not match its tensors")


def _check_files(files: tuple[FileEntry, ...]) -> None:
    for file in files:
        if not is_file_name(file.name):
            raise WeightsError(
                f"manifest: file {file.name[:140]!r} is not allowed in a snapshot; "
                f"use plain names ending in {', '.join(SUFFIXES)}"
            )
        if not is_digest(file.blob) or not 0 <= file.bytes <= MAX_FILE_BYTES:
            raise WeightsError(f"manifest: file {file.name} has an invalid digest or size")
    if len({file.name for file in files}) != len(files):
        raise WeightsError("manifest: two files have the same name")
    if not any(file.name.endswith(".safetensors") for file in files):
        raise WeightsError("manifest: no weights (.safetensors file)")


def _check_adapter(manifest: SnapshotManifest) -> None:
    """Check that base and adapter files agree: engines treat any folder with an adapter config as
    an adapter."""
    names = {file.name for file in manifest.files}
    if (ADAPTER_CONFIG in names) != manifest.is_adapter:
        raise WeightsError(
            f"manifest: base is {manifest.base[:80]!r}, but {ADAPTER_CONFIG} is "
            f"{'present' if ADAPTER_CONFIG in names else 'missing'}; an adapter needs both (base: "
            "the weights_digest of its model), a full model neither"
        )
    if not manifest.is_adapter:
        return
    if not is_digest(manifest.base):
        raise WeightsError(f"manifest: base {manifest.base[:80]!r} is not a BLAKE3 digest")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if ADAPTER_WEIGHTS not in weights:
        raise WeightsError(
            f"manifest: adapter weights must be in {ADAPTER_WEIGHTS}, not "
            f"{', '.join(weights)[:200]}"
        )
    if weights != [ADAPTER_WEIGHTS] and base_digest(manifest.tensors) != manifest.base:
        raise WeightsError(
            f"manifest: the weights stored with the adapter do not match its base {manifest.base}"
        )


def _check_entries(tensors: tuple[TensorEntry, ...]) -> None:
    for tensor in tensors:
        check_tensor(tensor.name, tensor.dtype, tensor.shape)
        if not is_digest(tensor.digest):
            raise WeightsError(f"manifest: tensor {tensor.name} has an invalid digest")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise WeightsError("manifest: two tensors have the same name")
