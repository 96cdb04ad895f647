# SPDX-License-Identifier: Apache-2.0
"""Samples as lines in a terminal: safe to print, whatever the model wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from penstock.cli.console import SafeConsole
from penstock.cli.output import pluralise, printable
from penstock.runs.agent_tree import AgentNode
from penstock.runs.decoded import DecodedTurn
from penstock.runs.samples import Sample
from penstock.types import ToolUse
from penstock.wire.codec import encode_json

MAX_CHARS = 4000
"""Longer texts are cut in the middle; `--html` and `--json` show all of them."""


def print_samples(found: Sequence[Sample]) -> None:
    """For people, in a terminal."""
    console = SafeConsole(soft_wrap=True)
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
    for index in range(-1, len(sample.turns)):
        if index >= 0:
            yield from _turn_lines(sample.turns[index])
        yield from (_tool_line(use) for use in sample.tool_uses if use.turn == index)


def _head(sample: Sample) -> Text:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    roles = "".join(f" · {printable(r)} {own:.4g}" for r, own in sample.role_rewards.items())
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
        (printable(sample.row_id), "bold"),
        "  ",
        (reward, "bold"),
        (roles, ""),
        "  ",
        (sample.outcome, colour),
        ("  " + " · ".join(filter(None, rest)), "dim"),
    )


def _turn_lines(turn: DecodedTurn) -> Iterator[Text]:
    if turn.prompt:
        yield Text.assemble(("  prompt  ", "dim"), (_clean(turn.prompt), ""))
    if turn.reasoning:
        yield Text.assemble(("  thinks  ", "dim"), (_clean(turn.reasoning), "italic dim"))
    name = printable(f"{turn.role or turn.policy}")[:8]
    facts = [f"agent {printable(turn.agent)}"] if turn.agent else []
    facts += [] if turn.reward is None else [f"reward {turn.reward:.4g}"]
    more = f"  ({', '.join(facts)})" if facts else ""
    yield Text.assemble((f"  {name:<8}", "dim"), (_clean(turn.answer), "cyan"), (more, "dim"))
    for call in turn.tool_calls:
        yield Text.assemble(
            ("  calls   ", "dim"), (_clean(f"{call.name}({call.arguments})"), "magenta")
        )


def _tool_line(use: ToolUse) -> Text:
    """What a tool was given and returned, and how long it took."""
    call = _clean(f"{use.name}({use.arguments})")
    style = "red" if use.is_error else ""
    return Text.assemble(
        ("  tool    ", "dim"),
        (call, "magenta"),
        (f" {use.seconds:.2f} s → ", "dim"),
        (_clean(use.result), style),
    )


def tree_lines(root: AgentNode) -> Iterator[Text]:
    """The sub-agents of a trajectory, indented under the agent that spawned them."""

    def lines(node: AgentNode, depth: int) -> Iterator[Text]:
        name = f"agent {printable(node.path)}" if node.path else "workflow"
        facts = [", ".join(map(printable, node.roles))] if node.roles else []
        facts += [pluralise(node.num_turns, "turn"), pluralise(node.num_tokens, "token")]
        facts += [] if node.reward is None else [f"reward {node.reward:.4g}"]
        yield Text.assemble("  " * (depth + 1), (name, "bold"), ("  " + " · ".join(facts), "dim"))
        for child in node.children:
            yield from lines(child, depth + 1)

    yield from lines(root, 0)


def _clean(text: str) -> str:
    """Without control characters, cut in the middle, later lines indented."""
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n… {left_out:,} characters; --html shows them …\n{text[-half:]}"
    return printable(text).replace("\n", "\n          ")
