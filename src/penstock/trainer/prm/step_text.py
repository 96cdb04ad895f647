# SPDX-License-Identifier: Apache-2.0
"""The text of a step, as judges label it and models learn and score it: one function for all three.

The text is the decision and what led to it: the context before the step, then the action. It holds
neither the result of the step nor anything after it, and no reward. The digest of this function is
stored with labels, models and scores; what was made by another function is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from blake3 import blake3

from penstock.errors import ConfigError
from penstock.trainer.prm.traces import Step

CONTEXT_MARK = "[context]\n"
STEP_MARK = "\n[step]\n"
MAX_CONTEXT_CHARS = 12_000
"""A longer context loses its middle: the task comes first, the state last."""
MAX_ACTION_CHARS = 8_000
_CUT = "\n[…]\n"


def step_text(steps: Sequence[Step], index: int) -> str:
    """The text of `steps[index]`."""
    step = steps[index]
    backwards, parent = [step.prompt], step.parent
    while parent >= 0:
        before = steps[parent]
        backwards += (before.action, before.prompt)
        parent = before.parent
    context = "".join(reversed(backwards))
    return (
        CONTEXT_MARK
        + _shortened(context, MAX_CONTEXT_CHARS)
        + STEP_MARK
        + _shortened(step.action, MAX_ACTION_CHARS)
    )


def scored_texts(steps: Sequence[Step]) -> dict[int, str]:
    """The text of every step that a model or judge sees, by index: malformed ones are not."""
    return {
        index: step_text(steps, index)
        for index, step in enumerate(steps)
        if step.is_scored and not step.malformed
    }


@cache
def text_digest() -> str:
    """Of `step_text`: a hash of what it makes of fixed steps, so it changes with the function."""
    long = "0123456789" * (MAX_CONTEXT_CHARS // 5)
    steps = (
        Step(prompt="task\n", action="first"),
        Step(prompt="\nresult of the first\n", action=long, parent=0),
        Step(prompt=long, action="new context"),
        Step(prompt="\nresult of the second\n", action="", parent=1),
    )
    texts = [step_text(steps, index) for index in range(len(steps))]
    return blake3("\0".join(texts).encode()).hexdigest()[:32]


def require_digest(digest: str, what: str, again: str) -> None:
    """ConfigError if `what` was made with the texts of another function; `again` says
    what to do."""
    if digest != text_digest():
        raise ConfigError(
            f"{what} was made with step texts of another form (digest {digest[:12] or 'none'}, "
            f"this version builds {text_digest()[:12]}); scores would mean something else: {again}"
        )


def _shortened(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head = max_chars // 4
    return text[:head] + _CUT + text[len(text) - (max_chars - head) :]
