# SPDX-License-Identifier: Apache-2.0
"""`RunConfig`: a run file whose sections fit together.

The shape of the file is in `run_sections`, the checks between sections in `cross_checks`."""

from collections.abc import Iterator

from penstock.config.cross_checks import cross_checks
from penstock.config.run_sections import RunSections
from penstock.options import Contradiction


class RunConfig(RunSections):
    """One run, as its file describes it."""

    def _contradictions(self) -> Iterator[Contradiction]:
        return cross_checks(self)
