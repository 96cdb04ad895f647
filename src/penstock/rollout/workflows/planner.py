# SPDX-License-Identifier: Apache-2.0
"""A planner that thinks, searches, runs code and answers, one JSON object at a time.

Each reply is `{"thought", "action", "action_input"}`. One that is not is asked for again once; if
the second is not either, its text is the answer. A malformed reply earns 0 as a turn, so the turns
of the planner that have their own reward are its malformed ones. Search and code are tools of
the run file, or the executor role carries them out. A verifier role, if there is one, may send one
answer back. The other roles see the notes of the task, not the planner's conversation. To train the
planner alone, give the other roles a frozen policy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from penstock.gateway.model_calls import Answer, ToolCall
from penstock.options import Options
from penstock.rollout.context import Context
from penstock.rollout.workflows.conversation import first_messages, plays, question_text, user
from penstock.rollout.workflows.memory import Memory, SourceMemory, TaskMemory
from penstock.rollout.workflows.plans import ACTIONS, Plan, read_plan
from penstock.rollout.workflows.solver_verifier import VERIFY, read_verdict
from penstock.types import JsonObject, Task

PLAN = """{question}

Work in steps. Reply with one JSON object and nothing else:
{{"thought": "...", "action": "think | search | code | answer", "action_input": "..."}}
think notes action_input, search looks it up, code runs it as Python, answer gives it as the final \
answer.{notes}"""
RETRY = """That was not one JSON object with the texts thought, action ({actions}) and \
action_input. Reply with that object alone."""
EXECUTE = """Question: {question}
Notes:
{notes}

Carry out this {action} step and reply with its result alone:
{action_input}"""
SHARED = SourceMemory()
"""Of this node, for planners with `memory: source`."""


class PlannerOptions(Options):
    """Options of `planner`."""

    max_steps: PositiveInt = 6
    """Most steps; the last one's text is the answer if none answers."""
    memory: Literal["task", "source"] = "task"
    """Notes of this task alone, or notes of other tasks of the source that went well too. The
    latter depend on the order of attempts, so such a run is not deterministic."""
    num_notes: NonNegativeInt = 4
    """Most notes of other tasks that the planner reads."""
    correct_at: float = 0.5
    """A task went well if its reward is at least this."""
    planner: str = "planner"
    """Role that plans."""
    executor: str = ""
    """Role that carries out what no tool does; empty for none."""
    verifier: str = ""
    """Role that judges the answer; empty for none."""
    search_tool: str = "search"
    """Name of the tool that searches."""
    code_tool: str = "python"
    """Name of the tool that runs code."""


async def run(task: Task, ctx: Context, options: PlannerOptions) -> str:
    episode = _Episode(task, ctx, options)
    answer = await episode.play()
    if options.memory == "source" and await ctx.score(answer) >= options.correct_at:
        SHARED.remember(task, f"{episode.question} -> {answer}")
    return answer


@dataclass(slots=True)
class _Episode:
    """One planner at one task."""

    task: Task
    ctx: Context
    options: PlannerOptions
    question: str = ""
    _messages: list[JsonObject] = field(default_factory=list[JsonObject])
    _notes: Memory = field(default_factory=TaskMemory)
    _is_verified: bool = False

    def __post_init__(self) -> None:
        self.question = question_text(first_messages(self.task, "planner"))
        self._is_verified = not self.options.verifier
        known: list[str] = []
        if self.options.memory == "source":
            known = list(SHARED.recall(self.task, self.options.num_notes))
        notes = "".join(f"\n- {note}" for note in known)
        text = self.ctx.prompt(
            "planner",
            PLAN,
            question=self.question,
            notes=f"\n\nFrom earlier questions:{notes}" if notes else "",
        )
        self._messages = [user(text)]

    async def play(self) -> str:
        text = ""
        for _ in range(self.options.max_steps):
            plan, text = await self._next_plan()
            if plan is None:
                return text
            text = plan.action_input
            if plan.action == "answer" and await self._is_accepted(text):
                return text
            if plan.action != "answer":
                seen = await self._act(plan)
                self._notes.remember(self.task, f"{plan.action}: {text} -> {seen}")
                self._messages.append(user(seen))
        return text

    async def _next_plan(self) -> tuple[Plan | None, str]:
        """The next plan, asked for twice at most; and the text of the last reply."""
        reply = await self._ask()
        plan = read_plan(reply.text)
        if plan is None:
            retry = self.ctx.prompt("planner_retry", RETRY, actions=", ".join(ACTIONS))
            self._messages.append(user(retry))
            reply = await self._ask()
            plan = read_plan(reply.text)
        return plan, reply.text

    async def _ask(self) -> Answer:
        reply = await plays(self.ctx, self.options.planner).chat(self._messages)
        self._messages.append(reply.message)
        if read_plan(reply.text) is None:
            self.ctx.reward(0.0, turn=reply.turn)
        return reply

    async def _act(self, plan: Plan) -> str:
        """What the planner sees of its step."""
        if plan.action == "think":
            return "Noted."
        name = self.options.search_tool if plan.action == "search" else self.options.code_tool
        for spec in self.ctx.tools.specs:
            if spec["function"]["name"] == name:
                arguments = json.dumps({_argument(spec): plan.action_input})
                call = ToolCall(id="", name=name, arguments=arguments)
                return (await self.ctx.tools.call(call)).text
        if not self.options.executor:
            return f"There is nothing here that can {plan.action}. Choose another action."
        request = self.ctx.prompt(
            "executor",
            EXECUTE,
            question=self.question,
            notes=self._note_lines(),
            action=plan.action,
            action_input=plan.action_input,
        )
        return (await plays(self.ctx, self.options.executor).chat([user(request)])).text

    async def _is_accepted(self, answer: str) -> bool:
        """Whether the answer stands. The verifier may send back one, and only if it is clear."""
        if self._is_verified:
            return True
        self._is_verified = True
        question = f"{self.question}\n\nNotes:\n{self._note_lines()}"
        request = self.ctx.prompt("verifier", VERIFY, question=question, draft=answer)
        verdict = await plays(self.ctx, self.options.verifier).chat([user(request)])
        if read_verdict(verdict.text) is not False:
            return True
        self._messages.append(user(f"A reviewer judged the answer wrong:\n{verdict.text}"))
        return False

    def _note_lines(self) -> str:
        notes = self._notes.recall(self.task, self.options.max_steps)
        return "\n".join(f"- {note}" for note in notes) or "none"


def _argument(spec: JsonObject) -> str:
    """The first parameter of a tool."""
    parameters: JsonObject = spec["function"].get("parameters") or {}
    properties: JsonObject = parameters.get("properties") or {}
    return next(iter(properties), "input")
