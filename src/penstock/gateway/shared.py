# SPDX-License-Identifier: Apache-2.0
"""One computation for several callers: the choices of a request share their prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """The first caller starts the computation; all get its result, or its error."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def get(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._task is None:
            self._task = asyncio.create_task(make())
        return await asyncio.shield(self._task)
