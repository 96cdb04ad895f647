# SPDX-License-Identifier: Apache-2.0
"""Cheats of an untrusted node: each is found within 200 samples, and honest nodes are left alone.

Three lines of defence, each with its real code: the trainer's log-probs (`signals/mismatch`), rows
generated again (`spot_checks`), and the door of the dataflow. The model is a table of logits, small
enough to sample thousands of answers with the engine's own sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.dataflow_server import POLICY, small_config

from penstock.config import RunConfig
from penstock.config.trust import SCORE_STAGE, TrustConfig
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.core.spot_checks import ALPHA, CheckCounts, SpotCheck, SpotChecks
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.rows.messages import RowLeaseRequest
from penstock.dataflow.service.trainers.messages import IncarnationRequest, PublishRequest
from penstock.dataflow.sources import slot_seeds
from penstock.rollout.decoding.sampling import SpecColumns, sample
from penstock.runs.spot_checker import CheckChooser, has_same_tokens
from penstock.seeds import derive
from penstock.trainer.signals.mismatch import NodeMismatches, ScoredTokens, measure_mismatches
from penstock.types import (
    UNTRUSTED_TAG,
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

WITHIN = 200
"""Samples of the bad node in which it must be found."""
TOKENS = 12
"""Per answer."""
VOCAB = 24
NUM_SLOTS = 4
Floats = NDArray[np.float64]

# --- the model --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: int
    seed: int
    ids: list[int]
    logprobs: list[float]


@cache
def table(version: int, size: float = 1.0) -> Floats:
    """Logits of the next token by the last one. Versions differ as steps of training do."""
    base = np.random.default_rng(7).normal(0.0, 1.5, (VOCAB, VOCAB))
    for step in range(version):
        base = base + np.random.default_rng(100 + step).normal(0.0, 0.03, base.shape)
    small = np.random.default_rng(8).normal(0.0, 1.5, base.shape)
    return size * base + (1 - size) * small


def generate(
    prompt: int, seed: int, logits: Floats, temperature: float = 1.0, num: int = TOKENS
) -> Answer:
    """As the engine does: the same sampler, the same numbers for the same seed."""
    spec = SpecColumns.of([SamplingSpec(temperature=temperature, seed=seed)])
    ids: list[int] = []
    logprobs: list[float] = []
    last = prompt
    for position in range(num):
        row = logits[last][None, :].astype(np.float32)
        token, logprob = sample(row, spec, np.array([position]))
        last = int(token[0])
        ids.append(last)
        logprobs.append(float(logprob[0]))
    return Answer(prompt, seed, ids, logprobs)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def rescored(answer: Answer, logits: Floats) -> Answer:
    """With the log-probs of this model: a cheat computes them after the fact."""
    contexts = [answer.prompt, *answer.ids[:-1]]
    logprobs = log_softmax(logits[contexts])[np.arange(len(answer.ids)), answer.ids]
    return replace(answer, logprobs=logprobs.tolist())


def reward_of(answer: Answer) -> float:
    return sum(token % 2 for token in answer.ids) / len(answer.ids)


# --- the trainer ------------------------------------------------------------------------------

Cheat = Callable[[int, int], Answer]
"""What the node delivers for (prompt, seed)."""
NOW = 12
"""The version that the trainer holds."""


def trainer_view(
    by_subject: dict[str, tuple[list[Answer], int]], rng: np.random.Generator
) -> tuple[ScoredTokens, dict[int, str]]:
    """What the trainer measures of these answers, of which each subject claims an age."""
    logprobs: list[Floats] = []
    entropies: list[Floats] = []
    said: list[Floats] = []
    ages: list[int] = []
    rows: list[int] = []
    subjects: dict[int, str] = {}
    everything = log_softmax(table(NOW))
    entropy = -(np.exp(everything) * everything).sum(axis=-1)
    for subject, (answers, age) in by_subject.items():
        for answer in answers:
            contexts = [answer.prompt, *answer.ids[:-1]]
            logprobs.append(everything[contexts, answer.ids])
            entropies.append(entropy[contexts])
            noise = rng.normal(0.0, 0.01, len(answer.ids))  # engines round
            said.append(np.array(answer.logprobs) + noise)
            ages += [age] * len(answer.ids)
            rows += [len(subjects)] * len(answer.ids)
            subjects[len(subjects)] = subject
    tokens = ScoredTokens(
        logprobs_K=np.concatenate(logprobs),
        sampling_K=np.concatenate(said),
        entropy_K=np.concatenate(entropies),
        staleness_K=np.array(ages),
        rows_K=np.array(rows),
    )
    return tokens, subjects


def samples_until_drift(cheat: Cheat, *, age: int = 0, peers_age: int = 0) -> float:
    """Samples of the bad node until the trainer finds it, and only it, among three honest ones."""
    rng, mismatches = np.random.default_rng(1), NodeMismatches()
    for seq in range(1, WITHIN // 10 + 1):
        seeds = iter(rng.integers(0, 1 << 60, 100).tolist())
        honest = table(NOW - peers_age)
        by_subject: dict[str, tuple[list[Answer], int]] = {
            f"good-{n}": (
                [generate(int(rng.integers(VOCAB)), next(seeds), honest) for _ in range(10)],
                peers_age,
            )
            for n in range(3)
        }
        answers = [cheat(int(rng.integers(VOCAB)), next(seeds)) for _ in range(10)]
        by_subject["evil"] = (answers, age)
        mismatches = mismatches.updated(measure_mismatches(*trainer_view(by_subject, rng)), seq)
        if found := mismatches.drifting():
            assert [one.subject for one in found] == ["evil"]
            return 10 * seq
    return math.inf


def constant_log_probs(prompt: int, seed: int) -> Answer:
    answer = generate(prompt, seed, table(NOW))
    return replace(answer, logprobs=[-0.7] * TOKENS)


def inflated_log_probs(prompt: int, seed: int) -> Answer:
    """Its tokens then look as if the policy had moved towards them."""
    answer = generate(prompt, seed, table(NOW))
    return replace(answer, logprobs=[one - 1.5 for one in answer.logprobs])


def old_weights(prompt: int, seed: int) -> Answer:
    return generate(prompt, seed, table(0))


def smaller_model(prompt: int, seed: int) -> Answer:
    return generate(prompt, seed, table(NOW, size=0.6))


def smaller_model_with_true_log_probs(prompt: int, seed: int) -> Answer:
    return rescored(smaller_model(prompt, seed), table(NOW))


def low_temperature(prompt: int, seed: int) -> Answer:
    return rescored(generate(prompt, seed, table(NOW), temperature=0.5), table(NOW))


def constant_text(prompt: int, seed: int) -> Answer:
    answer = Answer(prompt, seed, [1, 3, 5] * (TOKENS // 3), [0.0] * TOKENS)
    return rescored(answer, table(NOW))


SEEN_BY_TRAINER = [
    constant_log_probs,
    inflated_log_probs,
    old_weights,
    smaller_model,
    smaller_model_with_true_log_probs,
    low_temperature,
    constant_text,
]


@pytest.mark.parametrize("cheat", SEEN_BY_TRAINER, ids=lambda one: one.__name__)
def test_the_trainer_finds(cheat: Cheat) -> None:
    """Wrong log-probs, and right ones of tokens that another distribution drew."""
    assert samples_until_drift(cheat) <= WITHIN


@pytest.mark.finding(10)
@pytest.mark.parametrize("age", [1, 3])
@pytest.mark.parametrize("peers_age", [0, 1])
def test_claiming_to_be_late_does_not_hide_false_log_probs(age: int, peers_age: int) -> None:
    """Judged per age: with peers of that age against them, else against what a policy may move."""
    assert samples_until_drift(inflated_log_probs, age=age, peers_age=peers_age) <= WITHIN


def test_an_honest_node_that_is_late_is_not_taken_for_a_cheat() -> None:
    """The test above must not pass by quarantining whoever is late."""
    late = samples_until_drift(lambda p, s: generate(p, s, table(NOW - 3)), age=3)
    assert late == math.inf


# --- rows generated again ---------------------------------------------------------------------

Group = Callable[[int, tuple[int, ...]], list[Answer]]
"""What the node delivers for a prompt and the seeds of its slots."""


def honest_group(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    return [generate(prompt, seed, table(NOW)) for seed in seeds]


def copied(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    """One answer for all slots: a quarter of the work."""
    return honest_group(prompt, seeds[:1]) * len(seeds)


def cherry_picked(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    """The better of two answers."""
    pairs = [honest_group(prompt, (seed, seed + 1)) for seed in seeds]
    return [max(pair, key=reward_of) for pair in pairs]


def swapped(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    """Answers of other slots, to choose which of them meet in a group."""
    return honest_group(prompt, (*seeds[1:], seeds[0]))


def truncated(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    return [generate(prompt, seed, table(NOW), num=TOKENS // 2) for seed in seeds]


def other_prompt(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    """An easier question."""
    return honest_group((prompt + 1) % VOCAB, seeds)


def replayed(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
    """Its own answers to an earlier group."""
    return honest_group(prompt, tuple(range(len(seeds))))


SEEN_AGAIN = [copied, cherry_picked, swapped, truncated, other_prompt, replayed]


def as_trajectory(answer: Answer, slot: int = 0) -> Trajectory:
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([answer.prompt]),
        sampled_ids=token_ids(answer.ids),
        logprobs=log_probs(answer.logprobs),
        spans=(VersionSpan(start=0, end=len(answer.ids), incarnation=1, number=NOW),),
        sampling=SamplingSpec(seed=answer.seed),
        finish=FinishReason.LENGTH,
    )
    return Trajectory(
        row_id=RowId(f"p0-1.{slot}.1"),
        group_id=GroupId("p0-1"),
        slot=slot,
        epoch=1,
        attempt=1,
        node_id=NodeId("evil"),
        turns=(turn,),
        reward=None,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def samples_until_verdict(
    deliver: Group, *, compares_tokens: bool = True, share: float | None = None, most: int = WITHIN
) -> float:
    """Samples of the bad node until the dataflow does not believe it."""
    random = Random(3)
    share = TrustConfig().regenerate_share if share is None else share
    chooser = CheckChooser(share=share, draw=random.random)
    checks, num_samples = SpotChecks(lambda record: None), 0
    while num_samples < most:
        prompt = random.randrange(VOCAB)
        seeds = tuple(derive(seed, 0) for seed in slot_seeds(random.getrandbits(60), range(4)))
        expected = honest_group(prompt, seeds)
        for slot, (answer, own) in enumerate(zip(deliver(prompt, seeds), expected, strict=True)):
            num_samples += 1
            if not chooser.is_chosen("evil"):
                continue
            same = has_same_tokens(as_trajectory(answer, slot), as_trajectory(own, slot))
            chooser.checked("evil", agrees=same or not compares_tokens)
            check = SpotCheck(
                has_same_tokens=same if compares_tokens else None,
                reward_change=reward_of(answer) - reward_of(own),
                num_tokens=TOKENS,
                seconds=0.01,
            )
            if checks.record("evil", check):
                return num_samples
    return math.inf


@pytest.mark.parametrize("deliver", SEEN_AGAIN, ids=lambda one: one.__name__)
def test_generating_again_finds(deliver: Group) -> None:
    """Answers that are the policy's, but not the ones that the lease asked for."""
    assert samples_until_verdict(deliver) <= WITHIN


def test_without_equal_tokens_the_rewards_tell_who_picks_answers() -> None:
    """Engines that do not repeat themselves: rewards are compared by a sequential test. Each row is
    repeated here; at a share of 0.05 it takes twenty times as many."""

    def independent(prompt: int, seeds: tuple[int, ...]) -> list[Answer]:
        many = [[seed ^ (n << 40) for n in range(1, 9)] for seed in seeds]
        return [max(honest_group(prompt, tuple(one)), key=reward_of) for one in many]

    assert samples_until_verdict(independent, compares_tokens=False, share=1.0) <= WITHIN


# --- the door ---------------------------------------------------------------------------------

LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)
EVIL = NodeId("evil")


def untrusted_config() -> RunConfig:
    config = small_config(num_generations=NUM_SLOTS).model_dump()
    return RunConfig.model_validate(config | {"trust": {"accept_untrusted": True}})


async def start(service: DataflowService) -> None:
    request = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, request)
    published = PublishRequest(
        incarnation=1, number=0, manifest_digest="a" * 64, weights_digest="b" * 64
    )
    await service.trainers.publish(POLICY, published)
    body = RegisterRequest(
        node_id=EVIL, boot_id="s", capacity=64, policies=(), tags=(UNTRUSTED_TAG,)
    )
    await service.nodes.register(body)
    await service.rows.lease(
        SCORE_STAGE, RowLeaseRequest(request_id="w", worker="w", max_rows=1, wait_s=0.0)
    )
    await service.tick()  # notices the worker, without which nothing is issued
    await service.nodes.heartbeat(EVIL, Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,)))


async def lease(service: DataflowService, num: int) -> tuple[Grant, ...]:
    body = LeaseRequest(
        request_id="a", node_id=EVIL, boot_id="s", max_slots=num, wait_s=0, live=(LIVE,)
    )
    return (await service.nodes.lease(body)).grants


def honest_row(grant: Grant, config: RunConfig) -> Trajectory:
    """What the lease asks for."""
    sampling = SamplingSpec(**config.sampling.model_dump())
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3, 4]),
        logprobs=log_probs([-0.5, -0.25]),
        spans=(VersionSpan(start=0, end=2, incarnation=1, number=0),),
        sampling=replace(sampling, seed=derive(grant.seed, 0)),
        finish=FinishReason.STOP,
    )
    return Trajectory(
        row_id=grant.row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=EVIL,
        turns=(turn,),
        reward=None,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def forge_turn(row: Trajectory, **change: object) -> Trajectory:
    return replace(row, turns=(replace(row.turns[0], **change),))


def forge_spec(row: Trajectory, **change: object) -> Trajectory:
    return forge_turn(row, sampling=replace(row.turns[0].sampling, **change))


SPAN = VersionSpan(start=0, end=2, incarnation=1, number=0)
FORGERIES: dict[str, Callable[[Trajectory], Trajectory]] = {
    "a reward": lambda row: replace(row, reward=1.0),
    "NaN log-probs": lambda row: forge_turn(row, logprobs=log_probs([math.nan, -1.0])),
    "log-probs above 0": lambda row: forge_turn(row, logprobs=log_probs([3.0, -1.0])),
    "a version that never was": lambda row: forge_turn(row, spans=(replace(SPAN, number=7),)),
    "a lower temperature": lambda row: forge_spec(row, temperature=0.5),
    "a NaN temperature": lambda row: forge_spec(row, temperature=math.nan),
    "greedy sampling": lambda row: forge_spec(row, temperature=0.0),
    "a smaller top_k": lambda row: forge_spec(row, top_k=1),
    "a smaller top_p": lambda row: forge_spec(row, top_p=0.5),
    "its own min_p": lambda row: forge_spec(row, min_p=0.9),
    "longer answers": lambda row: forge_spec(row, max_tokens=4096),
    "more tokens than the limit": lambda row: forge_turn(
        row,
        sampled_ids=token_ids([3] * 4096),
        logprobs=log_probs([-0.5] * 4096),
        spans=(replace(SPAN, end=4096),),
    ),
    "its own stop string": lambda row: forge_spec(row, stop=("a",)),
    "its own seed": lambda row: forge_spec(row, seed=12345),
    "another slot's seed": lambda row: forge_spec(row, seed=row.turns[0].sampling.seed ^ 1),
    "a second call of its own": lambda row: replace(
        row, turns=(replace(row.turns[0], prompt_ids=token_ids([7, 7])), row.turns[0])
    ),
    "another slot": lambda row: replace(row, slot=row.slot + 1),
    "another node": lambda row: replace(row, node_id=NodeId("good")),
    "another boot": lambda row: replace(row, boot_id="other"),
}


@pytest.mark.parametrize("what", FORGERIES)
async def test_the_door_refuses(what: str, tmp_path: Path) -> None:
    """The first row with it, with a reason that names the problem."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    good, bad = await lease(service, 2)
    forged = FORGERIES[what](honest_row(bad, config))
    rows = [honest_row(good, config), forged]
    body = DeliveryRequest(
        node_id=EVIL,
        boot_id="s",
        deliveries=tuple(
            Delivery(row_id=grant.row_id, payload=memoryview(encode(row)))
            for grant, row in zip((good, bad), rows, strict=True)
        ),
    )
    results = (await service.nodes.deliver(body)).results
    assert [one.status for one in results] == [DeliveryStatus.STORED, DeliveryStatus.INVALID]
    assert results[1].detail
    service.close()


async def test_a_row_delivered_again_counts_once(tmp_path: Path) -> None:
    """A replay is a duplicate, other bytes are a conflict; the first ones stay."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    [grant] = await lease(service, 1)
    row = honest_row(grant, config)
    other = forge_turn(row, sampled_ids=token_ids([5, 6]))
    statuses: list[DeliveryStatus] = []
    for one in (row, row, other):
        delivery = Delivery(row_id=grant.row_id, payload=memoryview(encode(one)))
        body = DeliveryRequest(node_id=EVIL, boot_id="s", deliveries=(delivery,))
        statuses += [result.status for result in (await service.nodes.deliver(body)).results]
    kinds = DeliveryStatus
    assert statuses == [kinds.STORED, kinds.DUPLICATE, kinds.CONFLICT]
    assert service.nodes.trajectories == 1
    service.close()


async def test_an_unscored_row_is_not_trained_before_the_trusted_side_scored_it(
    tmp_path: Path,
) -> None:
    """A group with rows of strangers waits for the stage; a trusted node's reward needs none."""
    config = untrusted_config()
    assert config.has_score_stage and config.is_scored_by_nodes
    service = build(config, tmp_path)
    await start(service)
    grants = await lease(service, NUM_SLOTS)
    assert len({grant.group_id for grant in grants}) == 1
    body = DeliveryRequest(
        node_id=EVIL,
        boot_id="s",
        deliveries=tuple(
            Delivery(row_id=grant.row_id, payload=memoryview(encode(honest_row(grant, config))))
            for grant in grants
        ),
    )
    await service.nodes.deliver(body)
    [consumer] = service.coordinator.consumers.values()
    assert consumer.num_admitted == 0 and grants[0].group_id in service.coordinator.open
    service.close()


# --- honest nodes -----------------------------------------------------------------------------

NUM_HONEST = 4_000
"""With none quarantined, the rate is below 0.075 % at 95 % confidence (rule of three)."""
POOL = 80
BATCHES = 10
FEW_TOKENS = 8
"""Size of the vocabulary here: the time goes into drawing."""


def honest_batches(rng: np.random.Generator) -> Iterator[tuple[ScoredTokens, dict[int, str]]]:
    """A pool with engines of different precision, rare large errors and tokens of four ages."""
    precision = rng.uniform(0.005, 0.02, POOL)
    lateness = rng.dirichlet([4.0, 3.0, 0.5, 0.1], POOL)
    for _ in range(BATCHES):
        num = POOL * 60
        row_K = np.repeat(np.arange(POOL), 60)
        age_K = np.concatenate([rng.choice(4, 60, p=lateness[n]) for n in range(POOL)])
        now_KV = rng.normal(0.0, 1.5, (num, FEW_TOKENS))
        moved_KV = rng.normal(0.0, 1.0, now_KV.shape) * (0.05 * age_K)[:, None]
        then_KV = log_softmax((now_KV + moved_KV) * (1 - 0.01 * age_K)[:, None])
        now_KV = log_softmax(now_KV)
        token_K = (then_KV + rng.gumbel(size=then_KV.shape)).argmax(axis=1)
        pick = (np.arange(num), token_K)
        error_K = rng.standard_t(5, num) * precision[row_K]
        yield (
            ScoredTokens(
                logprobs_K=now_KV[pick],
                sampling_K=then_KV[pick] + error_K,
                entropy_K=-(np.exp(now_KV) * now_KV).sum(axis=1),
                staleness_K=age_K,
                rows_K=row_K,
            ),
            {n: f"n{n}" for n in range(POOL)},
        )


MANY = pytest.mark.parametrize("num_nodes", [400, pytest.param(NUM_HONEST, marks=pytest.mark.slow)])


@MANY
def test_the_trainer_leaves_honest_nodes_alone(num_nodes: int) -> None:
    """4,000 nodes (400 in CI), each judged after every batch: none is quarantined."""
    num_quarantined = 0
    for pool in range(num_nodes // POOL):
        mismatches = NodeMismatches()
        for seq, batch in enumerate(honest_batches(np.random.default_rng(pool)), start=1):
            mismatches = mismatches.updated(measure_mismatches(*batch), seq)
            found = mismatches.drifting()
            num_quarantined += len(found)
            mismatches = mismatches.without_reported(found)
    assert num_quarantined == 0


@MANY
def test_spot_checks_leave_honest_nodes_alone(num_nodes: int) -> None:
    """4,000 nodes (400 in CI) with 200 checks each, at half the tolerated rounding."""
    rng = np.random.default_rng(5)
    tolerated = TrustConfig().tolerated_share
    num_quarantined = 0
    for _ in range(num_nodes):
        differ = (rng.random(200) < tolerated / 2).cumsum().tolist()
        better = (rng.random(200) < 0.5).cumsum().tolist()
        for num, (different, wins) in enumerate(zip(differ, better, strict=True), start=1):
            counts = CheckCounts(
                num_checked=num,
                num_compared=num,
                num_different=different,
                num_better=wins,
                num_worse=num - wins,
            )
            if counts.verdict(tolerated):
                num_quarantined += 1
                break
    assert num_quarantined <= max(num_nodes * 2 * ALPHA, 0.001 * num_nodes - 1)
