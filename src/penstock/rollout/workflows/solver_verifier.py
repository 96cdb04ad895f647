# SPDX-License-Identifier: Apache-2.0
"""A solver drafts, a verifier judges each draft, and the solver revises what was judged wrong.

The run's reward function says whether a draft is correct. The solver earns the reward of its last
draft, which is the reward of the row too; the verifier earns the share of drafts that it judged
right. A verdict without a clear word is never right. Prompts `verifier` and `revise` of the run
file replace the built-in ones; `correct_words` and `wrong_words` are what such a prompt asks
for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt

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
CORRECT_WORDS = ("correct",)
WRONG_WORDS = ("wrong", "incorrect")
Words = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class SolverVerifierOptions(Options):
    """Options of `solver_verifier`."""

    max_revisions: NonNegativeInt = 1
    """Most drafts after the first."""
    correct_at: float = 0.5
    """A draft is correct if its reward is at least this."""
    correct_words: Words = CORRECT_WORDS
    """Words of a verdict that say correct; the last word of either kind counts."""
    wrong_words: Words = WRONG_WORDS
    """Words of a verdict that say wrong."""
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
        says_correct = read_verdict(verdict.text, options.correct_words, options.wrong_words)
        judged_right.append(says_correct is (score >= options.correct_at))
        ctx.reward(sum(judged_right) / len(judged_right), role=options.verifier)
        if says_correct is not False or revision == options.max_revisions:
            return
        messages += [draft.message, user(ctx.prompt("revise", REVISE, verdict=verdict.text))]


def read_verdict(
    text: str, correct: Sequence[str] = CORRECT_WORDS, wrong: Sequence[str] = WRONG_WORDS
) -> bool | None:
    """Whether the last clear word says correct; None if there is none."""
    choices = "|".join(map(re.escape, (*correct, *wrong)))
    words = re.findall(rf"\b({choices})\b", text, re.IGNORECASE)
    return words[-1].lower() in map(str.lower, correct) if words else None
