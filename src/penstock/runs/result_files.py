# SPDX-License-Identifier: Apache-2.0
"""Files of evaluation results: where they are, and which of a run's count.

Owns reading them, and writing the results of `penstock eval`; a run writes its own. A file holds
one `Evaluation` as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.dataflow.sources.suites import Suite
from penstock.durable import open_regular, write_durably
from penstock.errors import ConfigError
from penstock.evals.recording import BEST_FILE, FOLDER
from penstock.evals.results import Evaluation, SuiteResult

LOCAL = "local"
"""Below the folder of a run's evaluations: the results of `penstock eval`."""
MAX_BYTES = 256 << 20
"""Of one file: more than a million answers."""
MAX_RUN_BYTES = 1 << 30
"""Of all files of a run."""


def read_results(path: Path) -> Evaluation:
    """The only reader. A file may come from another machine."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_BYTES >> 20} MiB, so it holds no results of an "
                "evaluation; name a file that `penstock eval` wrote"
            )
        found = msgspec.json.decode(content, type=Evaluation)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; `penstock eval` writes such files"
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no results of an evaluation ({error}); name a file that `penstock eval` "
            "wrote, or delete it and evaluate again"
        ) from None
    _require_unique(found, path)
    return found


def _require_unique(found: Evaluation, path: Path) -> None:
    """An answer that stands twice would count twice."""
    suites = [result.suite for result in found.suites]
    keys = [
        (result.suite, one.question, one.sample)
        for result in found.suites
        for one in result.answers
    ]
    for kind, listed in (("suite", suites), ("answer", keys)):
        twice = next((key for key, number in Counter(listed).items() if number > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{path} holds the {kind} {twice!r} twice, so its figures would be wrong; delete "
                "it and evaluate again"
            )


def run_results(run_dir: Path) -> list[Evaluation]:
    """All evaluations of a run, older files first."""
    folder = run_dir / FOLDER
    paths = [*folder.glob("*.json"), *folder.glob(f"{LOCAL}/*.json")]
    paths = [path for path in paths if path.name != BEST_FILE]
    return [*read_all(sorted(paths, key=lambda path: path.stat().st_mtime_ns))]


def read_all(paths: Iterable[Path]) -> Iterator[Evaluation]:
    """Of one run; hard links to one long file must not multiply it."""
    left = MAX_RUN_BYTES
    for path in paths:
        left -= path.lstat().st_size
        if left < 0:
            raise ConfigError(
                f"the files beside {path} have more than {MAX_RUN_BYTES >> 20} MiB; move some of "
                "the results elsewhere"
            )
        yield read_results(path)


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
