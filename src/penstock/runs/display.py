# SPDX-License-Identifier: Apache-2.0
"""What a launch reports to while it runs. The caller brings the display; the default is silent."""

from __future__ import annotations

from typing import Protocol

from penstock.runs.monitor import RunView


class Display(Protocol):
    """Shows a run to people. All calls come from the thread that called `launch`."""

    def update(self, view: RunView) -> None:
        """The run as it is now; called about twice a second."""
        ...

    def notify(self, text: str) -> None:
        """One event: a service that exited, a graceful stop."""
        ...

    def close(self) -> None: ...


class NoDisplay:
    """Shows nothing."""

    def update(self, view: RunView) -> None:
        return

    def notify(self, text: str) -> None:
        return

    def close(self) -> None:
        return
