# SPDX-License-Identifier: Apache-2.0
"""Files of evaluation results: where they are, and which of a run's count.

Owns reading them, and writing the results of `penstock eval`; a run writes its own. A file holds
one `Evaluation` as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.dataflow.sources.suites import Suite
from penstock.durable import write_durably
from penstock.errors import ConfigError
from penstock.evals.results import Evaluation, SuiteResult

FOLDER = "evaluations"
"""In the run folder: POLICY@VERSION.json for each version that the run evaluated."""
LOCAL = "local"
"""Below it: the results of `penstock eval`."""
BEST_FILE = "best.json"


def read_results(path: Path) -> Evaluation:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; `penstock eval` writes such files"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} holds no results of an evaluation ({error}); name a file that `penstock eval` "
            "wrote, or delete it and evaluate again"
        ) from None


def run_results(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run, older files first."""
    folder = run_dir / FOLDER
    paths = [*folder.glob("*.json"), *folder.glob(f"{LOCAL}/*.json")]
    paths = [path for path in paths if path.name != BEST_FILE]
    return [read_results(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


@dataclass(frozen=True, slots=True)
class StoredResults:
    """The file of one evaluation, which grows while it goes on."""

    path: Path

    def read(
        self, suites: Sequence[Suite], samples: int, temperature: float
    ) -> Mapping[str, SuiteResult]:
        """What is stored of these suites; refuses results of other questions or settings."""
        if not self.path.exists():
            return {}
        stored = {result.suite: result for result in read_results(self.path).suites}
        for suite in suites:
            found = stored.get(suite.name)
            if found is None:
                continue
            asked = (suite.digest, suite.scorer, samples, temperature)
            known = (found.suite_digest, found.scorer, found.samples, found.temperature)
            if asked != known:
                raise ConfigError(
                    f"{self.path} holds results of {suite.name} with other questions, scorer, "
                    f"samples ({found.samples}) or temperature ({found.temperature:g}); repeat "
                    "these, write elsewhere with --out, or delete the file"
                )
        return stored

    def write(self, evaluation: Evaluation) -> None:
        """Replace the suites of this evaluation; others in the file stay."""
        suites = {result.suite: result for result in evaluation.suites}
        if self.path.exists():
            suites = {result.suite: result for result in read_results(self.path).suites} | suites
        whole = msgspec.structs.replace(evaluation, suites=tuple(suites.values()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self.path, msgspec.json.format(msgspec.json.encode(whole)))
