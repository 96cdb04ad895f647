# SPDX-License-Identifier: Apache-2.0
"""One rank of many, without the others and without memory: torch's fake process group and fake
tensors, with a ledger of the bytes that are alive.

Owns the measure: which storages exist at a time, which collectives run and with how many bytes, and
what each operation costs on a device of given figures. Knows no model. Fake tensors have shapes and
types but no content, so an 8B runs on a laptop; what a kernel takes for itself is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import (
    _clear_sharding_prop_cache,  # pyright: ignore[reportPrivateUsage]
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FORWARD, BACKWARD, ROOT_BACKWARD, UPDATE = "forward", "backward", "root backward", "update"
"""The phases of a step. Within each, memory is linear in the number of layers."""
_aten = torch.ops.aten
_EMBEDDING_BACKWARD = _aten.embedding_dense_backward.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device does at best: an upper bound of speed gives a lower bound of time."""

    tflops: float = 989.0
    """Dense bf16 matrix products; an H100 SXM by default."""
    hbm_tb_s: float = 3.35
    host_link_gb_s: float = 450.0
    """Between the devices of a host, each way: NVLink."""
    network_gb_s: float = 50.0
    """Between hosts, for each device: 400 Gbit/s."""
    devices_per_host: int = 8

    def link_bytes_s(self, num_ranks: int) -> float:
        """The slowest link in a ring of so many ranks."""
        gb_s = self.host_link_gb_s if num_ranks <= self.devices_per_host else self.network_gb_s
        return gb_s * 1e9


@dataclass(slots=True)
class Ledger:
    """What ran, and what was alive."""

    live_bytes: int = 0
    peaks: dict[str, int] = field(default_factory=dict[str, int])
    """Most bytes alive at a time, by phase."""
    phase: str = FORWARD
    wire_bytes: Counter[str] = field(default_factory=Counter[str])
    """Sent by this rank, by collective and type."""
    num_collectives: Counter[str] = field(default_factory=Counter[str])
    matmuls: Counter[str] = field(default_factory=Counter[str])
    """By operation and type of its first matrix."""
    flops: float = 0.0
    compute_s: float = 0.0
    """Each operation as long as its products or its bytes take, whichever is longer."""
    wire_s: float = 0.0

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())

    def add(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live_bytes)


@contextlib.contextmanager
def fake_process_group(num_ranks: int, rank: int = 0) -> Generator[None]:
    """This process as one rank; collectives return at once and move nothing.

    DTensor keeps results by mesh, and a mesh does not tell whose it is: a process that is one rank
    after another has to forget them."""
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


class MemoryLedger(TorchDispatchMode):
    """Counts while it is entered. Enter it inside `FakeTensorMode`."""

    def __init__(self, device: Device | None = None) -> None:
        cast(Any, super()).__init__()
        self.ledger = Ledger()
        self._device = device or Device()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False

    def __enter__(self) -> MemoryLedger:
        self._resize = torch.UntypedStorage.resize_
        resize, ledger = self._resize, self

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            """FSDP frees and gets back the storage of gathered weights so."""
            resize(storage, size)
            ledger.see_storage(storage)

        cast(Any, torch.UntypedStorage).resize_ = counted
        cast(Any, ShardingPropagator)._fake_mode_lock = _Pause(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        cast(Any, torch.UntypedStorage).resize_ = self._resize
        cast(Any, ShardingPropagator)._fake_mode_lock = contextlib.nullcontext()
        cast(Any, super()).__exit__(*error)

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def restart(self) -> None:
        """Count anew; what is alive stays."""
        self.ledger = Ledger(live_bytes=self.ledger.live_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what its local tensors do
        kwargs = kwargs or {}
        if func is _EMBEDDING_BACKWARD:
            self.ledger.phase = ROOT_BACKWARD
        out = func(*args, **kwargs)
        if self._is_paused:
            return out
        for tensor in _tensors(out):
            self.see_storage(tensor.untyped_storage())
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args)
        else:
            self._count_work(func, args, kwargs, out)
        return out

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.ledger.add(size - self._sizes.get(key, 0))
        self._sizes[key] = size

    def _gone(self, key: int) -> None:
        self._alive.pop(key)
        self.ledger.live_bytes -= self._sizes.pop(key)

    def _count_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        """A ring sends all but this rank's own share of the larger side."""
        found = _tensors(args)
        if not found:
            return
        name, num_ranks = func.overloadpacket.__name__.strip("_"), dist.get_world_size()
        largest = max(found, key=lambda tensor: tensor.nbytes)
        size = largest.nbytes * (num_ranks - 1) / num_ranks * (2 if "allreduce" in name else 1)
        key = f"{name} {str(largest.dtype).removeprefix('torch.')}"
        self.ledger.wire_bytes[key] += round(size)
        self.ledger.num_collectives[key] += 1
        self.ledger.wire_s += size / self._device.link_bytes_s(num_ranks)

    def _count_work(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        flops = _flops(func, args, kwargs, out)
        if flops:
            self.ledger.matmuls[f"{func.overloadpacket.__name__} {args[0].dtype}"] += 1
        self.ledger.flops += flops
        if func.is_view:
            return
        moved = sum(tensor.nbytes for tensor in _tensors((args, kwargs, out)))
        device = self._device
        self.ledger.compute_s += max(flops / device.tflops / 1e12, moved / device.hbm_tb_s / 1e12)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> float:
    """Of matrix products; of causal attention the half that is not masked."""
    packet = func.overloadpacket
    if packet is _aten._grouped_mm:  # each row of a meets one of the matrices b
        a, b = args[0], args[1]
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[-1]
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query = args[0]
        return 2.0 * query.numel() * query.shape[2]
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        query = args[1]
        return 5.0 * query.numel() * query.shape[2]  # five products, and two forward
    formula = cast(dict[Any, Callable[..., float]], flop_registry).get(packet)
    return 0.0 if formula is None else formula(*args, **kwargs, out_val=out)


class _Pause:
    """While DTensor asks for the shape of a result: that full tensor is never made. It enters this
    in place of its lock."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        self._ledger.pause(True)

    def __exit__(self, *error: object) -> None:
        self._ledger.pause(False)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
