# SPDX-License-Identifier: Apache-2.0
"""A node without root that runs the hostile programs about its own limits: prints what it found.

Run as another user by `test_hostile_programs.py`, with the system's Python.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from penstock.rollout.sandbox.choose import choose
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Grants, Level, Limits, SandboxSpec

LIMITS = Limits(wall_s=60, cpu_s=5, memory_mb=512, num_processes=24, disk_mb=16)
SCRIPT = """
head -c 64M /dev/zero > big; stat -c size=%s big; rm big
cat /run/secrets/key; echo
(for i in $(seq 40); do sleep 60 >/dev/null 2>&1 & done; echo all) || echo refused
cat "$1" || echo hidden
"""


def write_secret(path: Path) -> Path:
    path.write_text("secret of the user")
    return path


async def main() -> None:
    backend = await choose("auto", demand=Level.NAMESPACES)
    with tempfile.TemporaryDirectory() as folder:
        private = write_secret(Path(folder, "private"))
        grants = Grants(secrets={"key": private})
        sandbox = backend.create(SandboxSpec(limits=LIMITS, grants=grants))
        await sandbox.start()
        done = await run(sandbox, ["sh", "-c", SCRIPT, "sh", str(private)])
        await sandbox.put("x", b"1")
        back = await sandbox.get("x", max_bytes=1)
        await sandbox.kill()
    print(json.dumps({"lines": done.stdout.decode().splitlines(), "back": back.decode()}))


if __name__ == "__main__":
    asyncio.run(main())
