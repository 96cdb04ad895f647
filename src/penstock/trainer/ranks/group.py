# SPDX-License-Identifier: Apache-2.0
"""What a rank of a trainer says to the others, and its twin that is alone.

Owns the collectives of a step: sums, maxima, a budget's pressures, rows for the ranks of one part,
the first rank's word. Each has one form: tensors of numbers or bytes, never objects. What is summed
is summed in the order of parts on every rank, so all ranks hold the same bits.

P = data-parallel parts.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.trainer.ranks.supervisor import Membership
from penstock.trainer.ranks.topology import Parallel, Place

Floats = npt.NDArray[np.float64]

TIMEOUT_S = 3600.0
"""A rank that died is noticed by whoever started it; this is for one that hangs."""


class Sums(Protocol):
    """What a learner asks of the parts of its batch on other ranks."""

    def sum_over_ranks(self, values: Floats) -> Floats:
        """Element by element, each part counted once."""
        ...

    def most_over_ranks(self, number: int) -> int:
        """The largest: every rank runs as many passes as the one with the most micro-batches."""
        ...

    def gather_pressures(self, pressures: Tensor) -> Tensor:
        """The 1-D tensors of all parts, of any lengths, one after another."""
        ...


class Word(Protocol):
    """What makes many ranks act as one."""

    def first_says(self, numbers: Sequence[int]) -> list[int]:
        """The first rank's numbers, on every rank; all give as many."""
        ...

    def to_neighbours(self, payload: bytes) -> bytes:
        """What the fetching rank of this part gave; what its neighbours give is not looked at."""
        ...

    def barrier(self) -> None: ...


class Team(Sums, Word, Protocol):
    """A gang, or a process alone."""

    @property
    def place(self) -> Place: ...


class Alone:
    """One process that is the whole gang."""

    place = Place(rank=0, parallel=Parallel())

    def sum_over_ranks(self, values: Floats) -> Floats:
        return values

    def most_over_ranks(self, number: int) -> int:
        return number

    def gather_pressures(self, pressures: Tensor) -> Tensor:
        return pressures

    def first_says(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def to_neighbours(self, payload: bytes) -> bytes:
        return payload

    def barrier(self) -> None:
        return


class _World:
    """What is said to every rank there is: also to those that sit a stage out."""

    def first_says(self, numbers: Sequence[int]) -> list[int]:
        said = torch.tensor(list(numbers), dtype=torch.int64)
        dist.broadcast(said, src=0)
        return said.tolist()

    def barrier(self) -> None:
        dist.barrier()


class Gang(_World):
    """This rank among the ranks of one stage."""

    def __init__(self, mesh: DeviceMesh, parallel: Parallel) -> None:
        self.mesh = mesh
        self.place = Place(rank=dist.get_rank(), parallel=parallel)
        self._parts = mesh.get_group("dp")
        self._neighbours = mesh.get_group("tp")

    def sum_over_ranks(self, values: Floats) -> Floats:
        gathered = self._gather(torch.from_numpy(np.ascontiguousarray(values, np.float64)))
        return torch.stack(gathered).sum(dim=0).numpy()

    def most_over_ranks(self, number: int) -> int:
        return max(int(found) for found in self._gather(torch.tensor(number)))

    def gather_pressures(self, pressures: Tensor) -> Tensor:
        lengths = [int(found) for found in self._gather(torch.tensor(pressures.numel()))]
        padded = torch.zeros(max(lengths), dtype=pressures.dtype)
        padded[: pressures.numel()] = pressures.detach().cpu()
        found = self._gather(padded)
        joined = torch.cat([part[:length] for part, length in zip(found, lengths, strict=True)])
        return joined.to(pressures.device)

    def to_neighbours(self, payload: bytes) -> bytes:
        if self.place.parallel.tp == 1:
            return payload
        source = self.place.parallel.ranks_of(self.place.part)[0]
        length = torch.tensor(len(payload))
        dist.broadcast(length, src=source, group=self._neighbours)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.place.is_fetching:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(content, src=source, group=self._neighbours)
        return content.numpy().tobytes()

    def first_gives(self, tensor: Tensor) -> None:
        """What the first rank has in it, on every rank: inside its part, then from part to part."""
        place = self.place
        if place.part == 0:
            dist.broadcast(tensor, src=0, group=self._neighbours)
        dist.broadcast(tensor, src=place.rank % place.parallel.tp, group=self._parts)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The parts' tensors in the order of parts."""
        found = [torch.empty_like(tensor) for _ in range(self.place.parallel.dp)]
        dist.all_gather(found, tensor, group=self._parts)
        return found


class Company(_World):
    """All ranks of a trainer whose stages are spread differently, while rows lie as one of them
    needs. Those that sit it out hold no row, add nothing, and hear what the others find."""

    def __init__(self, gangs: Mapping[Parallel, Gang | Alone | None], parallel: Parallel) -> None:
        """gangs: those of all stages; None where this rank sits out."""
        self.gangs = gangs
        self.place = Place(rank=dist.get_rank(), parallel=parallel)
        self._gang = gangs[parallel]

    def at(self, parallel: Parallel) -> Company:
        """The same ranks, while rows lie as another stage needs them."""
        return Company(self.gangs, parallel)

    def sum_over_ranks(self, values: Floats) -> Floats:
        found = self._gang.sum_over_ranks(values) if self._gang else values
        own = np.array(found, np.float64, order="C")
        return self._told(torch.from_numpy(own)).numpy()

    def most_over_ranks(self, number: int) -> int:
        return self.first_says([self._gang.most_over_ranks(number) if self._gang else 0])[0]

    def gather_pressures(self, pressures: Tensor) -> Tensor:
        own = self._gang.gather_pressures(pressures) if self._gang else pressures
        [length] = self.first_says([own.numel()])
        heard = own.cpu() if self._gang else own.new_empty(length, device="cpu")
        return self._told(heard).to(pressures.device)

    def to_neighbours(self, payload: bytes) -> bytes:
        return self._gang.to_neighbours(payload) if self._gang else payload

    def _told(self, tensor: Tensor) -> Tensor:
        """What the first rank has, who is in every gang."""
        dist.broadcast(tensor, src=0)
        return tensor


def join(member: Membership, *, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> None:
    """Meet the other ranks at the first one's store; ends when all are there."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        member.host,
        member.port,
        member.num_ranks,
        is_master=member.rank == 0,
        timeout=timeout,
        master_listen_fd=member.listener,
    )
    dist.init_process_group(
        "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl",
        store=store,
        rank=member.rank,
        world_size=member.num_ranks,
        timeout=timeout,
    )


def form_all(parallels: Sequence[Parallel], *, device: str = "cpu") -> Team:
    """The gang of stages that are all spread the same way, over every rank there is; else the
    company of their gangs, at the first of them."""
    gangs = {parallel: _form_one(parallel, device) for parallel in dict.fromkeys(parallels)}
    only = gangs[parallels[0]] if len(gangs) == 1 else None
    if only is not None and parallels[0].num_ranks == dist.get_world_size():
        return only
    return Company(gangs, parallels[0])


def _form_one(parallel: Parallel, device: str) -> Gang | Alone | None:
    if parallel.num_ranks > 1:
        return form(parallel, device=device)
    return Alone() if dist.get_rank() == 0 else None


def form(parallel: Parallel, *, device: str = "cpu") -> Gang | None:
    """This rank's place in a stage of this size; None where it sits the stage out.

    Every rank of the world calls it, in the same order for the same stages.
    """
    num_ranks = dist.get_world_size()
    if parallel.num_ranks > num_ranks:
        raise ValueError(
            f"parallel dp {parallel.dp} × tp {parallel.tp} needs {parallel.num_ranks} ranks, and "
            f"this trainer has {num_ranks}; lower dp or tp, or start more ranks"
        )
    ranks = torch.arange(parallel.num_ranks).view(parallel.dp, parallel.tp)
    mesh = DeviceMesh(device, ranks, mesh_dim_names=("dp", "tp"))
    return None if mesh.get_coordinate() is None else Gang(mesh, parallel)
