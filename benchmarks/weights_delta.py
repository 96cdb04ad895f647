# SPDX-License-Identifier: Apache-2.0
"""How small and how fast is a delta between two consecutive versions of a real training?

Sizes on traces of SmolLM2-135M at two learning rates; speeds beside a one-thread copy of all its
tensors, with compiled loops and with NumPy alone. The traces come from `make setup-engine`, which
this calls when they are not there."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from scripts.make_trace import read_versions

from benchmarks.baselines import deltas
from benchmarks.cache import CACHE
from benchmarks.harness import MIN_PAIRS, ROOT, log_line, result
from penstock.weights.deltas.codec import apply_payload
from penstock.weights.deltas.delta import Tensor, read_delta, write_delta

Version = Mapping[str, NDArray[np.uint16]]
RATES = ("1e-6", "5e-6")
HEADLINE = "5e-6"
"""Its density is what gates are about; the other's is lower."""
ITEM_BYTES = 2
BASE, TARGET = "0" * 64, "1" * 64
PLAIN = "--plain"
"""Of the child that measures NumPy alone."""


def trace(rate: str) -> Path:
    return CACHE / "traces" / f"smollm2-lr{rate}"


def steps(rate: str, num: int) -> Iterator[tuple[Version, Version]]:
    return islice(pairwise(read_versions(trace(rate))), num)


# --- our side ---------------------------------------------------------------------------------


def encode(base: Version, new: Version, slow_s: float = 0.0) -> bytes:
    out = io.BytesIO()
    write_delta(out, BASE, TARGET, _tensors(base, new))
    time.sleep(slow_s)
    return out.getvalue()


def _tensors(base: Version, new: Version) -> Iterable[Tensor]:
    return ((name, ITEM_BYTES, _bytes(base[name]), _bytes(bits)) for name, bits in new.items())


def apply(delta: bytes, target: Version, slow_s: float = 0.0) -> None:
    """In place."""
    sizes = {name: bits.nbytes for name, bits in target.items()}
    _, frames = read_delta(io.BytesIO(delta), sizes)
    for frame in frames:
        views = [_bytes(target[name]) for name in frame.names]
        apply_payload(frame.payload, views, frame.item_bytes)
    time.sleep(slow_s)


def _bytes(bits: NDArray[np.uint16]) -> memoryview:
    return bits.reshape(-1).view(np.uint8).data


# --- sizes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one step, in bytes."""

    density: float
    changed: int
    ours: int
    entropy: float
    index_and_value: int
    xor_zstd: int
    full: int


def sizes_of(base: Version, new: Version) -> Sizes:
    gaps, differences = deltas.changes(base, new)
    num = sum(bits.size for bits in new.values())
    delta = encode(base, new)
    made = {name: bits.copy() for name, bits in base.items()}
    apply(delta, made)
    if not all(np.array_equal(made[name], bits) for name, bits in new.items()):
        raise RuntimeError("the delta does not give the new version back")
    return Sizes(
        density=gaps.size / num,
        changed=gaps.size,
        ours=len(delta),
        entropy=deltas.entropy_bytes(gaps, differences),
        index_and_value=deltas.index_and_value_bytes(gaps.size),
        xor_zstd=deltas.xor_zstd_bytes(base, new),
        full=ITEM_BYTES * num,
    )


def log_sizes(rate: str, found: list[Sizes]) -> None:
    log_line(f"lr {rate}: bytes per changed element")
    log_line(" step  density     ours  entropy  index+value  xor+zstd     full")
    for number, one in enumerate(found, 1):
        each = (one.ours, one.entropy, one.index_and_value, one.xor_zstd, one.full)
        a, b, c, d, e = (value / one.changed for value in each)
        log_line(f"{number:5} {one.density:8.3%} {a:8.3f} {b:8.3f} {c:12.3f} {d:9.3f} {e:8.1f}")


# --- speed ------------------------------------------------------------------------------------


def speeds(base: Version, new: Version, pairs: int, slow_s: float = 0.0) -> dict[str, float]:
    """Each against a copy made just before it; medians over so many pairs."""
    target = {name: bits.copy() for name, bits in base.items()}
    delta = encode(base, new)  # compiles, too
    apply(delta, target)
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(base, new, slow_s),
        "apply": lambda: apply(delta, target, slow_s),
        "hash": lambda: [blake3(_bytes(bits)).digest() for bits in new.values()],
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(pairs):
        for name, work in works.items():
            deltas.copy(target, base)
            copied_s = _timed(lambda: deltas.copy(target, base))
            found[name].append(copied_s / _timed(work))
    return {f"{name}_vs_memcpy": median(ratios) for name, ratios in found.items()}


def _timed(work: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at


def plain_speeds(pairs: int) -> dict[str, float]:
    """The same in a process that has no compiler."""
    words = [sys.executable, "-m", "benchmarks.weights_delta", PLAIN, "--pairs", str(pairs)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {f"{name}_numpy": value for name, value in json.loads(done.stdout).items()}


# --- all of it --------------------------------------------------------------------------------


def figures(found: list[Sizes]) -> dict[str, float]:
    return {
        "density": mean(one.density for one in found),
        "bytes_per_change": mean(one.ours / one.changed for one in found),
        "ratio_to_entropy": mean(one.ours / one.entropy for one in found),
        "ratio_to_astraflow": mean(one.index_and_value / one.ours for one in found),
        "ratio_to_xor_zstd": mean(one.xor_zstd / one.ours for one in found),
        "ratio_to_full": mean(one.full / one.ours for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and pairs, for a look")
    parser.add_argument(
        "--slow-ms", type=float, default=0.0, help="our side sleeps so long per call"
    )
    parser.add_argument("--pairs", type=int, help="of speeds; 10, or 4 with --quick")
    parser.add_argument(PLAIN, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pairs = options.pairs or (4 if options.quick else MIN_PAIRS)
    if options.plain:
        sys.modules["numba"] = None  # type: ignore[assignment]
        [(base, new)] = steps(HEADLINE, 1)
        return result(**speeds(base, new, pairs))
    subprocess.run([sys.executable, ROOT / "scripts" / "setup_engine.py"], check=True)
    by_rate: dict[str, dict[str, float]] = {}
    for rate in RATES:
        found = [sizes_of(base, new) for base, new in steps(rate, 3 if options.quick else 10)]
        log_sizes(rate, found)
        by_rate[rate] = figures(found)
    [(base, new)] = steps(HEADLINE, 1)
    fast = speeds(base, new, pairs, options.slow_ms / 1e3)
    plain = plain_speeds(pairs)
    low = {f"{name}_lr{RATES[0]}": value for name, value in by_rate[RATES[0]].items()}
    result(**by_rate[HEADLINE], **fast, **plain, **low)


if __name__ == "__main__":
    main()
