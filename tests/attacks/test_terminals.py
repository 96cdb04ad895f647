# SPDX-License-Identifier: Apache-2.0
"""What a model, an agent, a node or a stranger wrote does not steer the terminal of who looks at a
run: it neither hides lines, nor forges them, nor talks to the terminal."""

from __future__ import annotations

import ast
import json
import re
from io import StringIO
from pathlib import Path

import pytest
import structlog
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import penstock.cli
from penstock.cli.console import SafeConsole
from penstock.cli.main import main
from penstock.cli.output import print_json, print_text
from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.observe import logs
from penstock.redaction import printable
from penstock.runs.curves import Curve
from penstock.runs.logs import find_logs, read_tail
from penstock.runs.plots import Plot, plot_text

ATTACKS = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "\x9b2J",
    "\x1bP+q544e\x1b\\",
    "\x08\x08\x08",
    "\r",
    "\x7f",
    "\u202e",
    "\u2066",
)
"""The title of the window, an empty screen (two ways), a question to the terminal, text written
over, a line begun again, text that reads backwards."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "r")
    made.write_config(demo_config(0))
    made.new_attempt()
    return made


def logged(folder: RunFolder, text: str) -> Path:
    path = folder.logs / "latest" / "node-0.log"
    path.write_text(text + "\n", encoding="utf-8", newline="")
    return path


def has_control(text: str) -> bool:
    """Beside line ends, and the colours of a terminal, which these tests do not have."""
    return any(not (char.isprintable() or char in "\n\t") for char in text)


def test_a_line_that_looks_like_ours_is_shown_safely(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward prints a completion, and the model wrote a line of a log."""
    ours = {"msg": "m", "level": "info", "timestamp": "2026-11-17T16:57:01Z"}
    forged = [
        place
        for bad in (f"a{attack}b" for attack in ATTACKS)
        for place in (
            {"level": bad},
            {"msg": bad},
            {"detail": bad},
            {"detail": [bad]},
            {bad: 1},
            {"detail": f"first\n{bad}"},
        )
    ]
    logged(folder, "\n".join(json.dumps(ours | place) for place in forged))
    with pytest.raises(SystemExit):
        main(["logs", str(folder.path), "-n", "100"])
    shown = capsys.readouterr().out
    assert shown.count("16:57:01") + shown.count(":57:01") >= len(forged)
    assert not has_control(shown), shown


@pytest.mark.parametrize(
    "end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
)
def test_no_line_is_forged_inside_of_another(folder: RunFolder, end: str) -> None:
    """Python knows more ends of lines than JSON escapes."""
    forged = f"refused{end}run audited: no fault found"
    written = json.dumps({"msg": forged, "level": "error"}, ensure_ascii=False)
    logged(folder, written if ord(end) > 0x1F else f"plain {forged}")
    [line] = read_tail(find_logs(folder), 10)
    assert forged in line.message


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_service_logs_nothing_that_steers_a_terminal(is_terminal: bool) -> None:
    """On the terminal where it was started, and where its file is followed."""

    class Out(StringIO):
        def isatty(self) -> bool:
            return is_terminal

    out = Out()
    logs.configure("node", stream=out)
    try:
        log = structlog.get_logger("x")
        for attack in ATTACKS:
            bad = f"a{attack}b"
            log.warning(bad, why=bad, all=[bad], by={"x": bad})
            try:
                raise ValueError(bad)
            except ValueError:
                log.exception("failed")
    finally:
        structlog.reset_defaults()
    assert "ValueError" in out.getvalue()
    assert not [attack for attack in ATTACKS if attack in out.getvalue()]
    if not is_terminal:
        assert not has_control(out.getvalue())


@pytest.mark.parametrize("attack", ATTACKS)
def test_results_are_printed_safely(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON they are the same value, as text they lack the control characters."""
    value = {"text": f"a{attack}b", f"k{attack}": 1}
    print_json(value)
    printed = capsys.readouterr().out
    assert not has_control(printed)
    assert json.loads(printed) == value
    print_text(f"a{attack}b")
    assert capsys.readouterr().out == f"{printable(f'a{attack}b')}\n"
    assert not has_control(printable(attack))


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_drawn_is_cleaned(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it stands, without a thought of those who draw; tags of rich are text."""
    bad = f"a{attack}b[link=http://example.com]c[/x]"
    table = Table(bad, title=bad)
    table.add_row(bad)
    console = SafeConsole(soft_wrap=True)
    for shown in (bad, Text(bad, style="red"), Panel(Text(bad), title=Text(bad)), table):
        console.print(shown)
        out = capsys.readouterr().out
        assert "[/x]" in out
        assert not has_control(out), out


@pytest.mark.parametrize("colour", [False, True])
def test_names_of_curves_steer_no_terminal(colour: bool) -> None:
    """One with half an escape sequence ended the command."""
    for attack in (*ATTACKS, "\x1b["):
        bad = f"a{attack}b"
        curves = [
            Curve(run=f"{bad}{n}", policy=bad, metric=bad, steps=[1, 2], values=[0.0, 1.0])
            for n in range(2)
        ]
        plot = Plot(panels={bad: curves}, without={})
        drawn = plot_text(plot, width=80, height=12, colour=colour)
        assert bad not in drawn
        assert colour or not has_control(drawn)


ALLOWED = {
    "output.py": 2,  # print_text and print_note
    "main.py": 1,  # the error at the end, cleaned there
    "plot.py": 1,  # a picture with colours
    "check.py": 1,  # progress on one line
    "eval_.py": 1,  # progress on one line
    "init.py": 1,
    "tls.py": 6,
    "tools.py": 1,
}
"""Calls of `print` by module of the command line; the last three print nothing of others."""


def test_commands_print_by_functions_that_clean() -> None:
    found: dict[str, int] = {}
    for path in Path(str(penstock.cli.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[path.name] = found.get(path.name, 0) + (node.func.id == "print")
    assert {name: number for name, number in found.items() if number} == ALLOWED


def test_commands_draw_on_the_console_that_cleans() -> None:
    sources = Path(str(penstock.cli.__file__)).parent.glob("*.py")
    makers = {path.name for path in sources if re.search(r"\bConsole\(", path.read_text())}
    assert not makers, "use SafeConsole"
