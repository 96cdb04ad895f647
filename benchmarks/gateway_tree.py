# SPDX-License-Identifier: Apache-2.0
"""What the tree of a session saves: bytes of its record against a record with every call in full,
and tokens that the trainer computes again against one sequence per call.

Agents talk in process to the real gateway; the engine only draws letters. They go on with their
conversation, ask a sub-agent, go back to an earlier point, or sum up what was said."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.harness import log_line, result
from benchmarks.local_run import quiet
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.gateway.session import Session
from penstock.trainer.samples import make_samples
from penstock.types import (
    FinishReason,
    GroupId,
    JsonObject,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
)
from penstock.wire.codec import encode

POLICY = PolicyName("policy")
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant{{ '\n' }}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_sessions: int = 64
    num_turns: int = 20
    question_tokens: int = 200
    """Mean of what an agent adds per call; answers too are of random length."""
    answer_tokens: int = 100
    sub_agent: float = 0.1
    go_back: float = 0.1
    sum_up: float = 0.05
    """Chances of each before a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCost:
    bytes_tree: int
    bytes_full: int
    tokens_tree: int
    tokens_full: int
    tokens_trained: int
    num_calls: int
    num_branches: int
    ask_us: Sequence[Sequence[float]]
    """Of each turn number, over all sessions."""


class Letters:
    """Draws letters and ends by itself."""

    def __init__(self, setting: Setting, end_id: int) -> None:
        self._setting = setting
        self._end_id = end_id
        self.taken_s = 0.0

    async def __call__(self, request: GenerationRequest) -> Completion:
        began_at = time.perf_counter()
        draw = random.Random(request.sampling.seed)
        size = draw.randint(1, 2 * self._setting.answer_tokens)
        ids = [*(draw.randint(65, 90) for _ in range(size)), self._end_id]
        made = Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs([-1.0] * len(ids)),
            spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=0),),
            finish=FinishReason.STOP,
        )
        self.taken_s = time.perf_counter() - began_at
        return made


def _renderer() -> Renderer:
    """One token per byte: what is measured are counts, and a byte is as good as a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(BPE(vocab={c: at for at, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    return Renderer(tokenizer, TEMPLATE, stop_ids=frozenset({tokenizer.token_to_id(END)}))


class _Agent:
    def __init__(self, setting: Setting, draw: random.Random) -> None:
        self._setting = setting
        self._draw = draw

    async def run(self, session: Session, engine: Letters, ask_us: list[list[float]]) -> None:
        messages = [self._ask()]
        for number in range(self._setting.num_turns):
            began_at = time.perf_counter()
            answer = await session.chat(messages)
            taken_s = time.perf_counter() - began_at - engine.taken_s
            ask_us[number].append(1e6 * taken_s)
            messages.append({"role": "assistant", "content": answer.text})
            messages = [*self._history(messages), self._ask()]

    def _history(self, messages: list[JsonObject]) -> list[JsonObject]:
        setting, what = self._setting, self._draw.random()
        if what < setting.sub_agent:
            return []
        if what < setting.sub_agent + setting.go_back:
            return messages[: 2 * self._draw.randint(1, len(messages) // 2)]
        if what < setting.sub_agent + setting.go_back + setting.sum_up:
            return [self._ask(), messages[-1]]
        return messages

    def _ask(self) -> JsonObject:
        size = self._draw.randint(1, 2 * self._setting.question_tokens)
        return {"role": "user", "content": "".join(self._draw.choices("abcdefgh ", k=size))}


async def measure(setting: Setting, *, seed: int = 0) -> TreeCost:
    renderer = _renderer()
    engine = Letters(setting, min(renderer.stop_ids))
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, renderer)
    ask_us: list[list[float]] = [[] for _ in range(setting.num_turns)]
    rows: list[tuple[Turn, ...]] = []
    for number in range(setting.num_sessions):
        sampling = SamplingSpec(max_tokens=4 * setting.answer_tokens)
        session = gateway.open(policies=[POLICY], sampling=sampling, seed=seed + number)
        await _Agent(setting, random.Random(seed + number)).run(session, engine, ask_us)
        rows.append(gateway.close(session))
    trees = [_trajectory(turns) for turns in rows]
    fulls = [_trajectory(_in_full(turns)) for turns in rows]
    tree, full = make_samples(enumerate(trees), POLICY), make_samples(enumerate(fulls), POLICY)
    assert tree.num_trained == full.num_trained, "both train every sampled token once"
    return TreeCost(
        bytes_tree=sum(len(encode(row)) for row in trees),
        bytes_full=sum(len(encode(row)) for row in fulls),
        tokens_tree=len(tree.ids_T),
        tokens_full=len(full.ids_T),
        tokens_trained=tree.num_trained,
        num_calls=sum(map(len, rows)),
        num_branches=sum(t.parent != at - 1 for row in rows for at, t in enumerate(row)),
        ask_us=ask_us,
    )


def _in_full(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Each call with its whole prompt, as a proxy that knows no tree would keep it."""
    contexts: list[list[int]] = []
    calls: list[Turn] = []
    for turn in turns:
        prompt = [*(contexts[turn.parent] if turn.parent >= 0 else ()), *view_ids(turn.prompt_ids)]
        contexts.append([*prompt, *view_ids(turn.sampled_ids)])
        calls.append(replace(turn, parent=-1, prompt_ids=token_ids(prompt)))
    return tuple(calls)


def _trajectory(turns: tuple[Turn, ...]) -> Trajectory:
    return Trajectory(
        row_id=RowId("p0-0.0.0"),
        group_id=GroupId("p0-0"),
        slot=0,
        epoch=0,
        attempt=1,
        node_id=NodeId("node"),
        turns=turns,
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sessions, for a look")
    parser.add_argument("--folder", help="not used: nothing is written")
    options = parser.parse_args()
    quiet()
    setting = Setting(num_sessions=8) if options.quick else Setting()
    found = asyncio.run(measure(setting))
    log_line(
        f"{found.num_calls} calls, {found.num_branches} branches: {found.bytes_tree:,} bytes "
        f"against {found.bytes_full:,}, {found.tokens_tree:,} tokens against {found.tokens_full:,}"
    )
    result(
        bytes_ratio=found.bytes_tree / found.bytes_full,
        token_ratio=found.tokens_tree / found.tokens_full,
        bytes_tree=found.bytes_tree,
        bytes_full=found.bytes_full,
        tokens_tree=found.tokens_tree,
        tokens_full=found.tokens_full,
        tokens_trained=found.tokens_trained,
        calls=found.num_calls,
        branches=found.num_branches,
        ask_us_first=median(found.ask_us[0]),
        ask_us_last=median(found.ask_us[-1]),
    )


if __name__ == "__main__":
    main()
