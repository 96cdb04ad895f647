# SPDX-License-Identifier: Apache-2.0
"""A node's process with secrets around it, which runs `thief.py` as a reward, a command, a tool
or a tool server:
`python robbed_node.py USE BACKEND PROJECT SECRETS`. Prints what the thief found.

PROJECT has the thief and, below `outputs/`, the run folder. SECRETS is private."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
from pathlib import Path

from tests.attacks.thief import NAMES

from penstock.fleet.inspection import forbid_inspection
from penstock.rollout.isolation import Isolation, IsolationSettings, Opened, Use
from penstock.rollout.programs import run_program
from penstock.rollout.rewards.frames import ScoreRequest
from penstock.rollout.rewards.process import WorkerProcess
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.tools.python_tool import PythonSession
from penstock.rollout.visible_folders import (
    interpreter_folders,
    program_folders,
    python_folders,
)


def canary(name: str) -> str:
    return f"CANARY-{name}-{secrets.token_hex(4)}"


def answer_calls(listener: socket.socket, text: str) -> None:
    def serve() -> None:
        while True:
            call, _ = listener.accept()
            with call:
                call.recv(4096)
                call.sendall(text.encode())

    listener.listen(8)
    threading.Thread(target=serve, daemon=True).start()


def hide_secrets(project: Path, private: Path) -> None:
    """Everything that the thief wants, and where it is."""
    run = project / "outputs" / "run"
    (run / "keys").mkdir(parents=True)
    (run / "keys" / "signing.key").write_text(canary("key"))
    (run / "token").write_text(canary("token"))
    for path in (run / "keys", run):
        path.chmod(0o700)
    engine = socket.socket(socket.AF_UNIX)
    engine.bind(str(private / "engine"))
    answer_calls(engine, canary("engine"))
    answer_calls(socket.create_server(("169.254.169.254", 80)), canary("metadata"))
    local = socket.create_server(("127.0.0.1", 0))
    answer_calls(local, canary("engine"))
    hints = {
        "run": str(run),
        "files": [str(run / "keys" / "signing.key"), str(run / "token")],
        "engine": str(private / "engine"),
        "port": local.getsockname()[1],
    }
    (project / "hints.json").write_text(json.dumps(hints))


async def rob(use: str, isolation: Isolation, project: Path) -> list[str]:
    if use == "reward":
        worker = WorkerProcess("evil:reward", isolation)
        try:
            answer = await worker.score(ScoreRequest(completions=["x"], payloads=[{}]), 120.0)
        finally:
            await worker.kill()
        [mask] = answer.values
        assert isinstance(mask, float), answer
        return [name for bit, name in enumerate(NAMES) if int(mask) >> bit & 1]
    argv = ["python3", str(project / "thief.py"), str(project)]
    if use in (Use.WORKFLOW, Use.SERVERS):
        folders = (*program_folders(argv), *python_folders())
        box = await isolation.open(Use(use), folders=folders)
        return json.loads(await run_program(box, argv))
    tools = ToolSandbox(isolation, "", interpreter_folders() if use == "python" else ())
    try:
        for name in ("thief.py", "hints.json"):
            await tools.put(name, (project / name).read_bytes())
        if use == "python":
            code = "import json, thief\nprint(json.dumps(thief.steal('.')))"
            said = await PythonSession(tools, 100.0).call("python", {"code": code})
            assert not said.is_error, said
            return json.loads(said.text)
        done = await tools.exec(["python3", "thief.py", "."])
        assert done.code == 0, done
        return json.loads(done.stdout)
    finally:
        await tools.close()


async def main(use: str, backend: str, project: Path, private: Path) -> None:
    hide_secrets(project, private)
    sys.path.insert(0, str(project))
    os.chdir(project)
    settings = IsolationSettings(backend=backend, hidden=(project / "outputs",))
    isolation = Isolation(settings)
    other = await isolation.open(Use.WORKFLOW, env={"OPENAI_API_KEY": canary("other")})
    async with Opened(other):  # another attempt, at the same time
        await other.exec(["sleep", "600"])
        print(json.dumps(await rob(use, isolation, project)), flush=True)


if __name__ == "__main__":
    forbid_inspection()
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
