# SPDX-License-Identifier: Apache-2.0
"""Tries to break out of a fresh sandbox, so that a back end is believed only where it works.

Owns what is tried: a private file, a port of this host, more processes than allowed, processes of
the host. Each answer is judged outside, where it can be.
"""

from __future__ import annotations

import asyncio
import os
import tempfile

from penstock.errors import SandboxError
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Backend, Limits, SandboxSpec

_LIMITS = Limits(wall_s=60, cpu_s=30, memory_mb=512, num_processes=32, disk_mb=16)
_NUM_FORKS = 300
_MAX_VISIBLE = 12
"""Processes that a program may see: its own few."""
_SCRIPT = """
cat "$1" 2>/dev/null && echo read=1
for shell in bash /bin/bash; do
  command -v $shell >/dev/null && $shell -c "exec 3<>/dev/tcp/127.0.0.1/$2" 2>/dev/null
done
echo visible=$(ls /proc | grep -c '^[0-9]')
(i=0; while [ $i -lt "$3" ]; do sleep 5 >/dev/null & i=$((i+1)); done; echo forks=1) 2>/dev/null
echo done=1
"""


async def probe(backend: Backend) -> str:
    """The reason that this back end gives less than it declares; empty if it holds."""
    connections = list[object]()
    listener = await asyncio.start_server(
        lambda _, writer: (connections.append(writer), writer.close())[1], "127.0.0.1", 0
    )
    port = listener.sockets[0].getsockname()[1]
    with tempfile.NamedTemporaryFile() as private:
        private.write(os.urandom(16).hex().encode())
        private.flush()
        os.chmod(private.name, 0o600)
        try:
            answers = await _ask(backend, private.name, port)
        except SandboxError as error:
            return str(error)
        finally:
            listener.close()
            await listener.wait_closed()
    return _judge(answers, has_connected=bool(connections))


async def _ask(backend: Backend, private: str, port: int) -> dict[str, str]:
    sandbox = backend.create(SandboxSpec(limits=_LIMITS))
    await sandbox.start()
    try:
        argv = ["/bin/sh", "-c", _SCRIPT, "sh", private, str(port), str(_NUM_FORKS)]
        done = await run(sandbox, argv)
    finally:
        await sandbox.kill()
    lines = done.stdout.decode(errors="replace").splitlines()
    return dict(line.rsplit("=", 1) for line in lines if "=" in line)


def _judge(answers: dict[str, str], *, has_connected: bool) -> str:
    if "visible" not in answers:
        return "the test program did not run to its end inside"
    if any(key.endswith("read") for key in answers):
        return "a program inside read a private file of the node's user"
    if has_connected:
        return "a program inside connected to a port of this host"
    if int(answers["visible"]) > _MAX_VISIBLE:
        return "a program inside sees processes of this host"
    if "forks" in answers:
        return f"a program inside started {_NUM_FORKS} processes; {_LIMITS.num_processes} allowed"
    return ""
