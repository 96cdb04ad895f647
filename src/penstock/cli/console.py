# SPDX-License-Identifier: Apache-2.0
"""The console that commands draw on: what others wrote does not steer the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from penstock.redaction import printable


class SafeConsole(Console):
    """Colours and moves of the cursor are rich's own; control characters in texts are replaced."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_ours = segment.control or segment.text.isprintable()
            yield segment if is_ours else Segment(printable(segment.text), segment.style)
