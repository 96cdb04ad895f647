# SPDX-License-Identifier: Apache-2.0
"""Lease requests that are held open, counted by the credential that sent them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager


class OpenPolls:
    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()

    def num_open(self, subject: str) -> int:
        return self._num_open[subject]

    @contextmanager
    def hold(self, subject: str) -> Generator[None]:
        """One more is open."""
        self._num_open[subject] += 1
        try:
            yield
        finally:
            self._num_open[subject] -= 1
            if not self._num_open[subject]:
                del self._num_open[subject]
