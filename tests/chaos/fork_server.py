# SPDX-License-Identifier: Apache-2.0
"""A Python that has imported the services once and forks one real `penstock` command per line it
reads, so that a thousand starts do not pay a thousand imports.

A line is `[[word, …], log file]`; the answer is the pid. The children die with this process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

from penstock.cli.main import main as penstock_main
from penstock.fleet.processes import PARENT_PID_ENV


def main() -> None:
    for name in ("penstock.cli.dataflow", "penstock.dataflow.service.server", "uvloop"):
        importlib.import_module(name)
    os.environ[PARENT_PID_ENV] = str(os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children vanish by themselves
    for line in sys.stdin:
        words, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_service(log)
            penstock_main(words)
        print(pid, flush=True)


def _run_service(log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)


if __name__ == "__main__":
    main()
