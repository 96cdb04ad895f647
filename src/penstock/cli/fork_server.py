# SPDX-License-Identifier: Apache-2.0
"""A process that imports what services need, and forks one `penstock` command per line it reads.

A line is a JSON object: `words`, `env`, `log` and `preload`; the answer is the pid, or an empty
line if it may not fork. It ends with its input. `fleet.fork_server` is the other end. It starts no
thread and opens no connection: a fork would share them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from typing import Any, NoReturn

from penstock.cli.main import main as run_command
from penstock.fleet.inspection import forbid_inspection
from penstock.fleet.processes import PARENT_PID_ENV, exit_with_parent

ADOPTION_S = 30.0


def serve() -> Any:
    """Answer requests until the input ends. Returns twice: None here, a request in each child."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for name in request["preload"]:
            importlib.import_module(name)
        gc.freeze()  # or the first collection in each child would copy all this memory
        pid = _fork_orphan() if len(os.listdir("/proc/self/task")) == 1 else None
        if pid == 0:
            return request
        sys.stdout.write(f"{pid or ''}\n")
        sys.stdout.flush()
    return None


def _fork_orphan() -> int:
    """Fork a process whose parent has exited; 0 in that process."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(writer)
            return 0
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(middle, 0)
    return pid


def become_service(request: Any) -> None:
    """Give this process what `subprocess` would have given it."""
    os.setsid()
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]
    with open("/proc/self/comm", "w") as name:  # what `ps -o comm` and `top` show
        name.write(f"penstock {request['words'][0]}"[:15])
    give_up_at = time.monotonic() + ADOPTION_S
    while str(os.getppid()) != request["env"][PARENT_PID_ENV] and time.monotonic() < give_up_at:
        time.sleep(0.001)
    gc.enable()


def main() -> NoReturn:
    forbid_inspection()
    exit_with_parent()
    gc.disable()  # imports make objects that stay, and little garbage
    request = serve()
    if request is None:
        os._exit(0)  # an interpreter that cleans up would copy all memory that is still shared
    become_service(request)
    run_command()
    sys.exit(0)


if __name__ == "__main__":
    main()
