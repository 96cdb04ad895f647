# SPDX-License-Identifier: Apache-2.0
"""Where each tensor of a Hugging Face folder is inside a loaded vLLM model: pure, without torch.

vLLM fuses q, k and v into one layer, and gate and up into another, and splits layers over the ranks
of tensor parallelism. Knows vLLM's layers by the names of their classes. A tensor that no rule
covers (fused experts, quantized weights) has no slice: a model with one is loaded from full files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A block of rows and columns of a tensor, and the row of the parameter where it begins. A
    tensor of one dimension has columns of size 1."""

    row: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    def is_whole(self, shape: Shape) -> bool:
        num_rows, num_columns = matrix(shape)
        return self.rows == (0, num_rows) and self.columns == (0, num_columns)


@dataclass(frozen=True)
class Place:
    module: Any
    parameter: str
    """Name of the parameter in the module."""
    slice: Slice


def matrix(shape: Shape) -> tuple[int, int]:
    """A tensor as rows and columns."""
    num_rows = shape[0] if shape else 1
    num_columns = 1
    for size in shape[1:]:
        num_columns *= size
    return num_rows, num_columns


def find_places(model: Any, shapes: dict[str, Shape]) -> dict[str, Place]:
    """The place of each tensor, by its name in the folder; raises ValueError if one has none."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        for name, parameter, part in _parts(path, module):
            if name in shapes:
                where = _slice(module, part, shapes[name], parameter)
                places.setdefault(name, Place(module, parameter, where))
    missing = sorted(set(shapes) - set(places))
    if missing:
        raise ValueError(f"no place in vLLM's model is known for {missing[:3]}")
    for name, place in places.items():
        _check(name, place, shapes[name])
    return places


def local_positions(
    where: Slice, shape: Shape, num_columns: int, positions: Any
) -> tuple[Any, Any]:
    """Which of these positions (flat, in the tensor) are in the slice, as a mask, and where they
    are in a parameter with rows of `num_columns`. For arrays of NumPy or torch."""
    row, column = positions // matrix(shape)[1], positions % matrix(shape)[1]
    is_here = (row >= where.rows[0]) & (row < where.rows[1])
    is_here &= (column >= where.columns[0]) & (column < where.columns[1])
    row, column = row[is_here] - where.rows[0] + where.row, column[is_here] - where.columns[0]
    return is_here, row * num_columns + column


def _parts(path: str, module: Any) -> Iterator[tuple[str, str, int]]:
    """Names of the tensors that a module holds, each with its parameter and number in a fusion."""
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    parent, _, last = path.rpartition(".")
    for number, part in enumerate(_fused(module, last)):
        name = ".".join(filter(None, (parent, part)))
        for parameter in parameters:
            yield f"{name}.{parameter}", parameter, number


def _fused(module: Any, last: str) -> Sequence[str]:
    kinds = _kinds(module)
    if "QKVParallelLinear" in kinds:
        return QKV
    if "MergedColumnParallelLinear" in kinds and last == "gate_up_proj":
        return GATE_UP
    return (last,)


def _kinds(module: Any) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def _slice(module: Any, part: int, shape: Shape, parameter: str) -> Slice:
    num_rows, num_columns = matrix(shape)
    whole = Slice(0, (0, num_rows), (0, num_columns))
    kinds = _kinds(module)
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if "QKVParallelLinear" in kinds:
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        widths = (module.head_size, module.head_size, module.v_head_size)
        counts = [number * width for number, width in zip(heads, widths)]  # noqa: B905 (Python 3.9)
        share = rank if part == 0 else rank // module.num_kv_head_replicas
        return _rows(sum(counts[:part]), share, counts[part], num_columns)
    if "MergedColumnParallelLinear" in kinds:
        counts = [total // size for total in module.output_sizes]
        return _rows(sum(counts[:part]), rank, counts[part], num_columns)
    if "VocabParallelEmbedding" in kinds:
        shard = module.shard_indices
        here = (shard.org_vocab_start_index, min(shard.org_vocab_end_index, num_rows))
        return Slice(0, here, (0, num_columns))
    if "ColumnParallelLinear" in kinds:
        return _rows(0, rank, num_rows // size, num_columns)
    if "RowParallelLinear" in kinds and parameter == "weight":
        width = num_columns // size
        return Slice(0, (0, num_rows), (rank * width, (rank + 1) * width))
    return whole


def _rows(row: int, share: int, count: int, num_columns: int) -> Slice:
    return Slice(row, (share * count, (share + 1) * count), (0, num_columns))


def _check(name: str, place: Place, shape: Shape) -> None:
    """A quantized or otherwise changed parameter has another shape; an emptied one is packed."""
    found = matrix(tuple(getattr(place.module, place.parameter).shape))
    if found[0] == 0:
        return
    where = place.slice
    num_rows, num_columns = where.rows[1] - where.rows[0], where.columns[1] - where.columns[0]
    is_inside = where.rows[1] <= matrix(shape)[0] and where.row + num_rows <= found[0]
    if not is_inside or num_columns != found[1]:
        raise ValueError(f"{name} of {shape} does not fit vLLM's parameter of {found}")
