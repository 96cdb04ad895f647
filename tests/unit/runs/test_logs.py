# SPDX-License-Identifier: Apache-2.0
"""Logs of the last launch: in order of time, readable, until the run ends."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config import demo_config
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs import logs
from penstock.runs.logs import LogLine, find_logs, follow, read_tail


def line(second: int, message: str, level: str = "info", **fields: object) -> str:
    stamp = f"2026-11-17T16:57:{second:02}.5Z"
    return json.dumps({**fields, "level": level, "timestamp": stamp, "msg": message}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "r")
    made.write_config(demo_config(0))
    _, old = made.new_attempt()
    (old / "dataflow.log").write_text(line(1, "of an older attempt"))
    _, latest = made.new_attempt()
    (latest / "dataflow.log").write_text(line(3, "serves", port=18) + line(9, "node left"))
    (latest / "node-0.log").write_text(
        line(5, "joined") + line(6, "rollout failed", "warning", detail="Traceback\nKeyError: 'x'")
    )
    (latest / "trainer-policy.log").write_text("Killed\n" + line(7, "took over") + "Segfault\n")
    return made


def messages(lines: list[LogLine]) -> list[str]:
    return [line.message for line in lines]


def test_all_services_are_merged_in_order_of_time(folder: RunFolder) -> None:
    found = read_tail(find_logs(folder), 50)
    expected = ["Killed", "serves", "joined", "rollout failed", "took over", "Segfault"]
    assert messages(found) == [*expected, "node left"]
    assert messages(read_tail(find_logs(folder), 2)) == ["Segfault", "node left"]
    assert read_tail(find_logs(folder), 0) == []


def test_a_service_is_named_in_full_or_by_its_kind(folder: RunFolder) -> None:
    assert list(find_logs(folder, ["node"])) == ["node-0"]
    assert list(find_logs(folder, ["trainer", "dataflow"])) == ["trainer-policy", "dataflow"]
    with pytest.raises(ConfigError, match=r'did you mean "dataflow"\? Services: dataflow, node-0'):
        find_logs(folder, ["dataflw"])


def test_a_run_without_logs_says_why(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.write_config(demo_config(0))
    with pytest.raises(ConfigError, match="logs to its own stderr"):
        find_logs(folder)


def test_a_long_log_is_read_from_its_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "TAIL_BYTES", 120)
    found = read_tail(find_logs(folder, ["dataflow"]), 50)
    assert messages(found) == ["node left"], "the cut line is left out"


def test_following_ends_with_the_run_and_misses_no_line(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    log = folder.logs / "latest" / "dataflow.log"
    found: list[str] = []
    has_begun, saw_new = threading.Event(), threading.Event()

    def read() -> None:
        for one in follow(folder, find_logs(folder, ["dataflow"]), 1):
            found.append(one.message)
            has_begun.set()
            if one.message == "whole":
                saw_new.set()

    reader = threading.Thread(target=read)
    with folder.locked():
        reader.start()
        assert has_begun.wait(60)
        with log.open("a") as out:
            out.write(line(10, "whole"))
            out.flush()
            assert saw_new.wait(60)
            out.write('{"msg": "ha')
            out.flush()
            out.write('lf", "level": "info"}\n')
    reader.join(60)
    assert not reader.is_alive(), "the run ended"
    assert found == ["node left", "whole", "half"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_people_get_readable_lines(capsys: pytest.CaptureFixture[str], folder: RunFolder) -> None:
    code, out, _ = run(capsys, "logs", folder.path)
    assert code == 0
    clock = r"\d\d:57:03  dataflow        serves  port=18\n"
    assert re.search(clock, out) and "warning  rollout failed" in out
    assert "            KeyError: 'x'" in out and "Segfault" in out
    code, out, err = run(capsys, "logs", folder.path, "dataflow", "--follow", "-n", 1)
    assert code == 0 and out.count("\n") == 1 and "the run is not running" in err


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str], folder: RunFolder) -> None:
    code, out, _ = run(capsys, "logs", folder.path, "node-0", "--json")
    answer = json.loads(out)
    assert code == 0 and [one["message"] for one in answer["lines"]] == ["joined", "rollout failed"]
    code, _, err = run(capsys, "logs", folder.path, "--follow", "--json")
    assert code == 1 and "tail -F" in err
