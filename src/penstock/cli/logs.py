# SPDX-License-Identifier: Apache-2.0
"""`penstock logs`: the logs of a run's last launch, readable."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.cli.output import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.text import Text

    from penstock.runs.logs import LogLine

STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}


def logs(
    run: Path,
    /,
    *services: str,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"])] = 50,
    json: bool = False,
) -> int:
    """Show the logs of a run's last launch, all services in order of time.

    Args:
        run: Run folder, or its config file.
        services: Services to show, such as dataflow or node-0; `node` means every node.
        follow: Go on with new lines until the run ends.
        lines: Lines to start with.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.errors import ConfigError
    from penstock.runs.logs import find_logs, read_tail
    from penstock.runs.logs import follow as follow_logs
    from penstock.runs.target import find_run_folder

    if follow and json:
        raise ConfigError(
            "--json prints one object and cannot follow; the logs are JSON lines already: "
            f"tail -F {run}/logs/latest/*.log"
        )
    folder = find_run_folder(run)
    found = find_logs(folder, services)
    if json:
        paths = {name: str(path) for name, path in found.items()}
        print_json({"run": str(folder.path), "logs": paths, "lines": read_tail(found, lines)})
    elif follow:
        try:
            print_lines(follow_logs(folder, found, lines))
        except KeyboardInterrupt:
            return 0
        print_note(f"the run is not running; `penstock status {run}` shows how it ended")
    else:
        print_lines(read_tail(found, lines))
    return 0


def print_lines(lines: Iterable[LogLine]) -> None:
    from penstock.cli.console import SafeConsole

    console = SafeConsole(soft_wrap=True)
    for line in lines:
        console.print(format_line(line))
        sys.stdout.flush()


def format_line(line: LogLine) -> Text:
    """`16:57:39  dataflow  node registered  node=node-1 capacity=256`."""
    from rich.text import Text

    clock = "" if line.at is None else time.strftime("%H:%M:%S", time.localtime(line.at))
    text = Text.assemble((f"{clock:8}  ", "dim"), (f"{printable(line.service):<14}  ", "cyan"))
    message, level = printable(line.message), printable(line.level)
    if not line.level:  # not ours: a traceback, or what a library printed
        return text.append(message)
    if line.level != "info":
        text.append(f"{level}  ", STYLES.get(level, ""))
    text.append(message, "bold" if level == "info" else STYLES.get(level, ""))
    blocks: list[str] = []
    for name, value in line.fields.items():
        if isinstance(value, str) and "\n" in value:
            blocks.append(printable(value.rstrip()))
        else:
            text.append(f"  {printable(name)}=", "dim").append(printable(str(value)))
    for block in blocks:
        text.append("".join(f"\n            {row}" for row in block.splitlines()), "dim")
    return text
