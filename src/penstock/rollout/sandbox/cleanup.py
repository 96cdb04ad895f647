# SPDX-License-Identifier: Apache-2.0
"""Clean-up that a cancellation does not cut short: what is half closed would stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work, also while being cancelled; the cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the cancellation is what the caller must hear of
        raise
