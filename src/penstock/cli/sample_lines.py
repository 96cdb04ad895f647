# SPDX-License-Identifier: Apache-2.0
"""Samples as lines in a terminal: safe to print, whatever the model wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from penstock.cli.output import pluralise, printable
from penstock.runs.decoded import DecodedTurn
from penstock.runs.samples import Sample
from penstock.wire.codec import encode_json

MAX_CHARS = 4000
"""Longer texts are cut in the middle; `--html` and `--json` show all of them."""


def print_samples(found: Sequence[Sample]) -> None:
    """For people, in a terminal."""
    console = Console(soft_wrap=True, highlight=False)
    for sample in found:
        for line in sample_lines(sample):
            console.print(line)
        console.print()


def sample_lines(sample: Sample) -> Iterator[Text]:
    """Its facts, its task, then each turn."""
    yield _head(sample)
    if sample.task:
        yield Text.assemble(("  task    ", "dim"), _clean(encode_json(sample.task).decode()))
    if sample.detail:
        yield Text.assemble(("  why     ", "dim"), (_clean(sample.detail), "red"))
    for turn in sample.turns:
        yield from _turn_lines(turn)


def _head(sample: Sample) -> Text:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    steps = ", ".join(map(str, sample.steps))
    colour = {"completed": "green", "failed": "red"}.get(sample.outcome, "yellow")
    rest = (
        f"step {steps}" if steps else sample.fate,
        ", ".join(sample.versions),
        printable(sample.node),
        pluralise(sample.num_tokens, "token"),
        "" if sample.state == "stored" else f"text {sample.state}",
    )
    return Text.assemble(
        (sample.row_id, "bold"),
        "  ",
        (reward, "bold"),
        "  ",
        (sample.outcome, colour),
        ("  " + " · ".join(filter(None, rest)), "dim"),
    )


def _turn_lines(turn: DecodedTurn) -> Iterator[Text]:
    if turn.prompt:
        yield Text.assemble(("  prompt  ", "dim"), (_clean(turn.prompt), ""))
    if turn.reasoning:
        yield Text.assemble(("  thinks  ", "dim"), (_clean(turn.reasoning), "italic dim"))
    name = f"{turn.role or turn.policy}"[:8]
    yield Text.assemble((f"  {name:<8}", "dim"), (_clean(turn.answer), "cyan"))
    for call in turn.tool_calls:
        yield Text.assemble(
            ("  calls   ", "dim"), (_clean(f"{call.name}({call.arguments})"), "magenta")
        )


def _clean(text: str) -> str:
    """Without control characters, cut in the middle, later lines indented."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n… {left_out:,} characters; --html shows them …\n{text[-half:]}"
    return printable(text).replace("\n", "\n          ")
