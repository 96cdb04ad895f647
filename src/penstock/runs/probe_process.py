# SPDX-License-Identifier: Apache-2.0
"""Runs the user's code once, in a process that `penstock check` can kill.

Started as `python -m penstock.runs.probe_process`: a ProbeRequest as JSON on stdin, one
ProbeMessage per line on stdout. Output of the user's code goes to stderr. Loads and calls the code
as the services do, so code that passes here works there. The steps, in order:

    rules      built with their options
    sources    the first task, twice, and a digest
    engines    loaded, not built
    stages     loaded, and their signatures compared with the stages
    workflow   one attempt at the first task of each source, on a scripted answer
    reward     called on the completion of that attempt, and on an empty one
    loss       the attempt as a tiny group, through the training graph to a loss; imports torch

A step whose input an earlier step could not make is left out. torch is imported only if nothing was
found before.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time

from penstock.config import RunConfig
from penstock.runs.probe_report import ProbeMessage, ProbeRequest, Reporter

IMPORT_DEADLINE_S = 600.0
"""Time limit of steps without user code, such as importing torch; much longer than they take."""


def probe(config: RunConfig, reporter: Reporter, *, deadline_s: float, with_loss: bool) -> None:
    """Run all steps."""
    reporter.begin("penstock", "")  # imported first, so that time limits count only the user's code
    from penstock.runs.probe_calls import CallChecker
    from penstock.runs.probe_loading import (
        check_engines,
        check_rules,
        check_sources,
        check_stages,
    )

    check_rules(config, reporter)
    tasks = check_sources(config, reporter)
    check_engines(config, reporter)
    check_stages(config, reporter)
    trajectories = CallChecker(config, reporter, deadline_s=deadline_s).check(tasks)
    if with_loss and trajectories and not reporter.result.problems:
        from penstock.runs.probe_loss import check_loss

        check_loss(config, trajectories, reporter)


def main() -> None:
    from penstock.observe import logs
    from penstock.runs.service_process import add_import_paths
    from penstock.wire.codec import JSON, decode, encode_json

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logs.configure("check", level="error")
    request = decode(sys.stdin.buffer.read(), ProbeRequest, media_type=JSON)
    add_import_paths(tuple(request.python_path))

    def send(step: str, key: str) -> None:
        message = ProbeMessage(step=step, key=key, result=reporter.result)
        answers.write(encode_json(message) + b"\n")
        answers.flush()

    def begin(step: str, key: str) -> None:
        send(step, key)
        limit_s = request.deadline_s if key else IMPORT_DEADLINE_S
        # Its watchdog needs neither the GIL nor the main thread, so a loop in C is seen too.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=request.stack_fd)

    reporter = Reporter(request.python_path, begin)
    config = RunConfig.model_validate(request.config)
    probe(config, reporter, deadline_s=request.deadline_s, with_loss=request.with_loss)
    faulthandler.cancel_dump_traceback_later()
    reporter.result.cpu_s = time.process_time() - reporter.result.import_cpu_s
    send("", "")
    sys.stdout.flush()
    os._exit(0)  # threads of the user's code must not keep the process


if __name__ == "__main__":
    main()
