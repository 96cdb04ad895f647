# SPDX-License-Identifier: Apache-2.0
"""What a run's evaluations say about one version, from the files in its folder.

A file that cannot be read is left out: an export must not fail because of an old evaluation.
"""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.evals.figures import SuiteFigures, figures
from penstock.evals.recording import BEST_FILE, FOLDER
from penstock.evals.results import SuiteResult
from penstock.fleet.run_folder import RunFolder
from penstock.runs.result_files import read_results


def scores_of(run: RunFolder, policy: str, number: int) -> list[tuple[SuiteResult, SuiteFigures]]:
    """Of each suite, in order of its name; of several evaluations, the one written last."""
    found: dict[str, tuple[SuiteResult, SuiteFigures]] = {}
    files = sorted((run.path / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files:
        if path.name == BEST_FILE:
            continue
        try:
            evaluation = read_results(path)
        except ConfigError:
            continue
        for result in evaluation.suites:
            if (result.policy, result.version) == (policy, number) and result.answers:
                found[result.suite] = (result, figures(result))
    return [found[name] for name in sorted(found)]
