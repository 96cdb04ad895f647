# SPDX-License-Identifier: Apache-2.0
"""The state of a trainer in files: every rank writes its own shard, and reads only that.

A shard is a plain safetensors file; its header records the region of each tensor that it holds. The
rank that wrote it confirms that with a receipt with its digest, written next to it once it is on
disk, and rank 0 waits only for receipts: no tensor goes through it. A restoring rank reads the
slices that it holds, from all files, so the number of ranks may change.

Owns the names, headers and receipts of these files, not when they become a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.durable import sync, write_durably
from penstock.errors import BadRequest, StoreError
from penstock.trainer.durable_files import digest
from penstock.trainer.ranks.regions import TensorRegion, as_dtensor, is_owner, local, region_of
from penstock.trainer.ranks.sharding import shard_like
from penstock.wire.codec import JSON, decode, encode_json

OPTIMIZER = "optimizer.safetensors"
"""The file of a single rank."""
POLL_S = 0.02
_REGIONS = "regions"
_RECEIPT = ".written-by-rank-"


def state_names(num_ranks: int) -> list[str]:
    """The files that make up the state, by rank."""
    if num_ranks == 1:
        return [OPTIMIZER]
    stem, suffix = OPTIMIZER.split(".")
    return [f"{stem}-rank-{rank}-of-{num_ranks}.{suffix}" for rank in range(num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """One rank's shard of the state; later steps do not change it."""

    tensors: Mapping[str, Tensor]
    regions: Mapping[str, TensorRegion] = field(default_factory=dict[str, TensorRegion])
    """The region of each tensor; tensors not named here are complete, and every rank has its own.
    """


def copy_shard(state: Mapping[str, Tensor]) -> StateShard:
    """This rank's region of each tensor, in host memory; regions that a lower rank also has are
    left out."""
    kept = {name: tensor.detach() for name, tensor in state.items() if is_owner(tensor)}
    regions = {name: region_of(tensor) for name, tensor in kept.items()}
    return StateShard(
        tensors={
            name: local(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in kept.items()
        },
        regions={name: region for name, region in regions.items() if region is not None},
    )


def write_state(path: Path, shares: StateShard) -> None:
    header = {_REGIONS: encode_json(shares.regions).decode()} if shares.regions else None
    save_file(dict(shares.tensors), path, metadata=header)


# --- several ranks, one checkpoint ----------------------------------------------------------------


def write_shard(folder: Path, rank: int, num_ranks: int, shares: StateShard) -> None:
    """Write one rank's file; the receipt comes last, when it is durable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / state_names(num_ranks)[rank]
    write_state(path, shares)
    sync(path)
    write_durably(folder / f"{_RECEIPT}{rank}", digest(path).encode())


def wait_for_shards(folder: Path, num_ranks: int) -> dict[str, str]:
    """The digest of every rank's file, by name, once all of them are durable; removes the receipts.

    waits for: receipts · ends: when all exist. A rank that dies is noticed by the supervisor, which
    also ends this wait. Rank 0's own receipt exists from the start."""
    while True:
        receipts = [_read_receipt(folder, rank) for rank in range(num_ranks)]
        if receipts[0] is None:
            raise StoreError(
                f"{folder} vanished while a checkpoint was written into it: another trainer, or "
                "a user, has removed it. Let one trainer at a time save here"
            )
        digests = [receipt for receipt in receipts if receipt is not None]
        if len(digests) == num_ranks:
            for rank in range(num_ranks):
                (folder / f"{_RECEIPT}{rank}").unlink()
            return dict(zip(state_names(num_ranks), digests, strict=True))
        time.sleep(POLL_S)


def _read_receipt(folder: Path, rank: int) -> str | None:
    """The digest that the rank has confirmed; None before it has."""
    try:
        return (folder / f"{_RECEIPT}{rank}").read_text()
    except FileNotFoundError:
        return None


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardTensor:
    """One tensor of one file."""

    file: Any
    path: Path
    rank: int
    """Which rank wrote it."""
    name: str
    region: TensorRegion | None = None

    def read(self, region: TensorRegion) -> Tensor:
        """The slice of it in this region, which intersects it."""
        if not region.shape:
            return self.file.get_tensor(self.name)
        own = self.region or TensorRegion.full(region.full_shape)
        return self.file.get_slice(self.name)[region.slices_in(own)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedState(Mapping[str, Tensor]):
    """The state in the files of all ranks: full tensors by name, each read on access, or any slice
    of one."""

    pieces: Mapping[str, Sequence[_ShardTensor]]
    rank: int = 0
    """The rank whose own tensors are read, for tensors that every rank has its own of."""

    def __getitem__(self, name: str) -> Tensor:
        pieces = self.pieces[name]
        if pieces[0].region is None:
            own = self._own(pieces)
            return own.file.get_tensor(own.name)
        return self.part(name, TensorRegion.full(pieces[0].region.full_shape))

    def __contains__(self, name: object) -> bool:
        return name in self.pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def part(self, name: str, target: TensorRegion) -> Tensor:
        """One region of a tensor, from all files that hold some of it."""
        pieces = self.pieces[name]
        if pieces[0].region is None:
            return self._own(pieces).read(target)
        made: Tensor | None = None
        num_read = 0
        for piece in pieces:
            assert piece.region is not None, (
                "every rank writes its region, or every rank the full tensor"
            )
            intersect = piece.region.intersect(target)
            if intersect is None:
                continue
            found = piece.read(intersect)
            made = torch.empty(target.shape, dtype=found.dtype) if made is None else made
            made[intersect.slices_in(target)] = found
            num_read += found.numel()
        if num_read != math.prod(target.shape):
            raise StoreError(
                f"{name} is incomplete in {pieces[0].path.parent}: its shards hold {num_read} "
                f"of {math.prod(target.shape)} elements; restore another checkpoint"
            )
        return torch.empty(target.shape) if made is None else made

    def for_rank(self, rank: int) -> ShardedState:
        return ShardedState(pieces=self.pieces, rank=rank)

    def _own(self, pieces: Sequence[_ShardTensor]) -> _ShardTensor:
        return next((piece for piece in pieces if piece.rank == self.rank), pieces[0])


def open_state(paths: Sequence[Path]) -> ShardedState:
    """Files whose digests were checked, by rank; only headers are read yet."""
    pieces: dict[str, list[_ShardTensor]] = {}
    for rank, path in enumerate(paths):
        file: Any = safe_open(path, framework="pt")
        regions = _regions(path, file.metadata() or {})
        for name in cast(list[str], file.keys()):
            piece = _ShardTensor(
                file=file, path=path, rank=rank, name=name, region=regions.get(name)
            )
            known = pieces.setdefault(name, [])
            if piece.region is None or all(piece.region != other.region for other in known):
                known.append(piece)  # ranks inside one part may have written the same region
    return ShardedState(pieces=pieces)


def _regions(path: Path, header: Mapping[str, str]) -> dict[str, TensorRegion]:
    try:
        return decode(header.get(_REGIONS, "{}").encode(), dict[str, TensorRegion], media_type=JSON)
    except BadRequest as error:
        raise StoreError(f"the header of {path} has no regions of its tensors") from error


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Those whose names start with the prefix, by the rest of their names."""
    if isinstance(state, ShardedState):
        return ShardedState(pieces=_strip_prefix(state.pieces, prefix), rank=state.rank)
    return _strip_prefix(state, prefix)


def _strip_prefix(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }


def load_shard(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """This rank's shard of a tensor, placed like another one; only that much is read from files."""
    region = region_of(like)
    if region is None or not isinstance(state, ShardedState):
        return shard_like(state[name], like)
    return as_dtensor(state.part(name, region), like)
