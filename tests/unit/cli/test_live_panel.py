# SPDX-License-Identifier: Apache-2.0
"""What people see of a run: the panel, the plain lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.cli.sample_statuses import policy_status, status, view

from penstock.cli.live_panel import LIVE_HINT, draw, sparkline
from penstock.cli.output import format_clock, format_duration, pluralise
from penstock.cli.progress_lines import ProgressLines, progress_line
from penstock.dataflow.service.operators.messages import PartStatus
from penstock.runs.monitor import RunView
from penstock.types import PolicyName


def drawn(seen: RunView, width: int = 100, hint: str = LIVE_HINT) -> str:
    console = Console(width=width, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(draw(seen, width, hint))
    return capture.get()


def test_the_panel_shows_the_status() -> None:
    text = drawn(view(status()))
    for expected in (
        "penstock · reverse",
        "3/10",
        "0.500",
        "▁▃▆█",
        "0.60 mean · 1 max",
        "in flight 4",
        "3,072 trajectories",
        "2,145 tokens/s",
        "5.0% of tokens never trained",
        "stale 450",
        "node-0",
        "v3",
        "100/256 slots",
        "trainer policy for 4 groups on node-0, 12 s",
        "0:42 · about 1:01 left",
    ):
        assert expected in text


def test_the_panel_shows_roles_and_sources_where_there_are_several() -> None:
    one = PartStatus(
        source="math", role="", groups=4, dropped={}, rows=32, tokens=900, reward_mean=0.5
    )
    plain = drawn(view(status()))
    assert drawn(view(status(replace(policy_status(), parts=(one,))))) == plain
    parts = (
        replace(one, role="solver"),
        replace(one, role="verifier", reward_mean=None, dropped={"uniform_reward": 3}),
    )
    judge = replace(policy_status(), policy=PolicyName("judge"))
    found = status(replace(policy_status(), parts=parts), judge)
    text = drawn(view(found))
    assert "solver  reward 0.500   900 tokens   4 groups" in text
    assert "verifier  reward –   900 tokens   4 groups, dropped: uniform_reward 3" in text
    assert " policy " in text and " judge " in text
    several = (one, replace(one, source="code"))
    text = drawn(view(status(replace(policy_status(), parts=several))))
    assert "math  reward 0.500" in text and "code  reward 0.500" in text


def test_the_panel_says_how_to_stop_where_it_is_shown() -> None:
    assert "Ctrl-C stops" in drawn(view(status()))
    shown = drawn(view(status()), hint="`penstock stop RUN` stops it")
    assert "`penstock stop RUN` stops it" in shown
    assert "Ctrl-C" not in shown


def test_the_panel_before_the_first_token_and_after_the_last_node() -> None:
    fresh = replace(status(), nodes=(), trajectories=0, sampled_tokens=0, wasted_tokens={})
    assert "no node has joined yet" in drawn(view(fresh))
    assert "never trained" not in drawn(view(fresh))
    assert "no nodes connected" in drawn(view(replace(status(), nodes=())))


def test_the_panel_counts_skipped_batches_and_one_group() -> None:
    assert "skipped" not in drawn(view(status()))
    skipping = replace(policy_status(), skipped=2, last_skip="zero_advantage", ready=1)
    text = drawn(view(status(skipping)))
    assert "2 batches, the last one because of zero advantage" in text
    assert "ready 1 group " in text


def test_the_panel_explains_a_step_that_goes_back_until_it_is_reached_again() -> None:
    note = "resumed from the checkpoint at step 2; steps 3–5 are repeated"
    assert note in drawn(view(status(replace(policy_status(3), resumed_at=2, repeats_to=5))))
    assert note not in drawn(view(status(replace(policy_status(5), resumed_at=2, repeats_to=5))))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_the_terminal(width: int) -> None:
    text = drawn(view(status(), note="node-0: " + "x" * 300), width)
    assert max(map(len, text.splitlines())) <= width


def test_an_alarm_is_shown_in_full() -> None:
    why = f"policy policy gets no batch: {'word ' * 60}the last word"
    text = drawn(view(replace(status(), alarms=(why,))))
    assert "policy policy gets no batch" in text and "the last word" in text


def test_the_panel_keeps_its_height_while_nothing_waits() -> None:
    busy = status()
    calm = status(since_s=0.0)
    assert len(drawn(view(busy)).splitlines()) == len(drawn(view(calm)).splitlines())


def test_the_panel_shows_an_unreachable_dataflow_and_the_last_problem() -> None:
    assert "starting" in drawn(view(None))
    text = drawn(view(status(), unreachable_s=7.0, note="node-1 was killed by SIGKILL"))
    assert "no response from the dataflow for 7.0 s" in text
    assert "node-1 was killed by SIGKILL" in text
    assert "finished in 0:42" in drawn(view(status(finished=True)))


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [
        ([], 5, ""),
        ([0.5], 5, "▁"),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([0.3, 0.3, 0.3], 3, "▁▁▁"),
    ],
)
def test_sparkline(values: list[float], width: int, text: str) -> None:
    assert sparkline(values, width) == text


def test_a_long_curve_is_squeezed_into_the_width() -> None:
    assert len(sparkline([float(i) for i in range(1000)], 37)) == 37


def test_a_line_is_written_per_step_and_when_something_else_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ProgressLines()
    lines.update(view(status(policy_status(number=1)), elapsed_s=10.0))
    lines.update(view(status(policy_status(number=1)), elapsed_s=10.5))  # nothing new
    lines.update(view(status(policy_status(number=2)), elapsed_s=11.0))  # a step
    lines.update(view(status(policy_status(number=2), since_s=0), elapsed_s=12.0))  # too soon
    lines.update(view(status(policy_status(number=2), since_s=0), elapsed_s=13.5))
    lines.update(view(status(policy_status(number=2), since_s=0), elapsed_s=20.0))  # nothing new
    lines.update(view(status(policy_status(number=2), since_s=0), elapsed_s=30.0))  # still alive
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text.split()[0] for text in captured.err.splitlines()] == [
        "0:10",
        "0:11",
        "0:14",
        "0:30",
    ]


def test_lines_write_a_note_once_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    now = status(policy_status(number=1))
    lines.notify("node-1 was killed")
    for elapsed_s, text in ((10.0, "node-1 was killed"), (10.1, "boom"), (10.2, "boom")):
        lines.update(view(now, elapsed_s=elapsed_s, note=text))
    written = [text.split(maxsplit=1) for text in capsys.readouterr().err.splitlines()]
    assert written[0] == ["node-1", "was killed"]
    assert [words[0] for words in written[1:]] == ["0:10", "0:10"]
    assert written[2][1] == "boom"


def test_lines_explain_a_step_that_goes_back_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines.update(view(status(policy_status(number=19)), elapsed_s=10.0))
    for number in (10, 11):
        now = replace(policy_status(number=number), incarnation=2, resumed_at=10, repeats_to=19)
        lines.update(view(status(now), elapsed_s=10.0 + number))
    written = capsys.readouterr().err
    assert written.count("resumed from the checkpoint at step 10; steps 11–19 are repeated") == 1


def test_the_line_counts_skipped_batches() -> None:
    skipping = replace(policy_status(), skipped=1, last_skip="zero_advantage")
    expected = "step 3/10 · 1 batch skipped (zero advantage) · reward"
    assert progress_line(view(status(skipping))).startswith(expected)


def test_the_line_says_who_waits_for_what() -> None:
    assert progress_line(view(status())) == (
        "step 3/10 · reward 0.500 · staleness 0.60 (max 1) · 3,072 trajectories · 2,145 tokens/s · "
        "1 node live · trainer policy is waiting for 4 groups on node-0"
    )
    assert progress_line(view(None)).startswith("starting")
    assert progress_line(view(status(finished=True))).endswith("2,145 tokens/s · finished")
    assert (
        progress_line(view(status(), unreachable_s=8.2))
        == "no response from the dataflow for 8.0 s"
    )
    assert "reward" not in progress_line(view(status(policy_status(number=0, reward=None))))


def test_times_and_counts_are_readable() -> None:
    assert (format_clock(42.4), format_clock(3723)) == ("0:42", "1:02:03")
    assert (format_duration(0.42), format_duration(42.2), format_duration(600)) == (
        "0.4 s",
        "42 s",
        "10 min",
    )
    assert (pluralise(1, "node"), pluralise(2048, "node")) == ("1 node", "2,048 nodes")
