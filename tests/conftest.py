# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a leak fails in the file that leaked.

A socket, pipe or transport that nobody closed warns when it is collected, and a warning is an
error. Without a collection at the end of a file, that error would hit a test of another file.
What a collection left is frozen: the next one looks at new objects alone, and takes milliseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_leaks() -> Generator[None]:
    yield
    gc.collect()
    gc.freeze()
