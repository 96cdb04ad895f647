# SPDX-License-Identifier: Apache-2.0
"""Text of models, agents and nodes reaches the terminal as text, never as control sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.contract.dataflow_server import small_config
from tests.unit.cli.sample_statuses import status, view

from penstock.cli.explain import lines
from penstock.cli.live_panel import draw
from penstock.cli.main import main
from penstock.cli.output import print_note, printable
from penstock.dataflow.explain.explain import Explanation
from penstock.dataflow.explain.sentences import ExplainStep
from penstock.fleet.run_folder import RunFolder

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\rgone"


def test_control_characters_are_replaced_and_lines_stay() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    shown = printable(HOSTILE)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    assert len(shown) == len(HOSTILE)


def test_logs_and_errors_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(small_config())
    _, logs = folder.new_attempt()
    record = {"time": 1.0, "level": "warning", "msg": HOSTILE, "detail": f"{HOSTILE}\n{HOSTILE}"}
    lines = [json.dumps({**record, "node": HOSTILE}), HOSTILE]
    (logs / "node-0.log").write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["logs", str(folder.path)])
    assert ended.value.code == 0
    with pytest.raises(SystemExit):
        main(["logs", str(folder.path), HOSTILE])
    out, err = capsys.readouterr()
    assert out.count("owned") == 5 and "owned" in err
    for character in ("\x1b", "\x07", "\x9b"):
        assert character not in out and character not in err


def test_errors_of_nodes_do_not_steer_the_terminal_of_an_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A program in a sandbox, or a node of strangers, chooses the text of a failure; `explain` and
    the live panel show it."""
    step = ExplainStep(at=1.0, what="given up", text=f"failed: {HOSTILE}")
    explained = Explanation(id="p0-1", kind="group", summary=HOSTILE, steps=(step,))
    shown = "\n".join(lines(explained, 80))
    print_note(HOSTILE)
    Console(width=120).print(draw(view(replace(status(), alarms=(HOSTILE,))), 120))
    shown += "".join(capsys.readouterr())
    assert shown.count("owned") == 4
    for character in ("\x1b", "\x07", "\x9b"):
        assert character not in shown
