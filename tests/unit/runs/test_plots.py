# SPDX-License-Identifier: Apache-2.0
"""Curves from metrics.jsonl, and their pictures."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.runs.metrics_files import run_with_metrics

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.curves import MAX_NAMES, metric_names, read_records, reward_by_step
from penstock.runs.plots import make_plot, plot_text, step_ticks, write_plot


def straight(path: Path, slope: float = 0.1) -> RunFolder:
    return run_with_metrics(path, [(step, step, slope * step) for step in range(1, 6)])


def test_repeated_steps_count_once_and_skipped_batches_have_no_point(tmp_path: Path) -> None:
    batches = [(1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3), (2, 2, 0.25), (3, 2, 0.9), (4, 3, 0.35)]
    folder = run_with_metrics(tmp_path / "r", batches)
    with folder.metrics.open("a") as file:
        file.write('{"policy": "policy", "number": 4')  # killed while writing
    assert [record.seq for record in read_records(folder.metrics, ())] == [1, 2, 3, 4]
    [curve] = make_plot([folder]).panels["reward/mean"]
    assert (curve.steps, curve.values) == ([1, 2, 3], [0.1, 0.25, 0.35])


@pytest.mark.parametrize("key", ["number", "seq", "time"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e999", "9" * 400, '"1"', "null", "[1]"])
def test_a_line_whose_numbers_are_none_is_left_out(tmp_path: Path, key: str, value: str) -> None:
    """One line of a run of others must not hide its curve, nor the other runs of a list."""
    folder = run_with_metrics(tmp_path / "r", [(1, 1, 0.5), (2, 2, 0.75)])
    line = {"policy": '"policy"', "number": "3", "seq": "3", "time": "3.0", "reward/mean": "1.0"}
    text = ", ".join(f'"{name}": {text}' for name, text in (line | {key: value}).items())
    with folder.metrics.open("a") as file:
        file.write("{" + text + "}\n")
    assert reward_by_step(folder.metrics) == {"policy": {1: 0.5, 2: 0.75}}


def test_the_rewards_of_a_run_that_never_trained_are_empty(tmp_path: Path) -> None:
    assert reward_by_step(tmp_path / "metrics.jsonl") == {}


def test_metrics_of_many_names_are_read_in_proportion(tmp_path: Path) -> None:
    """A file of 560 kB with a new name in each line took 21 s: each line was asked for them all."""

    def cost(num: int) -> int:
        path = tmp_path / f"{num}.jsonl"
        same = {"policy": "p", "time": 1.0}
        lines = ({**same, "number": n, "seq": n, f"m{n}": 1.0} for n in range(1, num + 1))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        taken: list[int] = []
        for _ in range(3):
            started = time.thread_time_ns()
            assert len(read_records(path, metric_names(path))) == num
            taken.append(time.thread_time_ns() - started)
        return min(taken)

    assert cost(4000) / cost(500) < 24, "8 in proportion, 64 if squared"


def test_a_file_lists_a_bounded_number_of_metrics(tmp_path: Path) -> None:
    folder = run_with_metrics(tmp_path / "r", [(1, 1, 0.5)])
    values = {f"m{number}": 1.0 for number in range(2 * MAX_NAMES)}
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"policy": "p", "number": 2, "seq": 2, "time": 1.0} | values) + "\n")
    names = metric_names(folder.metrics)
    assert len(names) == MAX_NAMES and "reward/mean" in names
    assert list(make_plot([folder], ["loss"]).panels) == ["loss"]


def test_an_unknown_metric_lists_the_known_ones(tmp_path: Path) -> None:
    folder = straight(tmp_path / "r")
    with pytest.raises(ConfigError, match=r'did you mean "loss"\? Available: loss, reward/mean'):
        make_plot([folder], ["los"])
    assert list(make_plot([folder], ["loss", "reward"]).panels) == ["loss", "reward/mean"]


def test_a_run_without_metrics_is_an_error(tmp_path: Path) -> None:
    folder = run_with_metrics(tmp_path / "r", [])
    with pytest.raises(ConfigError, match="has no metrics yet"):
        make_plot([folder])


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [straight(tmp_path / parent / "r") for parent in ("a", "b")]
    curves = make_plot(folders).panels["reward/mean"]
    assert [curve.run for curve in curves] == ["a/r", "b/r"]
    with pytest.raises(ConfigError, match="given twice"):
        make_plot([folders[0], folders[0]])


def test_a_run_that_lacks_a_metric_is_named(tmp_path: Path) -> None:
    more = straight(tmp_path / "more")
    line = {"policy": "policy", "number": 6, "seq": 6, "time": 1.0, "kl": 0.5}
    with more.metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")
    plot = make_plot([more, straight(tmp_path / "less")], ["kl"])
    assert plot.without == {"kl": ["less"]} and len(plot.panels["kl"]) == 1


def test_two_runs_are_compared_in_one_picture(tmp_path: Path) -> None:
    plot = make_plot([straight(tmp_path / "alpha"), straight(tmp_path / "beta", 0.2)])
    write_plot(plot, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for text in ("alpha", "beta", "step", "mean reward"):
        assert f">{text}<" in drawn
    write_plot(plot, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    write_plot(plot, tmp_path / "curve.csv")
    with (tmp_path / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 and rows[5]["run"] == "beta" and float(rows[5]["reward/mean"]) == 0.2
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.csv"):
        write_plot(plot, tmp_path / "curve.pdf")


def test_the_terminal_shows_both_curves_within_its_width(tmp_path: Path) -> None:
    plot = make_plot([straight(tmp_path / "alpha"), straight(tmp_path / "beta", 0.2)])
    text = plot_text(plot, width=80, height=20, colour=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 20 and "\x1b" not in text
    for expected in ("mean reward", "alpha", "beta", "step"):
        assert expected in text
    assert "\x1b" in plot_text(plot, width=80, height=20, colour=True)


@pytest.mark.parametrize("library", ["matplotlib", "plotext"])
def test_a_missing_library_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    plot = make_plot([straight(tmp_path / "r")])
    with pytest.raises(ConfigError, match=rf"plots need {library}: .*\[plot\]"):
        if library == "plotext":
            plot_text(plot, width=80, height=20, colour=False)
        else:
            write_plot(plot, tmp_path / "curve.svg")
    write_plot(plot, tmp_path / "curve.csv")


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [([1], [1]), ([1, 5], [1, 2, 3, 4, 5]), ([1, 130], [20, 40, 60, 80, 100, 120])],
)
def test_ticks_are_whole_steps(steps: list[int], ticks: list[int]) -> None:
    assert step_ticks(steps) == ticks


def test_the_command_writes_a_picture_and_prints_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(straight(tmp_path / name).path) for name in ("alpha", "beta")]
    out = tmp_path / "curve.svg"
    with pytest.raises(SystemExit) as ended:
        main(["plot", *runs, "--metric", "loss", "--out", str(out), "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0 and out.exists() and f"wrote {out}" in captured.err
    curves = json.loads(captured.out)["curves"]
    assert [(curve["run"], curve["values"][0]) for curve in curves] == [
        ("alpha", -0.1),
        ("beta", -0.1),
    ]
    with pytest.raises(SystemExit) as ended:
        main(["plot", *runs])
    assert ended.value.code == 0 and "mean reward" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["plot"])
    assert ended.value.code == 1 and "at least one run" in capsys.readouterr().err
