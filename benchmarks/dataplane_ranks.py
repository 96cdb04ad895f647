# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Processes of `trainer_dataplane`: a partition that serves rows, and ranks that train on them by
either design, step after step, on the same rows.

Ours: each rank draws its own rows (`penstock.trainer.ranks.row_fetch`). The other: the first rank
draws all rows and hands every rank its share. Both then take one and the same step.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.stages import ParallelConfig
from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.trainer.ranks.group import RankGroup, init_process_group, make_rank_group
from penstock.trainer.ranks.row_fetch import fetch_rows, split_rows
from penstock.trainer.ranks.supervisor import LOOPBACK, RankEnv
from penstock.types import (
    GroupId,
    Manifest,
    OutcomeKind,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SealedGroup,
)

_ASK = struct.Struct("<qq")
"""Row of the run, and its size in bytes."""
_WIDTH = 8
_BUCKETS = 4096
_CHUNK = 65536
_SHIFTS = 65536
OUT_OF_MEMORY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One measured size."""

    num_ranks: int
    num_rows: int
    row_bytes: int
    steps: int
    partitions: tuple[str, ...]
    """Sockets."""
    designs: tuple[str, ...] = ("ours", "single")
    cap_bytes: int = 0
    """Memory each rank may take on top of what it starts with; 0 is no cap."""


# --- a partition --------------------------------------------------------------------------------


def serve(path: str, largest_bytes: int) -> None:
    """Serve rows of random bytes for ever; a row is a slice, so nothing is kept per row."""
    content = np.random.default_rng(0).bytes(largest_bytes + _SHIFTS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, content), daemon=True).start()


def _answer(connection: socket.socket, content: bytes) -> None:
    view = memoryview(content)
    with connection, suppress(ConnectionError):  # a rank that ran out of memory hangs up
        while len(asked := connection.recv(_ASK.size, socket.MSG_WAITALL)) == _ASK.size:
            row, size = _ASK.unpack(asked)
            shift = row * 4 % _SHIFTS
            connection.sendall(view[shift : shift + size])


class Partitions:
    """The rows of a batch, spread over partitions; counts what this process is given."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._connections: list[socket.socket] = []
        for path in world.partitions:
            self._connections.append(socket.socket(socket.AF_UNIX))
            self._connections[-1].connect(path)
        self.num_bytes = 0

    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer:
        chosen = range(self._world.num_rows) if indexes is None else indexes
        return RowsAnswer(
            rows=tuple(
                RowPayload(row_id=_row_id(row), payload=self._fetch(seq, row)) for row in chosen
            )
        )

    def _fetch(self, seq: int, row: int) -> bytes:
        connection = self._connections[row % len(self._connections)]
        size = self._world.row_bytes
        connection.sendall(_ASK.pack(seq * self._world.num_rows + row, size))
        content = connection.recv(size, socket.MSG_WAITALL)
        assert len(content) == size, "the partition hung up"
        self.num_bytes += size
        return content


def _row_id(row: int) -> RowId:
    return RowId(f"p0-{row}.0.1")


def _manifest(world: World, seq: int) -> Manifest:
    summaries = tuple(
        RowSummary(
            row_id=_row_id(row),
            digest="",
            reward=0.0,
            outcome=OutcomeKind.COMPLETED,
            sampled={},
            versions={},
        )
        for row in range(world.num_rows)
    )
    group = SealedGroup(group_id=GroupId("p0-0"), task_key="", rows=summaries)
    return Manifest(consumer=PolicyName("policy"), seq=seq, trains_from=seq, groups=(group,))


# --- the two designs ----------------------------------------------------------------------------


class Ours:
    def __init__(self, world: World, ranks: RankGroup) -> None:
        self._world, self._ranks = world, ranks
        self._partitions = Partitions(world)

    @property
    def through_bytes(self) -> int:
        return self._partitions.num_bytes

    def rows(self, seq: int) -> list[bytes]:
        drawn = fetch_rows(self._partitions, _manifest(self._world, seq), self._ranks)
        return [row.payload for row in drawn if row.payload is not None]


class SingleController:
    def __init__(self, world: World, ranks: RankGroup) -> None:
        self._world, self._ranks = world, ranks
        self._partitions = Partitions(world)
        self._passed_bytes = 0

    @property
    def through_bytes(self) -> int:
        return self._partitions.num_bytes + self._passed_bytes

    def rows(self, seq: int) -> list[bytes]:
        if not self._ranks.position.is_rank0:
            return self._receive()
        answer = self._partitions.rows(PolicyName("policy"), seq)
        rows = [row.payload or b"" for row in answer.rows]
        for rank in range(1, self._world.num_ranks):
            share = bytearray().join(rows[row] for row in self._share(rank))
            dist.send(torch.frombuffer(share, dtype=torch.uint8), dst=rank)
            self._passed_bytes += len(share)
        return [rows[row] for row in self._share(0)]

    def _share(self, rank: int) -> list[int]:
        """As our design shares them: the losses of both are compared bit for bit."""
        return split_rows(_manifest(self._world, 0), self._world.num_ranks, 1)[rank]

    def _receive(self) -> list[bytes]:
        size = self._world.row_bytes
        num_rows = len(self._share(self._ranks.position.rank))
        content = torch.empty(num_rows * size, dtype=torch.uint8)
        dist.recv(content, src=0)
        self._passed_bytes += content.numel()
        return [part.numpy().tobytes() for part in content.split(size)]


class TinyLearner:
    """Just enough of a step that wrong rows, or rows on the wrong rank, change the loss."""

    def __init__(self, ranks: RankGroup) -> None:
        torch.manual_seed(0)
        self._ranks = ranks
        self._weights = torch.randn(_BUCKETS, _WIDTH, requires_grad=True)

    def step(self, rows: Sequence[bytes]) -> float:
        loss = torch.stack([self._loss(row) for row in rows]).sum()
        loss.backward()
        grad = self._weights.grad
        assert grad is not None
        dist.all_reduce(grad)
        with torch.no_grad():  # torch.optim loads the compiler, in every rank anew
            self._weights -= 0.1 * grad
        self._weights.grad = None
        total, num_rows = self._ranks.sum_over_ranks(np.array([loss.item(), len(rows)]))
        return float(total / num_rows)

    def _loss(self, row: bytes) -> Tensor:
        ids = np.frombuffer(row, np.uint32)
        counts = np.zeros(_BUCKETS, np.int64)
        for first in range(0, ids.size, _CHUNK):  # the rows are what memory is for, not their ids
            counts += np.bincount(ids[first : first + _CHUNK] % _BUCKETS, minlength=_BUCKETS)
        share = torch.from_numpy(counts).float() / ids.size
        return (share @ self._weights).square().sum()


# --- a rank -------------------------------------------------------------------------------------


def run(world: World, folder: Path) -> list[dict[str, dict[str, list[float]]]] | None:
    """Fork the ranks; what each found, or None when one of them had not memory enough."""
    listener = socket.create_server((LOOPBACK, 0), backlog=4 * world.num_ranks)
    children: list[int] = []
    for rank in range(world.num_ranks):
        rank_env = RankEnv(
            rank=rank,
            num_ranks=world.num_ranks,
            local_rank=rank,
            host=LOOPBACK,
            port=listener.getsockname()[1],
            listener=listener.fileno() if rank == 0 else None,
        )
        child = os.fork()
        if child == 0:
            _run_rank(world, rank_env, folder)
        children.append(child)
    listener.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if OUT_OF_MEMORY in codes:
        return None
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}; see their messages above")
    return [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(world.num_ranks)]


def _run_rank(world: World, rank_env: RankEnv, folder: Path) -> None:
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        init_process_group(rank_env, timeout_s=120.0)
        ranks = make_rank_group(ParallelConfig(dp=world.num_ranks))
        assert ranks is not None
        if world.cap_bytes:
            _cap_memory(world.cap_bytes)
        (folder / f"rank.{rank_env.rank}").write_text(json.dumps(_measure(world, ranks)))
        code = 0
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        code = OUT_OF_MEMORY if world.cap_bytes and (is_memory or "peer" in str(error)) else 1
        if code == 1:
            print(f"rank {rank_env.rank}: {error!r}", flush=True)
    finally:
        os._exit(code)


def _cap_memory(more_bytes: int) -> None:
    status = Path("/proc/self/status").read_text()
    used_kb = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    limit = int(used_kb) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _measure(world: World, ranks: RankGroup) -> dict[str, dict[str, list[float]]]:
    makers = {"ours": Ours, "single": SingleController}
    sides = {name: (makers[name](world, ranks), TinyLearner(ranks)) for name in world.designs}
    found: dict[str, dict[str, list[float]]] = {
        name: {"stall_s": [], "losses": [], "through_bytes": []} for name in sides
    }
    for seq in range(world.steps):
        order = list(sides.items())
        for name, (design, learner) in order if seq % 2 else reversed(order):
            dist.barrier()
            began_at = time.perf_counter()
            rows = design.rows(seq)
            dist.barrier()
            found[name]["stall_s"].append(time.perf_counter() - began_at)
            found[name]["losses"].append(learner.step(rows))
            found[name]["through_bytes"] = [float(design.through_bytes)]
            del rows
    return found
