# SPDX-License-Identifier: Apache-2.0
"""The manifest of a snapshot: which files, which tensors, and the digest of each.

Owns its record, its canonical bytes and the checks on foreign ones. It carries no incarnation and
no time: weights made again bit for bit have the same manifest, hence the same name. Knows nothing
of stores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.tensors import MAX_TENSORS, TensorEntry, check_tensor

FORMAT = 1
MAX_MANIFEST_BYTES = 256 << 20
"""A million tensors of 200 bytes each."""
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 44
DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""What a snapshot may carry. No code, no pickle: an engine could run a `.py` or `.bin` beside
them."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Their names in every adapter that PEFT writes and engines read."""
ADAPTER_PREFIX = "base_model.model."
"""Before the name of every tensor in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    blob: str
    """BLAKE3 (hex) of the file; its name in the store."""
    bytes: int


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: int
    policy: PolicyName
    number: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    weights_digest: str
    """Over the tensors alone, however they are spread over files."""
    base: str = ""
    """Of an adapter, the `weights_digest` of the model it belongs to, which may stand beside it. A
    whole model has none, and none is not written: manifests from before there were adapters keep
    their names."""

    @property
    def is_adapter(self) -> bool:
        return self.base != ""


_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(SnapshotManifest)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def is_digest(text: str) -> bool:
    return DIGEST.fullmatch(text) is not None


def is_file_name(name: str) -> bool:
    """A plain name that may stand in a snapshot: no path, not hidden, of a known harmless kind."""
    return NAME.fullmatch(name) is not None and name.endswith(SUFFIXES)


def weights_digest(tensors: Iterable[TensorEntry]) -> str:
    lines = (
        f"{tensor.name} {tensor.dtype} {'x'.join(map(str, tensor.shape))} {tensor.digest}\n"
        for tensor in sorted(tensors, key=lambda tensor: tensor.name)
    )
    return digest_of("".join(lines).encode())


def base_digest(tensors: Iterable[TensorEntry]) -> str:
    """The `weights_digest` of a model without the adapter beside it."""
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
    """Checked and in canonical order."""
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
    """Sorted keys, no blanks: one manifest has one form, and so one digest."""
    return _encoder.encode(manifest)


def parse_manifest(data: bytes) -> SnapshotManifest:
    """A manifest from anybody, or WeightsError saying what is wrong with it."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"manifest of {len(data)} bytes, at most {MAX_MANIFEST_BYTES} allowed")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"manifest is damaged: {error}") from None
    _check(manifest)
    return manifest


def _check(manifest: SnapshotManifest) -> None:
    if manifest.format != FORMAT:
        raise WeightsError(
            f"manifest has format {manifest.format}, this penstock reads {FORMAT}; update the node"
        )
    if not NAME.fullmatch(manifest.policy):
        raise WeightsError(f"manifest: policy {manifest.policy[:80]!r} is no plain name")
    if manifest.number < 0:
        raise WeightsError(f"manifest: number {manifest.number} is negative")
    if len(manifest.files) > MAX_FILES or len(manifest.tensors) > MAX_TENSORS:
        raise WeightsError(
            f"manifest: {len(manifest.files)} files and {len(manifest.tensors)} tensors, "
            f"at most {MAX_FILES} and {MAX_TENSORS} allowed"
        )
    _check_files(manifest.files)
    _check_base(manifest)
    _check_tensors(manifest.tensors)
    if weights_digest(manifest.tensors) != manifest.weights_digest:
        raise WeightsError("manifest: weights_digest is not that of its tensors")


def _check_files(files: tuple[FileEntry, ...]) -> None:
    for file in files:
        if not is_file_name(file.name):
            raise WeightsError(
                f"manifest: {file.name[:140]!r} may not stand in a snapshot; "
                f"plain names ending in {', '.join(SUFFIXES)} may"
            )
        if not is_digest(file.blob) or not 0 <= file.bytes <= MAX_FILE_BYTES:
            raise WeightsError(f"manifest: file {file.name} has no valid digest or size")
    if len({file.name for file in files}) != len(files):
        raise WeightsError("manifest: two files have the same name")
    if not any(file.name.endswith(".safetensors") for file in files):
        raise WeightsError("manifest: no .safetensors file, so no weights")


def _check_base(manifest: SnapshotManifest) -> None:
    """Engines take a folder with an adapter's config for an adapter, whatever else lies in it."""
    names = {file.name for file in manifest.files}
    if (ADAPTER_CONFIG in names) != manifest.is_adapter:
        raise WeightsError(
            f"manifest: base is {manifest.base[:80]!r}, and {ADAPTER_CONFIG} is "
            f"{'there' if ADAPTER_CONFIG in names else 'not'}; an adapter has both, the base being "
            "the weights_digest of its model, and a whole model has neither"
        )
    if not manifest.is_adapter:
        return
    if not is_digest(manifest.base):
        raise WeightsError(f"manifest: base {manifest.base[:80]!r} is no BLAKE3 digest")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if ADAPTER_WEIGHTS not in weights:
        raise WeightsError(
            f"manifest: weights of an adapter are in {ADAPTER_WEIGHTS}, not "
            f"{', '.join(weights)[:200]}"
        )
    if weights != [ADAPTER_WEIGHTS] and base_digest(manifest.tensors) != manifest.base:
        raise WeightsError(
            f"manifest: beside the adapter stand weights of another model than its base "
            f"{manifest.base}"
        )


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> None:
    for tensor in tensors:
        check_tensor(tensor.name, tensor.dtype, tensor.shape)
        if not is_digest(tensor.digest):
            raise WeightsError(f"manifest: tensor {tensor.name} has no valid digest")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise WeightsError("manifest: two tensors have the same name")
