# SPDX-License-Identifier: Apache-2.0
"""The interface of a workflow. The built-in ones, and loading by name, are in `rollout.workflows`.

Imports no gateway, so that a module with a workflow and a reward starts fast in a reward worker.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from penstock.rollout.context import Context
from penstock.types import Task


class Workflow(Protocol):
    """A program that attempts a task: `async def run(task, ctx)`.

    It calls the model through `ctx` and returns the completion as text, the reward as a number, or
    None: the completion is then the last answer."""

    def __call__(self, task: Task, ctx: Context, /) -> Awaitable[str | float | None]:
        """Attempt the task once."""
        ...
