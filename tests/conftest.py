# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a leak fails in the file that leaked, and logs are as they were.

A socket, pipe or transport that nobody closed warns when it is collected, and a warning is an
error. Without a collection at the end of a file, that error would hit a test of another file.
What a collection left is frozen: the next one looks at new objects alone, and takes milliseconds.

A command that runs inside a test sets the logs of the whole process, some to errors alone. The
next test of that process would wait in vain for a warning.

Workers run tests at the same time. One that is marked `alone` begins when no other runs, and no
other begins before it has ended.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import structlog


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around everything, so that no limit counts the wait."""
    if not hasattr(item.config, "workerinput"):  # there are no workers
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with Path(__file__).open() as running:
        queue = os.open(Path(__file__).parent, os.O_RDONLY)
        try:  # those that may run together would never let the other begin
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(running, kind)
        finally:
            os.close(queue)
        try:
            return (yield)
        finally:  # a process that a test forked may still have the file
            fcntl.flock(running, fcntl.LOCK_UN)


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
