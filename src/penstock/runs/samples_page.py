# SPDX-License-Identifier: Apache-2.0
"""Samples as one HTML file: no script, no network, light and dark, wide and narrow.

Everything that a model or a task wrote is escaped; the page's own policy forbids scripts and
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from penstock.runs.decoded import DecodedTurn
from penstock.runs.samples import Sample
from penstock.types import ToolUse
from penstock.wire.codec import encode_json

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --card: #f6f7f9; --line: #d9dde3; --text: #1b1f24;
  --dim: #5b6570; --good: #12703a; --bad: #b3261e; --model: #0b57a4; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --line: #343a41;
  --text: #e6e8ea; --dim: #9aa4ae; --good: #6fcf97; --bad: #ff8a80; --model: #8ab8f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--bg); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
p { margin: .25rem 0 1rem; color: var(--dim); }
article { border: 1px solid var(--line); border-radius: .5rem; margin: 0 0 1rem;
  background: var(--card); overflow: hidden; }
header { display: flex; flex-wrap: wrap; gap: .25rem .9rem; padding: .5rem .75rem;
  border-bottom: 1px solid var(--line); font-size: .875rem; color: var(--dim); }
header b { color: var(--text); } .good { color: var(--good); } .bad { color: var(--bad); }
section { padding: .5rem .75rem; } section + section { border-top: 1px dashed var(--line); }
h2 { font-size: .75rem; letter-spacing: .03em; margin: 0; color: var(--dim); font-weight: 600; }
pre { margin: .1rem 0 .5rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .875rem/1.45 ui-monospace, monospace; }
pre.model { color: var(--model); } summary { cursor: pointer; color: var(--dim); }
"""
LONG_CHARS = 1500
"""Longer prompts are folded."""


def render_page(title: str, samples: Sequence[Sample], note: str = "") -> str:
    """A complete HTML document."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>samples: {len(samples):,}. {escape(note)}</p>"
    )
    return head + "".join(map(_article, samples)) + "</body></html>\n"


def _article(sample: Sample) -> str:
    parts = [f"<article><header>{''.join(_facts(sample))}</header>"]
    if sample.task:
        parts.append(f"<section>{_block('task', encode_json(sample.task).decode())}</section>")
    if sample.detail:
        parts.append(f"<section>{_block('why', sample.detail)}</section>")
    parts += [f"<section>{_tool(use)}</section>" for use in sample.tool_uses if use.turn < 0]
    for index, turn in enumerate(sample.turns):
        used = "".join(_tool(use) for use in sample.tool_uses if use.turn == index)
        parts.append(f"<section>{''.join(_turn(turn))}{used}</section>")
    return "".join(parts) + "</article>"


def _facts(sample: Sample) -> Iterator[str]:
    steps = ", ".join(map(str, sample.steps))
    yield f"<b>{escape(sample.row_id)}</b>"
    if sample.reward is not None:
        yield f"<b>reward {sample.reward:.4g}</b>"
    for role, reward in sample.role_rewards.items():
        yield f"<span>{escape(role)} {reward:.4g}</span>"
    kind = "bad" if sample.outcome == "failed" else "good" if sample.outcome == "completed" else ""
    yield f'<span class="{kind}">{escape(sample.outcome)}</span>'
    at = datetime.fromtimestamp(sample.delivered_at, UTC)
    for text in (
        f"step {steps}" if steps else sample.fate,
        ", ".join(sample.versions),
        sample.node,
        f"tokens: {sample.num_tokens:,}",
        f"{at:%Y-%m-%d %H:%M:%S} UTC",
        "" if sample.state == "stored" else f"text {sample.state}",
    ):
        if text:
            yield f"<span>{escape(text)}</span>"


def _turn(turn: DecodedTurn) -> Iterator[str]:
    role = f" as {turn.role}" if turn.role else ""
    if len(turn.prompt) > LONG_CHARS:
        summary = f"prompt, {len(turn.prompt):,} characters"
        yield f"<details><summary>{summary}</summary>{_block('prompt', turn.prompt)}</details>"
    elif turn.prompt:
        yield _block("prompt", turn.prompt)
    if turn.reasoning:
        yield _block("reasoning", turn.reasoning)
    head = f"{turn.policy}{role} · {', '.join(turn.versions)} · {turn.finish}"
    head += f" · agent {turn.agent}" if turn.agent else ""
    head += "" if turn.reward is None else f" · reward {turn.reward:.4g}"
    yield _block(head, turn.answer, "model")
    for call in turn.tool_calls:
        yield _block("tool call", f"{call.name}({call.arguments})", "model")


def _tool(use: ToolUse) -> str:
    outcome = "error" if use.is_error else "result"
    agent = f" · agent {use.agent}" if use.agent else ""
    head = f"{outcome} of {use.name} · {use.seconds:.2f} s{agent}"
    return _block(head, f"{use.name}({use.arguments})\n{use.result}")


def _block(head: str, text: str, kind: str = "") -> str:
    return f'<h2>{escape(head)}</h2><pre class="{kind}">{escape(text)}</pre>'
