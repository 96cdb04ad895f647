# SPDX-License-Identifier: Apache-2.0
"""One attempt at a Harbor task: the agent, then the verifier.

Owns what the agent's program sees: its own files, this interpreter, and a port that leads to the
gateway. The verifier starts when no process of the agent is left. An agent that runs out of time is
judged by what it did; one that fails is judged too, but its attempt stays a failure."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from penstock.errors import RewardError, WorkflowError
from penstock.rollout.agent_programs import GATEWAY, PORT, client_env
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.harbor.boxes import HOME, agent_box, verifier_box
from penstock.rollout.harbor.verifier import PATH, verify
from penstock.rollout.isolation import Isolation
from penstock.rollout.proxied_sandbox import INTERPRETER, with_ports
from penstock.rollout.sandbox.run import Finished, run
from penstock.rollout.sandbox.types import FileRefused, Sandbox
from penstock.rollout.user_errors import last_words
from penstock.rollout.visible_folders import interpreter_folders, program_folders
from penstock.tasks.harbor import HarborTask

INSTRUCTION = "{instruction}"
"""Replaced in the arguments of an agent; every agent gets it on standard input too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    reward: float | None
    """None only if the agent failed and the verifier too."""
    failure: str
    """How the agent failed; empty if it ended by itself, or at its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The program, and how it reaches the model."""

    argv: Sequence[str]
    """Empty: the built-in one."""
    instruction: str
    endpoint: Endpoint
    api_key: str
    seed: int


async def run_trial(isolation: Isolation, task: HarborTask, agent: Agent, *, row_id: str) -> Trial:
    """Raises SandboxError, RewardError, or WorkflowError if nothing can be judged."""
    argv, folders = placed(agent.argv) if agent.argv else (_built_in_agent(), ())
    sockets = {GATEWAY: agent.endpoint.socket_path}
    shown = (*folders, *interpreter_folders())
    async with agent_box(isolation, task, folders=shown, sockets=sockets, row_id=row_id) as box:
        done = await _run_agent(box, task, agent, argv)
        failure = _failure(argv, done)
        try:
            async with verifier_box(isolation, task, box, row_id=row_id) as judge:
                return Trial(reward=await verify(judge, task), failure=failure)
        except FileRefused as error:
            raise WorkflowError(f"task {task.name}: what the agent left: {error}") from None
        except RewardError:
            if not failure:
                raise
            return Trial(reward=None, failure=failure)


async def _run_agent(box: Sandbox, task: HarborTask, agent: Agent, argv: list[str]) -> Finished:
    words = [word.replace(INSTRUCTION, agent.instruction) for word in argv]
    command = with_ports({PORT: f"/run/sockets/{GATEWAY}"}, words, folder=task.workdir)
    env = {"PATH": PATH, "HOME": f"/{HOME}", "PENSTOCK_SEED": str(agent.seed), **task.env}
    env |= client_env(f"http://127.0.0.1:{PORT}/v1", agent.api_key)
    return await run(box, command, stdin=agent.instruction.encode(errors="replace"), env=env)


def _failure(argv: Sequence[str], done: Finished) -> str:
    if done.exit.limit == "wall_s" or (done.exit.code == 0 and not done.exit.limit):
        return ""
    how = f"exited with code {done.exit.code}"
    if done.exit.limit:
        how = f"was ended at its limit {done.exit.limit} (sandbox.workflow.limits in the run file)"
    program = "the built-in agent" if argv[:1] == [INTERPRETER] else f"`{shlex.join(argv)}`"
    return f"{program} {how}: {last_words(done.stderr, 1000)}"


def placed(argv: Sequence[str]) -> tuple[list[str], tuple[Path, ...]]:
    """The command with absolute paths, since it starts elsewhere, and the files that it needs: its
    program and the files among its arguments. Never the working directory, where tasks may be."""
    first, *rest = argv
    words, folders = [first], list[Path]()
    if program := shutil.which(first):
        path = Path(program).absolute()
        words = [first if path.is_relative_to("/usr") else str(path)]
        folders += program_folders([str(path)])[1:]
    for word in rest:
        path = Path(word)
        is_file = INSTRUCTION not in word and path.is_file()
        words.append(str(path.absolute()) if is_file else word)
        folders += [path.absolute()] if is_file else []
    return words, tuple(folders)


def _built_in_agent() -> list[str]:
    script = resources.files("penstock.rollout.harbor").joinpath("terminal_agent.py").read_text()
    return [INTERPRETER, "-I", "-S", "-c", script]
