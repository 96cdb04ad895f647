# SPDX-License-Identifier: Apache-2.0
"""A solver drafts, a verifier judges each draft, and the solver revises what was judged wrong.

The run's reward function says whether a draft is correct. The solver earns the reward of its last
draft, which is the reward of the row too; the verifier earns the share of drafts that it judged
right. A verdict without a clear word is never right. Prompts `verifier` and `revise` of the run
file replace the built-in ones."""

from __future__ import annotations

import re

from pydantic import NonNegativeInt

from penstock.options import Options
from penstock.rollout.context import Context
from penstock.rollout.workflows.conversation import first_messages, plays, question_text, user
from penstock.types import Task

VERIFY = """{question}

Proposed answer:
{draft}

Is the proposed answer correct? Think briefly, then end with one word: correct or wrong."""
REVISE = """A reviewer judged your answer wrong:
{verdict}

Answer the question again."""
_VERDICT = re.compile(r"\b(correct|incorrect|wrong)\b", re.IGNORECASE)


class SolverVerifierOptions(Options):
    """Options of `solver_verifier`."""

    max_revisions: NonNegativeInt = 1
    """Most drafts after the first."""
    correct_at: float = 0.5
    """A draft is correct if its reward is at least this."""
    solver: str = "solver"
    """Role that drafts."""
    verifier: str = "verifier"
    """Role that judges."""


async def run(task: Task, ctx: Context, options: SolverVerifierOptions) -> None:
    solver, verifier = plays(ctx, options.solver), plays(ctx, options.verifier)
    messages = first_messages(task, "solver_verifier")
    question, judged_right = question_text(messages), list[bool]()
    for revision in range(options.max_revisions + 1):
        draft = await solver.chat(messages)
        request = ctx.prompt("verifier", VERIFY, question=question, draft=draft.text)
        verdict = await verifier.chat([user(request)])
        score = await ctx.score(draft.text)
        ctx.reward(score)
        ctx.reward(score, role=options.solver)
        says_correct = read_verdict(verdict.text)
        judged_right.append(says_correct is (score >= options.correct_at))
        ctx.reward(sum(judged_right) / len(judged_right), role=options.verifier)
        if says_correct is not False or revision == options.max_revisions:
            return
        messages += [draft.message, user(ctx.prompt("revise", REVISE, verdict=verdict.text))]


def read_verdict(text: str) -> bool | None:
    """Whether the last clear word says correct; None if there is none."""
    words = _VERDICT.findall(text)
    return words[-1].lower() == "correct" if words else None
