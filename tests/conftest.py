# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a leak fails in the file that leaked, and logs are as they were.

A socket, pipe or transport that nobody closed warns when it is collected, and a warning is an
error. Without a collection at the end of a file, that error would hit a test of another file.
What a collection left is frozen: the next one looks at new objects alone, and takes milliseconds.

A command that runs inside a test sets the logs of the whole process, some to errors alone. The
next test of that process would wait in vain for a warning.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator

import pytest
import structlog


@pytest.fixture(scope="module", autouse=True)
def _no_leaks() -> Generator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logs_as_before() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = {*root.handlers}, root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.setLevel(level)
    logging.captureWarnings(False)
    root.handlers[:] = [
        handler
        for handler in root.handlers
        if handler in handlers or type(handler) is not logging.StreamHandler  # a command's
    ]
