# SPDX-License-Identifier: Apache-2.0
"""Random sessions of random agents over three kinds of templates: every id that the engine saw and
sampled is on the record, each call continues what the documentation says it continues, and each
sampled token is trained once, in its own context.

    PENSTOCK_SESSIONS=1000 pytest tests/unit/gateway/test_exactness.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.gateway.bpe import END, PAD, START, id_of, renderer, split_anyhow

from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.gateway.model_calls import Answer, Call, Delta
from penstock.gateway.session import Session
from penstock.gateway.template_probe import TOOL
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
    Version,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
    view_log_probs,
)

NUM_SESSIONS = int(os.environ.get("PENSTOCK_SESSIONS", "60"))
NUM_CALLS = 12
POLICY = PolicyName("policy")
KINDS = ("append-only", "strips-thinking", "rewrites")
WORDS = ("rain", "größe", " 雨", "🌧️", "\n", "  ", "<", ">", "<|im_", START, "sun;", '{"a": 1}')


@dataclass(slots=True)
class Recorder:
    """Answers at random, in pieces no tokenizer would choose, and records every call."""

    rng: random.Random
    prompts: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    num_sampled: int = 0
    num_answers: int = 0

    async def __call__(self, request: GenerationRequest) -> Completion:
        ids, finish = self._sample()
        first = self.num_sampled
        self.num_sampled += len(ids)
        self.prompts[token_ids(ids)] = list(request.prompt_ids)
        version = Version(policy=request.policy, incarnation=1, number=0)
        at = 0
        while request.on_chunk is not None and at < len(ids):
            size = self.rng.randint(1, 5)
            request.on_chunk(
                TokenChunk(sampled_ids=ids[at : at + size], logprobs=[], version=version)
            )
            at += size
        await asyncio.sleep(0)
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs(-float(first + at) for at in range(len(ids))),
            spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=0),),
            finish=finish,
        )

    def _sample(self) -> tuple[list[int], FinishReason]:
        rng = self.rng
        self.num_answers += 1
        parts: list[str | bytes] = []
        if rng.random() < 0.4:
            parts.append(f"<think>{rng.choice(WORDS)}hm{rng.choice(WORDS)}</think>")
        parts.append(f"{rng.choice(WORDS)}{self.num_answers:04d}{rng.choice(WORDS)}")
        if rng.random() < 0.3:
            space = rng.choice(["", " ", "\n  "])
            call = f'{{"name":{space}"look", "arguments":{space}{{"n": {self.num_answers}}}}}'
            parts.append(f"<tool_call>{space}{call}{space}</tool_call>")
        if rng.random() < 0.1:
            parts.append(rng.randbytes(3))  # invalid UTF-8
        ids = [token for part in parts for token in split_anyhow(part, rng)]
        if rng.random() < 0.1:
            ids.insert(rng.choice([0, len(ids)]), id_of(PAD))
        if rng.random() < 0.2:  # cut by length, maybe in the middle of a character
            return ids[: max(1, len(ids) - rng.randrange(2))], FinishReason.LENGTH
        return [*ids, id_of(END)], FinishReason.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a conversation, with expectations of the test."""

    message: JsonObject
    turn: int = -1
    """The turn whose answer it repeats, with the same preceding messages; -1 for none."""
    has_reasoning: bool = False
    is_spaced: bool = False
    """Its sampled text has leading or trailing white space."""


def expected_parent(kind: str, conversation: Sequence[Said]) -> int:
    """As documented: the last answer that the template leaves as sampled, with its unchanged
    history."""
    last_user = max(at for at, said in enumerate(conversation) if said.message["role"] == "user")
    parent, is_stripped = -1, False
    for at, said in enumerate(conversation):
        if said.message["role"] == "user":
            is_stripped = False
        is_stripped |= kind == "strips-thinking" and at < last_user and said.has_reasoning
        is_trimmed = kind == "rewrites" and said.is_spaced
        if said.turn >= 0 and not is_stripped and not is_trimmed:
            parent = said.turn
    return parent


class Agent:
    def __init__(self, session: Session, kind: str, rng: random.Random) -> None:
        self.session = session
        self.kind = kind
        self.rng = rng
        self.expected: dict[int, int] = {}
        self.num_messages: dict[int, int] = {}
        self.num_heard = 0

    async def run(self) -> None:
        conversation = [self._user()]
        for _ in range(NUM_CALLS):
            answer = (await self._ask(conversation))[-1]
            if self.rng.random() < 0.1:
                self.session.mark_unreached(answer.turn)
                continue
            conversation = self._next([*conversation, self._told(answer)])

    async def _ask(self, conversation: Sequence[Said]) -> list[Answer]:
        messages = [said.message for said in conversation]
        parent = expected_parent(self.kind, conversation)
        count = 2 if self.rng.random() < 0.1 else 1
        answers = await asyncio.gather(*(self._listen(messages) for _ in range(count)))
        for answer in answers:
            self.expected[answer.turn] = parent
            self.num_messages[answer.turn] = len(messages)
        return answers

    async def _listen(self, messages: list[JsonObject]) -> Answer:
        heard: list[Delta] = []
        answer = await self.session.call(Call(messages=messages, tools=[TOOL]), heard.append)
        assert answer.text.startswith("".join(delta.text for delta in heard))
        assert answer.reasoning.startswith("".join(delta.reasoning for delta in heard))
        self.num_heard += len(heard)
        return answer

    def _told(self, answer: Answer) -> Said:
        message: JsonObject = {"role": "assistant", "content": answer.text}
        is_whole = not answer.reasoning or self.rng.random() < 0.7
        if answer.reasoning and is_whole:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
        turn = self.session.turn(answer.turn)
        sampled = [token for token in view_ids(turn.sampled_ids) if token != id_of(END)]
        text = self.session.renderer(POLICY).decode(sampled)
        return Said(
            message=message,
            turn=answer.turn if is_whole else -1,
            has_reasoning="reasoning_content" in message,
            is_spaced=text.strip() != text,
        )

    def _next(self, conversation: list[Said]) -> list[Said]:
        what = self.rng.random()
        if what < 0.1:  # a sub-agent, or a new conversation
            return [self._user()]
        if what < 0.2:  # compaction: the start becomes a summary
            return [self._user(), replace(conversation[-1], turn=-1), self._user()]
        if what < 0.3:  # a rewritten answer, which invalidates everything after it
            at = self.rng.choice([at for at, said in enumerate(conversation) if _is_answer(said)])
            changed = {**conversation[at].message, "content": "no" + self._text()}
            rest = [replace(said, turn=-1) for said in conversation[at + 1 :]]
            lost = replace(conversation[at], message=changed, turn=-1)
            return [*conversation[:at], lost, *rest, self._user()]
        last = conversation[-1].message
        if "tool_calls" in last and self.rng.random() < 0.8:
            name = last["tool_calls"][0]["id"]
            result = {"role": "tool", "content": self._text(), "tool_call_id": name}
            return [*conversation, Said(message=result)]
        return [*conversation, self._user()]

    def _user(self) -> Said:
        text = f"{self._text()}{self.rng.random()}{self._text()}"
        return Said(message={"role": "user", "content": text})

    def _text(self) -> str:
        return "".join(self.rng.choices(WORDS, k=3))


def _is_answer(said: Said) -> bool:
    return said.message["role"] == "assistant"


# --- invariants ---------------------------------------------------------------------------------


def check_records(engine: Recorder, agent: Agent) -> None:
    """Each turn's context, assembled from the tree, equals the prompt sent to the engine."""
    turns = agent.session.turns()
    for index, turn in enumerate(turns):
        prompts: list[int] = []
        context: list[int] = []
        at = index
        while at >= 0:
            part = turns[at]
            context[:0] = view_ids(part.sampled_ids) if at != index else ()
            context[:0] = view_ids(part.prompt_ids)
            prompts += view_ids(part.prompt_ids)
            at = part.parent
        assert context == engine.prompts[turn.sampled_ids]
        # The tools, each message and the answer start with a control token; what agents write never
        # is one.
        assert prompts.count(id_of(START)) == agent.num_messages[index] + 2
        assert turn.parent == agent.expected[index], f"turn {index}"


def check_training(engine: Recorder, agent: Agent) -> None:
    """Each sampled token that reached its agent is trained once, behind its own context."""
    turns = agent.session.turns()
    trajectory = Trajectory(
        row_id=RowId("p0-0.0.0"),
        group_id=GroupId("p0-0"),
        slot=0,
        epoch=0,
        attempt=1,
        node_id=NodeId("n"),
        turns=turns,
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )
    samples = make_samples([(0, trajectory)], POLICY)
    trained = [int(-value) for value in samples.logprobs_T[samples.mask_T]]
    first = {int(-view_log_probs(turn.logprobs)[0]): turn for turn in turns if turn.reached_agent}
    wanted = [at + n for at, turn in first.items() for n in range(len(view_ids(turn.sampled_ids)))]
    assert sorted(trained) == sorted(wanted)
    for start, end in zip(samples.starts_S, samples.ends_S, strict=True):
        for at in range(start, end):
            turn = first.get(int(-samples.logprobs_T[at])) if samples.mask_T[at] else None
            if turn is not None:
                prompt = engine.prompts[turn.sampled_ids]
                assert samples.ids_T[start:at].tolist() == prompt
                size = len(view_ids(turn.sampled_ids))
                assert samples.ids_T[at : at + size].tolist() == list(view_ids(turn.sampled_ids))


@pytest.mark.parametrize("kind", KINDS)
async def test_every_token_is_on_the_record_as_the_engine_had_it(kind: str) -> None:
    template = renderer(kind)
    num_turns = num_branches = num_heard = 0
    for seed in range(NUM_SESSIONS // len(KINDS) + 1):
        rng = random.Random(f"{kind} {seed}")
        engine = Recorder(rng)
        gateway = Gateway(engine)
        gateway.set_renderer(POLICY, template)
        session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=999), seed=seed)
        agent = Agent(session, kind, rng)
        await agent.run()
        check_records(engine, agent)
        check_training(engine, agent)
        turns = gateway.close(session)
        num_turns += len(turns)
        num_branches += sum(turn.parent != index - 1 for index, turn in enumerate(turns))
        num_heard += agent.num_heard
    assert num_turns > NUM_CALLS * (NUM_SESSIONS // len(KINDS))
    assert 0 < num_branches < num_turns and num_heard > num_turns
