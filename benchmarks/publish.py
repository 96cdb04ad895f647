# SPDX-License-Identifier: Apache-2.0
"""Publishing off the critical path: a model on four gloo ranks publishes versions in bfloat16, and
a node on the same machine makes them live.

How long a step is blocked, over a bare copy of the rank's share; passes over a version's bytes at
both ends (`/proc/*/io`, and files that are mapped); the time from the step to a version that is
live, and the processor time of all processes for it, which says more on a busy machine; what a
checkpoint writes, and how long a start takes to verify it. With `--before PATH`, a checkout of
another commit, the same is measured there in turn.

The folder should be on a fast disk, or in /dev/shm: syncing costs the same in any design.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, log_line, result, scratch

NUM_RANKS = 4
NUM_VERSIONS = 6
NUM_UNCOUNTED = 2
"""The first versions: one has no version before it, one finds memory that was never used."""
MILLIONS, QUICK_MILLIONS = 1000, 100
BFLOAT16_BYTES = 2


def measure(
    side: str, folder: Path, millions: int, num_versions: int, checkout: Path
) -> dict[str, float]:
    """All processes once, with the sources of this checkout."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=env)

    ranks = [
        start("publish_ranks", side, *map(str, (folder, rank, NUM_RANKS, millions, num_versions)))
        for rank in range(NUM_RANKS)
    ]
    with ExitStack() as stack:
        others = [
            start("publish_node", "serve", str(folder)),
            start("publish_node", "pull", str(folder), str(num_versions)),
        ]
        for child in (*ranks, *others):
            stack.callback(_end, child)
        _await(ranks, others)
    return _figures(folder, range(NUM_UNCOUNTED, num_versions))


def _await(ranks: Sequence[subprocess.Popen[bytes]], others: Sequence[Any]) -> None:
    """Until all ranks have ended. If any process fails, the others would wait for it forever."""
    while any(child.poll() is None for child in ranks):
        failed = [child for child in (*ranks, *others) if child.poll()]
        if failed:
            raise RuntimeError(f"{failed[0].args} ended with an error; see its messages above")
        time.sleep(0.1)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    child.wait()


def _figures(folder: Path, versions: range) -> dict[str, float]:
    """Medians over these versions; of ranks, the slowest."""
    ranks: list[dict[str, Any]] = [
        json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)
    ]
    num_bytes = ranks[0]["elements"][0] * BFLOAT16_BYTES
    live = [json.loads((folder / f"live-{number}.json").read_text()) for number in versions]
    started = [json.loads((folder / f"started-{number}.json").read_text()) for number in versions]
    blocked_s = [max(rank["blocked_s"][number] for rank in ranks) for number in versions]
    bare_s = [max(rank["bare_s"][number] for rank in ranks) for number in versions]
    passed = [sum(rank["passed"][number] for rank in ranks) for number in versions]
    cpu_s = [
        found["cpu_s"] + sum(rank["cpu_s"][number] for rank in ranks)
        for number, found in zip(versions, live, strict=True)
    ]
    since = list(zip(live, started, strict=True))
    checkpoint = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    return {
        "gb": num_bytes / 1e9,
        "resident_gb": sum(rank["resident_bytes"][0] for rank in ranks) / 1e9,
        "blocked_s": median(blocked_s),
        "bare_s": median(bare_s),
        "blocked_ratio": median(b / c for b, c in zip(blocked_s, bare_s, strict=True)),
        "trainer_passes": max(passed) / num_bytes,
        "node_passes": max(found["passed"] for found in live) / num_bytes,
        "stored_s": median(found["stored_at"] - at for found, at in since),
        "live_s": median(found["at"] - at for found, at in since),
        "live_cpu_s": median(cpu_s),
        "checkpoint_gb": sum(path.stat().st_size for path in checkpoint) / 1e9,
        "checkpoint_blocked_s": max(rank["checkpoint_blocked_s"][0] for rank in ranks),
        "checkpoint_s": max(rank["checkpoint_s"][0] for rank in ranks),
        "restart_s": ranks[0]["restart_s"][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--folder", type=Path, help="where versions are written")
    parser.add_argument("--millions", type=int, help="parameters, instead of 1000 (quick: 100)")
    parser.add_argument(
        "--versions",
        type=int,
        default=NUM_VERSIONS,
        choices=range(NUM_UNCOUNTED + 1, 100),
        metavar="NUM",
        help=f"published in turn, of which the first {NUM_UNCOUNTED} are not counted",
    )
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    args = parser.parse_args()
    millions = args.millions or (QUICK_MILLIONS if args.quick else MILLIONS)
    found: dict[str, dict[str, float]] = {}
    sides = {"ours": ROOT, "before": args.before}
    for name, checkout in sides.items():
        if checkout is not None:
            with scratch(args.folder) as folder:
                found[name] = measure(name, folder, millions, args.versions, checkout.resolve())
            log_line(f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[name].items()))
    ours, before = found["ours"], found.get("before", {})
    result(
        millions=millions,
        **ours,
        **{f"before_{key}": value for key, value in before.items()},
        **{
            f"{key}_speedup": before[f"{key}_s"] / ours[f"{key}_s"]
            for key in ("live", "live_cpu")
            if before
        },
    )


if __name__ == "__main__":
    main()
