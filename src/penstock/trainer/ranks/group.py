# SPDX-License-Identifier: Apache-2.0
"""Collectives between the ranks of a trainer, and the single-rank implementation.

Owns the collectives of a step: sums, maxima, budget terms, rows for the ranks of one part, and
broadcasts from rank 0. Each has one form: tensors of numbers or bytes, never objects. Sums run in
the order of parts on every rank, so all ranks hold the same bits.

P = data-parallel parts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.config.stages import ParallelConfig
from penstock.trainer.arrays import Floats
from penstock.trainer.ranks.rendezvous import RankWatch, meet, open_store, progress
from penstock.trainer.ranks.supervisor import RankEnv
from penstock.trainer.ranks.topology import RankPosition

TIMEOUT_S = 600.0
"""For a rank that hangs; a rank that exits is noticed by its supervisor."""


class RankReductions(Protocol):
    """What a learner needs from the parts of its batch on other ranks."""

    def sum_over_ranks(self, values: Floats) -> Floats:
        """Sum element by element; each part counts once."""
        ...

    def max_over_ranks(self, number: int) -> int:
        """The maximum: every rank runs as many passes as the one with the most micro-batches."""
        ...

    def gather_over_ranks(self, terms: Tensor) -> Tensor:
        """The 1-D tensors of all parts, of any lengths, one after another."""
        ...


class Ranks(RankReductions, Protocol):
    """The ranks of a trainer, several or one: also what keeps all of them in step."""

    @property
    def position(self) -> RankPosition: ...

    def broadcast_from_rank0(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers, on every rank; all pass arrays of the same size."""
        ...

    def broadcast_in_part(self, payload: bytes) -> bytes:
        """The value of this part's fetching rank; values from the part's other ranks are
        ignored."""
        ...


class SingleRank:
    """Single-process implementation: every collective is the identity."""

    position = RankPosition(rank=0, parallel=ParallelConfig())

    def sum_over_ranks(self, values: Floats) -> Floats:
        return values

    def max_over_ranks(self, number: int) -> int:
        return number

    def gather_over_ranks(self, terms: Tensor) -> Tensor:
        return terms

    def broadcast_from_rank0(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def broadcast_in_part(self, payload: bytes) -> bytes:
        return payload


class _WorldBroadcasts:
    """Broadcasts to every rank, including ranks that are idle in a stage."""

    def broadcast_from_rank0(self, numbers: Sequence[int]) -> list[int]:
        progress.enter("orders of rank 0")
        said = torch.tensor(list(numbers), dtype=torch.int64)
        dist.broadcast(said, src=0)
        return said.tolist()


class RankGroup(_WorldBroadcasts):
    """This rank in the group of one stage."""

    def __init__(
        self,
        mesh: DeviceMesh,
        parallel: ParallelConfig,
        *,
        over_parts: dist.ProcessGroup,
        in_part: dist.ProcessGroup | None,
        in_context: dist.ProcessGroup | None = None,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        """mesh: of parameters, with the dimensions `replicas` and `tp` if they are more than 1, and
        `shards`. over_parts: the ranks at the same place of every part. in_part: the ranks of
        this part; None if it is alone. in_context: the ranks of this part with the same
        tensor-parallel shard; None if this rank has all tokens. expert_mesh: the same ranks as
        groups that share the experts; None if every rank has all."""
        self.mesh = mesh
        self.expert_mesh = expert_mesh
        self.position = RankPosition(rank=dist.get_rank(), parallel=parallel)
        self.in_context = in_context
        self._over_parts = over_parts
        self._in_part = in_part

    def sum_over_ranks(self, values: Floats) -> Floats:
        gathered = self._gather(torch.from_numpy(np.ascontiguousarray(values, np.float64)))
        return torch.stack(gathered).sum(dim=0).numpy()

    def max_over_ranks(self, number: int) -> int:
        return max(int(found) for found in self._gather(torch.tensor(number)))

    def gather_over_ranks(self, terms: Tensor) -> Tensor:
        lengths = [int(found) for found in self._gather(torch.tensor(terms.numel()))]
        padded = torch.zeros(max(lengths), dtype=terms.dtype)
        padded[: terms.numel()] = terms.detach().cpu()
        found = self._gather(padded)
        joined = torch.cat([part[:length] for part, length in zip(found, lengths, strict=True)])
        return joined.to(terms.device)

    def broadcast_in_part(self, payload: bytes) -> bytes:
        if self._in_part is None:
            return payload
        source = self.position.part * self.position.parallel.ranks_per_part
        length = torch.tensor(len(payload))
        dist.broadcast(length, src=source, group=self._in_part)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.position.fetches_rows:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(content, src=source, group=self._in_part)
        return content.numpy().tobytes()

    def broadcast_tensor_from_rank0(self, tensor: Tensor) -> None:
        """Broadcast rank 0's tensor: inside its part, then from part to part."""
        position = self.position
        if position.part == 0 and self._in_part is not None:
            dist.broadcast(tensor, src=0, group=self._in_part)
        source = position.rank % position.parallel.ranks_per_part
        dist.broadcast(tensor, src=source, group=self._over_parts)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The parts' tensors in the order of parts."""
        progress.enter("sums over parts")
        found = [torch.empty_like(tensor) for _ in range(self.position.parallel.dp)]
        dist.all_gather(found, tensor, group=self._over_parts)
        return found


class StagedRanks(_WorldBroadcasts):
    """All ranks of a trainer whose stages differ in sharding, positioned at one of these stages.
    Idle ranks hold no rows and receive the reduced results by broadcast."""

    def __init__(
        self,
        groups: Mapping[ParallelConfig, RankGroup | SingleRank | None],
        parallel: ParallelConfig,
    ) -> None:
        """groups: the rank groups of all stages; None for stages in which this rank is idle."""
        self.groups = groups
        self.position = RankPosition(rank=dist.get_rank(), parallel=parallel)
        self._group = groups[parallel]

    def at_stage(self, parallel: ParallelConfig) -> StagedRanks:
        """The same ranks, positioned at another stage."""
        return StagedRanks(self.groups, parallel)

    def sum_over_ranks(self, values: Floats) -> Floats:
        found = self._group.sum_over_ranks(values) if self._group else values
        own = np.array(found, np.float64, order="C")
        return self._broadcast(torch.from_numpy(own)).numpy()

    def max_over_ranks(self, number: int) -> int:
        most = self._group.max_over_ranks(number) if self._group else 0
        return self.broadcast_from_rank0([most])[0]

    def gather_over_ranks(self, terms: Tensor) -> Tensor:
        own = self._group.gather_over_ranks(terms) if self._group else terms
        [length] = self.broadcast_from_rank0([own.numel()])
        received = own.cpu() if self._group else own.new_empty(length, device="cpu")
        return self._broadcast(received).to(terms.device)

    def broadcast_in_part(self, payload: bytes) -> bytes:
        return self._group.broadcast_in_part(payload) if self._group else payload

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """The value of rank 0, which is in every group."""
        dist.broadcast(tensor, src=0)
        return tensor


def init_process_group(
    rank_env: RankEnv,
    *,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
    hosts: Sequence[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> RankWatch:
    """Join the other ranks at rank 0's store; returns when all have joined.

    timeout_s: of each collective. hosts: of each rank, for messages."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = open_store(rank_env, timeout_s=timeout_s, is_stopping=is_stopping)
    meet(store, rank_env, hosts=hosts, is_stopping=is_stopping)
    dist.init_process_group(
        "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        store=store,
        rank=rank_env.rank,
        world_size=rank_env.num_ranks,
        timeout=timeout,
    )
    return RankWatch(store, rank_env, hosts)


def make_ranks(parallels: Sequence[ParallelConfig], *, device: str = "cpu") -> Ranks:
    """One group if all stages are sharded the same way over all ranks; else the staged ranks,
    positioned at the first stage."""
    groups = {parallel: _make_one(parallel, device) for parallel in dict.fromkeys(parallels)}
    only = groups[parallels[0]] if len(groups) == 1 else None
    if only is not None and parallels[0].num_ranks == dist.get_world_size():
        return only
    return StagedRanks(groups, parallels[0])


def _make_one(parallel: ParallelConfig, device: str) -> RankGroup | SingleRank | None:
    if parallel.num_ranks > 1:
        return make_rank_group(parallel, device=device)
    return SingleRank() if dist.get_rank() == 0 else None


def make_rank_group(parallel: ParallelConfig, *, device: str = "cpu") -> RankGroup | None:
    """This rank's group in a stage of this size; None if the rank is idle there.

    Every rank of the world calls it, in the same order for the same stages."""
    num_ranks = dist.get_world_size()
    if parallel.num_ranks > num_ranks:
        raise ValueError(
            f"parallel {parallel.text} needs {parallel.num_ranks} ranks, and this trainer has "
            f"{num_ranks}; lower dp, cp or tp, or start more ranks"
        )
    mesh = _parameter_mesh(parallel, device)
    dp, cp, tp = parallel.dp, parallel.cp, parallel.tp
    ranks = torch.arange(parallel.num_ranks).view(dp, cp, tp)
    is_plain = cp == parallel.replicas == 1
    over_parts = None if is_plain else _own_group(ranks.permute(1, 2, 0).reshape(-1, dp))
    in_part = None if cp == 1 else _own_group(ranks.reshape(dp, -1))
    in_context = in_part
    if cp > 1 and tp > 1:
        in_context = _own_group(ranks.transpose(1, 2).reshape(-1, cp))
    expert_mesh = _expert_mesh(parallel, device)
    if mesh.get_coordinate() is None:
        return None
    return RankGroup(
        mesh,
        parallel,
        over_parts=over_parts or mesh.get_group("shards"),
        in_part=mesh.get_group("tp") if cp == 1 < tp else in_part,
        in_context=in_context,
        expert_mesh=expert_mesh,
    )


def _parameter_mesh(parallel: ParallelConfig, device: str) -> DeviceMesh:
    """How parameters are placed: copies, each cut into shards of what tensor parallelism leaves."""
    sizes = {"replicas": parallel.replicas, "shards": parallel.num_shards, "tp": parallel.tp}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shards")
    ranks = torch.arange(parallel.num_ranks).view([sizes[name] for name in names])
    return DeviceMesh(device, ranks, mesh_dim_names=names)


def _expert_mesh(parallel: ParallelConfig, device: str) -> DeviceMesh | None:
    """How experts are placed: over the ranks of a group, and each rank's over the groups."""
    if parallel.ep == 1:
        return None
    ranks = torch.arange(parallel.num_ranks).view(-1, parallel.ep)
    return DeviceMesh(device, ranks, mesh_dim_names=("groups", "ep"))


def _own_group(rows: Tensor) -> dist.ProcessGroup | None:
    """A group for each row of ranks; returns this rank's, None if it is in none."""
    own: Any = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    return own
