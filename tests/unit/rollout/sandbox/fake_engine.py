#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands for `podman`: runs the command of a container as a plain process, in the folder that would
be its /work, and records how it was called. Builds no walls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(__file__).parent
NO_PROCESS = 999_999_999
"""Beyond what a kernel counts to: the processor time of a container here is nobody's."""


def run(words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    name = words[words.index("--name") + 1]
    image = words.index("the-image")
    (STATE / "called.json").write_text(json.dumps({"options": options, "name": name}))
    work = next(word for word in options if word.endswith(":/work"))
    folder = work.removeprefix("--volume=").removesuffix(":/work")
    child = subprocess.Popen(words[image + 1 :], cwd=folder, start_new_session=True)
    (STATE / name).write_text(str(child.pid))
    code = child.wait()
    return 128 - code if code < 0 else code


def remove(name: str) -> int:
    record = STATE / name
    if record.exists():
        os.killpg(int(record.read_text()), signal.SIGKILL)
        record.unlink()
    return 0


def main(words: list[str]) -> int:
    if words[0] == "run":
        return run(words)
    if words[0] == "inspect":
        print(NO_PROCESS)
        return 0
    return remove(words[2]) if words[:2] == ["rm", "--force"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
