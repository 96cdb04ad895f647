# SPDX-License-Identifier: Apache-2.0
"""Plant each bug of tests/mutants/mutants.toml in a copy of src and see its named tests fail.

Prints one line per mutant and, last, `N of N caught`. Exits with 1 when a mutant survives, does
not apply any more, or its tests do not pass without it. Changes nothing in the working tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutants" / "mutants.toml"
LIMIT_S = 300
TEST_S = 60
SIM_SEEDS = "20"
"""Of simulated tests: enough to meet a planted bug."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest; any other means that the tests did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    file: str
    """Below src/penstock."""
    old: str
    """Stands exactly once in the file; a first line break is only there for the eye."""
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    mutant: Mutant
    verdict: str
    seconds: float

    @property
    def line(self) -> str:
        tests = ", ".join(self.mutant.tests)
        return f"{self.verdict:<9} {self.seconds:6.1f} s  {self.mutant.name:<52} {tests}"


def read_table() -> list[Mutant]:
    with TABLE.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return [Mutant(tests=tuple(entry.pop("tests")), **entry) for entry in entries]


def plant(mutant: Mutant, source: Path) -> bool:
    """Write the bug into this copy of src; False when its place is not there any more."""
    path = source / "penstock" / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return False
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return True


def run_tests(tests: tuple[str, ...], source: Path, *, is_baseline: bool = False) -> int:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    words += ["--timeout", str(TEST_S)]
    env = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PENSTOCK_SIM_SEEDS": SIM_SEEDS,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    limit_s = None if is_baseline else LIMIT_S  # all tests together, each within its own limit
    try:
        done = subprocess.run(
            [*words, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return FAILED  # a test that hangs has noticed something
    if done.returncode != PASSED and (is_baseline or done.returncode != FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def run_mutant(mutant: Mutant) -> Result:
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as name:
        source = Path(name) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if plant(mutant, source):
            code = run_tests(mutant.tests, source)
            verdict = {FAILED: "caught", PASSED: "SURVIVED"}.get(code, "BROKEN")
        else:
            verdict = "NO PLACE"
    return Result(mutant=mutant, verdict=verdict, seconds=time.monotonic() - began_at)


def choose(words: Sequence[str]) -> list[Mutant]:
    """Those whose name or file contains one of the words; all without words."""
    found = [m for m in read_table() if not words or any(w in m.name or w in m.file for w in words)]
    if not found:
        raise SystemExit(f"mutants: no name or file in {TABLE} contains {' or '.join(words)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name or file contains one")
    mutants = choose(parser.parse_args().words)
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    if run_tests(tests, ROOT / "src", is_baseline=True) != PASSED:
        print("mutants: the named tests do not pass without any mutant", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results: list[Result] = []
        for result in pool.map(run_mutant, mutants):
            print(result.line, flush=True)
            results.append(result)
    num_caught = sum(result.verdict == "caught" for result in results)
    print(f"{num_caught} of {len(mutants)} caught")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
