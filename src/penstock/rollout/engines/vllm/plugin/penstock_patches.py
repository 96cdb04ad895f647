# SPDX-License-Identifier: Apache-2.0
"""Writes a patch into the model of a vLLM worker: prepared while it generates, applied while it is
paused, verified after it has resumed.

On a GPU the changed elements are written in place. vLLM's CPU build keeps linear layers only as
packed copies behind handles: new ones are made from the files of the new version in a thread beside
the running engine, and exchanged in the pause, so the packed layers are in memory twice meanwhile.

Imported by `penstock_worker` in vLLM's environment, where penstock is not installed.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock_slices import Place, find_places, local_positions, matrix

POSITIONS, VALUES, DIGESTS = "positions:", "values:", "digests"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Patch:
    """One patch. `prepare` returns at once and runs beside the worker until `is_busy` is False;
    then `apply` in the pause, and `verify` after it."""

    def __init__(self, model: Any, path: Path, files: Iterable[Path]) -> None:
        self.model = model
        self._path = path
        self._files = list(files)
        self._changes: list[Callable[[], object]] = []
        self._replaced: list[object] = []
        """Packed copies of the version before; freed after the pause."""
        self._places: dict[str, Place] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self.digests: dict[str, tuple[str, str]] = {}
        self.num_bytes = 0
        """Read to prepare it."""
        self.error = ""
        """Why the patch cannot be used."""
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self) -> None:
        """Read and convert everything, in a thread; changes nothing."""

        def run() -> None:
            try:
                with importlib.import_module("torch").no_grad():
                    self._prepare()
            except Exception as error:  # the worker reports it when it is asked
                self.error = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="penstock-patch", daemon=True)
        self._thread.start()

    def apply(self) -> None:
        """vLLM must be paused."""
        self._replaced += [change() for change in self._changes]
        self._changes.clear()

    def verify(self, name: str) -> bool:
        """Whether a loaded tensor has the bits of its version. Not in a thread: products with
        packed weights share one scratch memory per process."""
        self._replaced.clear()
        torch = importlib.import_module("torch")
        place, (dtype, digest) = self._places[name], self.digests[name]
        for module in self.model.modules():
            if hasattr(module, "cpu_linear") and _is_same(place, module, "weight"):
                weight = module.weight.data
                if weight.numel() and not _has_packed(module.cpu_linear, weight):
                    return False
        parameter = getattr(place.module, place.parameter).data
        if not parameter.numel():
            return self._is_packed_right(name, parameter.dtype)
        loaded = _block(parameter, place).to("cpu", getattr(torch, DTYPES[dtype])).contiguous()
        if place.slice.is_whole(self._shapes[name]):
            raw = loaded.view(-1).view(torch.uint8).numpy().tobytes()
            return importlib.import_module("blake3").blake3(raw).hexdigest() == digest
        return torch.equal(loaded, self._read_block(name))

    def _prepare(self) -> None:
        open_file = importlib.import_module("safetensors").safe_open
        for path in self._files:
            with open_file(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file itself is not a mapping)
                    self._file_of[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        self._places = find_places(self.model, self._shapes)
        packed: dict[int, Any] = {}
        with open_file(self._path, framework="pt") as file:
            self.digests = json.loads(file.metadata()[DIGESTS])
            self.num_bytes += self._path.stat().st_size
            keys = set(file.keys())
            for key in sorted(keys):
                if not key.startswith(VALUES):
                    continue
                name = key.removeprefix(VALUES)
                place = self._places[name]
                if hasattr(place.module, "cpu_linear"):
                    packed[id(place.module)] = place.module
                    continue
                positions = file.get_tensor(POSITIONS + name) if POSITIONS + name in keys else None
                self._write_in_place(name, positions, file.get_tensor(key))
        self._pack(packed)

    def _write_in_place(self, name: str, positions: Any, values: Any) -> None:
        place, shape = self._places[name], self._shapes[name]
        target = getattr(place.module, place.parameter).data
        if positions is None:
            block = _block(target, place)
            rows, columns = slice(*place.slice.rows), slice(*place.slice.columns)
            part = values.reshape(matrix(shape))[rows, columns].to(target.device, target.dtype)
            self._changes.append(lambda: block.copy_(part))
            return
        torch = importlib.import_module("torch")
        width = matrix(tuple(target.shape))[1]
        is_here, here = local_positions(place.slice, shape, width, positions.to(torch.int64))
        new = values[is_here].to(target.device, target.dtype)
        flat, here = target.view(-1), here.to(target.device)
        self._changes.append(lambda: flat.index_copy_(0, here, new))

    def _pack(self, modules: dict[int, Any]) -> None:
        """Make new packed copies of layers from the files of the new version."""
        tied: dict[int, Any] = {
            id(module): module
            for module in self.model.modules()
            if hasattr(module, "cpu_linear")
            and any(_is_same_parameter(module, other) for other in modules.values())
        }
        made: dict[int, Any] = {}
        for module in {**modules, **tied}.values():
            self._changes.append(self._packed(module, made))

    def _packed(self, module: Any, made: dict[int, Any]) -> Callable[[], object]:
        torch = importlib.import_module("torch")
        pack = importlib.import_module("vllm.model_executor.layers.utils")
        is_kept = module.weight.numel() > 0
        standin = torch.nn.Module()
        weight = made.get(id(module.weight)) if is_kept else None
        if weight is None:
            weight = self._new_parameter(module, "weight")
        made[id(module.weight)] = weight
        standin.weight = torch.nn.Parameter(weight, requires_grad=False)
        bias = getattr(module, "bias", None)
        if bias is not None:
            standin.bias = torch.nn.Parameter(self._new_parameter(module, "bias"), False)
        pack.dispatch_cpu_unquantized_gemm(standin, remove_weight=False)

        def exchange() -> object:
            before = module.cpu_linear, module.weight.data
            module.cpu_linear = standin.cpu_linear
            if is_kept:
                module.weight.data = weight
            if bias is not None:
                bias.data = standin.bias.data
            return before

        if not is_kept:
            del standin.weight
        return exchange

    def _new_parameter(self, module: Any, parameter: str) -> Any:
        """A parameter of the new version, from the files."""
        torch = importlib.import_module("torch")
        parts = {
            name: place
            for name, place in self._places.items()
            if place.parameter == parameter and _is_same(place, module, parameter)
        }
        old = getattr(module, parameter)
        blocks = {name: self._read_block(name) for name in parts}
        if not blocks:
            raise ValueError(f"no tensor of the files belongs to {type(module).__name__}")
        num_rows = max(p.slice.row + len(blocks[name]) for name, p in parts.items())
        shape = old.shape if old.numel() else (num_rows, next(iter(blocks.values())).shape[1])
        made = torch.zeros(shape, dtype=old.dtype)
        matrix_view = made.view(matrix(tuple(shape)))
        for name, place in parts.items():
            rows = slice(place.slice.row, place.slice.row + len(blocks[name]))
            matrix_view[rows] = blocks[name].to(old.dtype)
        return made

    def _read_block(self, name: str) -> Any:
        """The part of a tensor that this rank has, from the files."""
        where, shape = self._places[name].slice, self._shapes[name]
        open_file = importlib.import_module("safetensors").safe_open
        with open_file(self._file_of[name], framework="pt") as file:
            tensor = file.get_tensor(name).reshape(matrix(shape))
        block = tensor[slice(*where.rows), slice(*where.columns)]
        self.num_bytes += block.numel() * block.element_size()
        return block

    def _is_packed_right(self, name: str, dtype: Any) -> bool:
        """Compares a layer that is only packed with the verified file."""
        place, expected = self._places[name], self._read_block(name).to(dtype)
        return _has_packed(place.module.cpu_linear, expected, place.slice.row)


def _is_same(place: Place, module: Any, parameter: str) -> bool:
    if place.module is module:
        return True
    is_tied = getattr(place.module, parameter, None) is getattr(module, parameter)
    return is_tied and getattr(module, parameter).numel() > 0


def _is_same_parameter(module: Any, other: Any) -> bool:
    """Tied layers: they share a parameter that is not emptied."""
    return module.weight is other.weight and module.weight.numel() > 0


def _block(target: Any, place: Place) -> Any:
    where = place.slice
    num_rows = where.rows[1] - where.rows[0]
    return target.view(matrix(tuple(target.shape)))[where.row : where.row + num_rows]


def _has_packed(linear: Any, weight: Any, row: int = 0) -> bool:
    """Whether a packed copy has these weights, from a row on: what it makes of unit vectors. Bit
    for bit, except for numbers that a product may turn into zero: -0, and denormal ones."""
    torch = importlib.import_module("torch")
    units = torch.eye(weight.shape[1], dtype=weight.dtype)
    found = linear(units, weight, None).t()[row : row + len(weight)]
    tiny = torch.finfo(weight.dtype).tiny
    return torch.equal(*(torch.where(one.abs() < tiny, 0, one) for one in (found, weight)))
