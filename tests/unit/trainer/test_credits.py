# SPDX-License-Identifier: Apache-2.0
"""Shipped credit by turn, role, step score and KL, on a ragged batch, against plain loops over the
trajectories it was cut from."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from tests.unit.trainer import oracles
from tests.unit.trainer.doubles import (
    POLICY,
    VOCAB_SIZE,
    Sealed,
    make_trajectory,
    make_turn,
    random_batch,
)
from tests.unit.trainer.stage_makers import of, stage

from penstock.config.builtin_stages import declaration_of
from penstock.dataflow.service.nodes.validate import summarise
from penstock.errors import ConfigError
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.pipeline import credits
from penstock.trainer.pipeline.functions import find_function
from penstock.trainer.pipeline.layout import Columns, Layout, Sum
from penstock.trainer.pipeline.run import bind
from penstock.trainer.ranks.group import SingleRank
from penstock.types import (
    FinishReason,
    GroupId,
    Manifest,
    OutcomeKind,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SealedGroup,
    Turn,
)
from penstock.wire.codec import encode

NAN = math.nan
STAGE_FUNCTIONS_MODULE = "penstock.trainer.pipeline.credits"
OTHER = PolicyName("other")
Credit = dict[tuple[int, int], float]
"""By row and turn."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A row, as a test says it."""

    turns: tuple[Turn, ...]
    reward: float
    is_gone: bool = False


def turn(length: int, role: str = "", parent: int = -1, **more: Any) -> Turn:
    """An answer of so many tokens to a prompt of two."""
    sampled = [3 + index % 11 for index in range(length)]
    made = make_turn([1, 2], sampled, parent=parent, logprobs=[-0.5] * length)
    return replace(made, role=role, **more)


def chain(*parts: tuple[int, str]) -> tuple[Turn, ...]:
    return tuple(turn(length, role, index - 1) for index, (length, role) in enumerate(parts))


def seal(groups: Sequence[Sequence[Attempt]]) -> Sealed:
    """As the ledger would: what it tells of a row is what it finds in it."""
    sealed: list[SealedGroup] = []
    rows: list[RowPayload] = []
    for index, members in enumerate(groups):
        summaries: list[RowSummary] = []
        for slot, attempt in enumerate(members):
            name = f"p0-{index}.{slot}.1"
            record = make_trajectory(*attempt.turns, name=name)
            found = summarise(record, "d", lambda *_: True)
            assert isinstance(found, RowSummary), found
            payload = encode(record)
            served = None if attempt.is_gone else payload
            rows.append(RowPayload(row_id=RowId(name), payload=served))
            summaries.append(
                RowSummary(
                    row_id=RowId(name),
                    digest=blake3(payload).hexdigest(),
                    reward=attempt.reward,
                    outcome=OutcomeKind.COMPLETED,
                    sampled=found.sampled,
                    versions=found.versions,
                    roles=found.roles,
                )
            )
        group_id = GroupId(f"p0-{index}")
        sealed.append(SealedGroup(group_id=group_id, task_key="", rows=tuple(summaries)))
    manifest = Manifest(consumer=POLICY, seq=1, trains_from=0, groups=tuple(sealed))
    return Sealed(manifest=manifest, rows=tuple(rows))


LOST = {"reached_agent": False}
GROUPS: tuple[tuple[Attempt, ...], ...] = (
    (
        Attempt(turns=chain((3, "plan"), (2, "act"), (4, "act")), reward=1.0),
        Attempt(turns=chain((2, "act")), reward=0.0),
        Attempt(turns=chain((2, "plan"), (3, "act")), reward=NAN),
        Attempt(
            turns=(turn(2, "plan"), turn(9, "judge", 0, policy=OTHER), turn(3, "act", 1)),
            reward=0.25,
        ),
        Attempt(turns=chain((1, "plan"), (2, "act")), reward=0.75, is_gone=True),
    ),
    (
        Attempt(turns=(turn(4, "act", **LOST),), reward=0.5),
        # Its third turn begins afresh, so it is cut, and stands, before the first two.
        Attempt(
            turns=(turn(1, "plan"), turn(2, "act", 0), turn(5, "plan"), turn(1, "act", 1)),
            reward=0.125,
        ),
        Attempt(turns=chain((2, "act"), (1, "plan")), reward=1.0),
    ),
    (Attempt(turns=chain((2, "plan"), (2, "act")), reward=0.5),),
)
ROWS = [attempt for group in GROUPS for attempt in group]
GROUP_OF = [index for index, group in enumerate(GROUPS) for _ in group]
REWARDS = [[attempt.reward for attempt in group] for group in GROUPS]


def turns_of(row: int) -> list[int]:
    """Those of a row that are trained."""
    if ROWS[row].is_gone:
        return []
    turns = enumerate(ROWS[row].turns)
    return [index for index, one in turns if one.policy == POLICY and one.reached_agent]


@pytest.fixture
def batch() -> Batch:
    sealed = seal(GROUPS)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def check(batch: Batch, found: Mapping[str, Floats], expected: Credit) -> None:
    """Each trained token has its turn's credit, all others nothing."""
    samples, rows_T = batch.samples, batch.rows_T
    want_T = [
        expected[int(rows_T[token]), int(samples.turns_T[token])] if samples.mask_T[token] else 0.0
        for token in range(samples.ids_T.size)
    ]
    assert any(want_T)
    np.testing.assert_allclose(found["advantage"], want_T, rtol=1e-12, atol=1e-12)


def test_the_batch_is_as_ragged_as_it_is_meant_to_be(batch: Batch) -> None:
    samples = batch.samples
    trained = {
        (int(row), int(index))
        for row, index in zip(
            batch.rows_T[samples.mask_T], samples.turns_T[samples.mask_T], strict=True
        )
    }
    assert trained == {(row, index) for row in range(len(ROWS)) for index in turns_of(row)}
    in_order = samples.turns_T[samples.mask_T & (batch.rows_T == 6)]
    assert in_order.tolist() == [2, 2, 2, 2, 2, 0, 1, 1, 3]
    assert not turns_of(4) and not turns_of(5), "one gone, one that never reached its agent"


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_a_discount_runs_back_over_the_turns_that_are_trained(
    batch: Batch, discount: float
) -> None:
    found = credits.discounted_advantage(
        Layout.of(batch), reward=batch.row_columns["reward"], discount=discount
    )
    advantages, expected = oracles.grpo(REWARDS), Credit()
    for row in range(len(ROWS)):
        for back, index in enumerate(reversed(turns_of(row))):
            expected[row, index] = advantages[row] * discount**back
    check(batch, found, expected)
    if discount == 0.0:
        last = credits.last_turn_advantage(Layout.of(batch), reward=batch.row_columns["reward"])
        check(batch, last, expected)
    if discount == 1.0:
        plain = credits.group_advantage(Layout.of(batch), reward=batch.row_columns["reward"])
        np.testing.assert_array_equal(found["advantage"], plain["advantage"])


def test_a_row_left_out_takes_no_turn_from_the_row_before_it() -> None:
    rows = [
        Attempt(turns=chain((1, ""), (1, "")), reward=1.0),
        Attempt(turns=chain((1, ""), (1, ""), (2, "")), reward=0.0),  # the last token is a 4
    ]
    sealed = seal([rows])
    for vocab_size in (5, 4):
        batch = assemble(sealed.manifest, sealed.rows, POLICY, vocab_size)
        found = credits.last_turn_advantage(Layout.of(batch), reward=batch.row_columns["reward"])
        of_first = found["advantage"][:6]  # two prompts of two, and one token after each
        np.testing.assert_allclose(of_first, [0, 0, 0, 0, 0, 0.5**0.5], atol=1e-4)


def role_credit(
    rewards: Mapping[str, Sequence[float]], credit: Callable[..., list[float]]
) -> Credit:
    """Each role by itself: a group is those of its rows in which the role has a token that counts,
    gone or not."""
    expected = Credit()
    for role, of_role in rewards.items():
        for group in range(len(GROUPS)):
            members = [
                row
                for row, attempt in enumerate(ROWS)
                if GROUP_OF[row] == group
                and any(one.role == role and one.reached_agent for one in attempt.turns)
            ]
            values = credit([[of_role[row] for row in members]]) if members else []
            for row, value in zip(members, values, strict=True):
                turns = [index for index in turns_of(row) if ROWS[row].turns[index].role == role]
                expected |= {(row, index): value for index in turns}
    return expected


def test_each_role_is_compared_with_itself(batch: Batch) -> None:
    assert batch.roles.names == ("act", "plan"), "the judge is of another policy"
    reward = batch.row_columns["reward"]
    of_row = [attempt.reward for attempt in ROWS]
    found = credits.role_advantage(Layout.of(batch), reward=reward)
    check(batch, found, role_credit({"plan": of_row, "act": of_row}, oracles.grpo))
    assert not np.allclose(
        found["advantage"], credits.group_advantage(Layout.of(batch), reward=reward)["advantage"]
    )


def test_a_role_may_have_a_reward_of_its_own(batch: Batch) -> None:
    own = [0.1, NAN, 5.0, 0.9, 0.4, 0.0, 0.3, 0.6, 1.0]
    of_row = [attempt.reward for attempt in ROWS]
    made = stage(
        "advantage",
        "reward plan_score",
        "advantage",
        fn=f"{STAGE_FUNCTIONS_MODULE}:role_advantage",
        rename={"plan_score": "plan"},
        options={"leave_one_out": True},
    )
    found = bind(made)(batch.with_columns(row_columns={"plan_score": np.array(own)}))
    assert isinstance(found, Batch)
    own[2] = NAN  # no score makes up for a missing reward
    check(batch, found.token_columns, role_credit({"plan": own, "act": of_row}, oracles.rloo))


def test_a_token_column_is_no_reward_of_a_role(batch: Batch) -> None:
    fn = f"{STAGE_FUNCTIONS_MODULE}:role_advantage"
    made = stage("advantage", "reward sampling_logprobs", "advantage", fn=fn)
    with pytest.raises(ConfigError, match="sampling_logprobs must be a row column"):
        bind(made)(batch)


def test_a_misspelled_option_is_no_reward_of_a_role() -> None:
    fn = f"{STAGE_FUNCTIONS_MODULE}:role_advantage"
    with pytest.raises(ValueError, match="leave_one_put is not an option of the built-in stage"):
        stage("advantage", "reward", "advantage", fn=fn, options={"leave_one_put": True})


# --- step scores ----------------------------------------------------------------------------------


def scores_of(batch: Batch) -> tuple[Floats, Credit]:
    """The column as a scorer's bytes become it, and the score of each turn: that on its last
    token."""
    scores_T = np.random.default_rng(3).random(batch.samples.ids_T.size)
    samples, by_turn = batch.samples, Credit()
    for token in np.flatnonzero(samples.mask_T):
        by_turn[int(batch.rows_T[token]), int(samples.turns_T[token])] = float(scores_T[token])
    return scores_T, by_turn


def returns_of(how: str, scores: Credit, share: float, discount: float) -> list[list[float]]:
    """By row, one for each of its trained turns."""
    out: list[list[float]] = []
    for row, attempt in enumerate(ROWS):
        q = [scores[row, index] for index in turns_of(row)]
        steps = range(len(q))
        outcome = attempt.reward
        out.append(
            {
                "weighted": lambda q=q, o=outcome: [share * o + (1 - share) * one for one in q],
                "return": lambda q=q, o=outcome, s=steps: [
                    share * o + math.fsum(discount ** (j - k) * q[j] for j in s if j >= k)
                    for k in s
                ],
                "shaping": lambda q=q, o=outcome, s=steps: [
                    discount ** (len(q) - 1 - k) * o - (q[k - 1] if k else 0.0) for k in s
                ],
                "min": lambda q=q, o=outcome: [min(q) + 0 * o for _ in q],
                "outcome": lambda q=q, o=outcome: [o for _ in q],
            }[how]()
        )
    return out


def compared(returns: list[list[float]], sets: Iterator[list[tuple[int, int]]]) -> Credit:
    """(row, depth) pairs of each set against each other, every row of weight 1."""
    expected = Credit()
    for members in sets:
        known = [(row, k) for row, k in members if math.isfinite(returns[row][k])]
        rows = {row: [returns[row][k] for r, k in known if r == row] for row, _ in known}
        flat = [value for values in rows.values() for value in values]
        mean = statistics.fmean(map(statistics.fmean, rows.values())) if rows else 0.0
        squares = [statistics.fmean((one - mean) ** 2 for one in own) for own in rows.values()]
        std = math.sqrt(math.fsum(squares) / max(len(rows) - 1, 1))
        has_spread = bool(flat) and max(flat) - min(flat) > 1e-6
        for row, k in members:
            counts = has_spread and (row, k) in known
            value = (returns[row][k] - mean) / (std + 1e-5) if counts else 0.0
            expected[row, turns_of(row)[k]] = value
    return expected


def sets_of(*, by_depth: bool) -> Iterator[list[tuple[int, int]]]:
    for group in range(len(GROUPS)):
        members = [
            (row, k)
            for row in range(len(ROWS))
            if GROUP_OF[row] == group
            for k in range(len(turns_of(row)))
        ]
        if not by_depth:
            yield members
        else:
            for depth in range(4):
                yield [(row, k) for row, k in members if k == depth]


@pytest.mark.parametrize(
    ("how", "by_depth"),
    [
        *((how, False) for how in ("weighted", "return", "shaping", "min")),
        *((how, True) for how in ("weighted", "return", "shaping", "min", "outcome")),
    ],
)
def test_steps_are_credited_by_their_scores(batch: Batch, how: str, by_depth: bool) -> None:
    scores_T, by_turn = scores_of(batch)
    found = credits.step_advantage(
        Layout.of(batch),
        reward=batch.row_columns["reward"],
        step_scores=scores_T,
        how=how,
        share=0.3,
        discount=0.8,
        by_depth=by_depth,
    )
    returns = returns_of(how, by_turn, 0.3, 0.8)
    check(batch, found, compared(returns, sets_of(by_depth=by_depth)))
    without = found["advantage"][batch.rows_T == 2]
    assert not without.any(), "the row without a reward"


@pytest.mark.parametrize("mix", [{"how": "weighted", "share": 1.0}, {"how": "outcome"}])
def test_the_outcome_alone_is_plain_grpo_bit_for_bit(batch: Batch, mix: dict[str, Any]) -> None:
    """Trajectories of unequal length, one without a reward and one whose payload is gone: group
    statistics are over trajectories."""
    scores_T, _ = scores_of(batch)
    reward = batch.row_columns["reward"]
    found = credits.step_advantage(Layout.of(batch), reward=reward, step_scores=scores_T, **mix)
    plain = credits.group_advantage(Layout.of(batch), reward=reward)
    assert plain["advantage"].any()
    assert found["advantage"].tobytes() == plain["advantage"].tobytes()


def test_a_planted_bad_step_gets_the_negative_advantage() -> None:
    """Both trajectories succeed; the scores alone tell the bad step from the others."""
    rows = [Attempt(turns=chain((2, ""), (3, ""), (2, "")), reward=1.0) for _ in range(2)]
    sealed = seal([rows])
    batch = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    is_bad_T = (batch.rows_T == 1) & (batch.samples.turns_T == 1)
    found = credits.step_advantage(
        Layout.of(batch),
        reward=batch.row_columns["reward"],
        step_scores=np.where(is_bad_T, 0.1, 0.9),
    )
    mask_T = batch.samples.mask_T
    assert (found["advantage"][is_bad_T & mask_T] < 0).all()
    assert (found["advantage"][~is_bad_T & mask_T] > 0).all()


def test_a_score_by_row_is_not_taken_for_scores_of_steps(batch: Batch) -> None:
    fn = f"{STAGE_FUNCTIONS_MODULE}:step_advantage"
    rename = {"length": "step_scores"}
    made = stage("advantage", "reward length", "advantage", fn=fn, rename=rename)
    with pytest.raises(ConfigError, match="step_scores must be a token column, and length is a"):
        bind(made)(batch)


# --- KL in the reward -----------------------------------------------------------------------------


def logprobs(batch: Batch) -> tuple[Floats, Floats]:
    """(sampling, reference), some of them far apart."""
    draw = np.random.default_rng(4)
    sampling_T = draw.uniform(-3, 0, batch.samples.ids_T.size)
    far_T = np.where(draw.random(sampling_T.size) < 0.1, -50.0, 0.0)
    return sampling_T, sampling_T + draw.standard_normal(sampling_T.size) + far_T


def test_the_reward_less_the_kl_of_the_row(batch: Batch) -> None:
    sampling_T, reference_T = logprobs(batch)
    found = credits.less_kl_reward(
        Layout.of(batch),
        reward=batch.row_columns["reward"],
        reference_logprobs=reference_T,
        sampling_logprobs=sampling_T,
        coef=0.1,
    )
    expected = [attempt.reward for attempt in ROWS]
    for token in np.flatnonzero(batch.samples.mask_T):
        k1 = min(max(float(sampling_T[token] - reference_T[token]), -20.0), 20.0)
        expected[int(batch.rows_T[token])] -= 0.1 * k1
    np.testing.assert_allclose(found["less_kl_reward"], expected, rtol=1e-12)
    assert math.isnan(found["less_kl_reward"][2])


def test_returns_to_go_less_the_kl_on_the_way(batch: Batch) -> None:
    sampling_T, reference_T = logprobs(batch)
    found = credits.to_go_advantage(
        Layout.of(batch),
        reward=batch.row_columns["reward"],
        reference_logprobs=reference_T,
        sampling_logprobs=sampling_T,
        coef=0.1,
    )
    samples, returns = batch.samples, dict[int, float]()
    for start, end, row in zip(samples.starts_S, samples.ends_S, samples.rows_S, strict=True):
        to_go = ROWS[int(row)].reward
        for token in reversed([t for t in range(start, end) if samples.mask_T[t]]):
            to_go -= 0.1 * min(max(float(sampling_T[token] - reference_T[token]), -20.0), 20.0)
            returns[token] = to_go
    known = {token: value for token, value in returns.items() if math.isfinite(value)}
    mean, std = statistics.fmean(known.values()), statistics.pstdev(known.values())
    expected = np.zeros(samples.ids_T.size)
    expected[list(known)] = [(value - mean) / (std + 1e-5) for value in known.values()]
    np.testing.assert_allclose(found["advantage"], expected, rtol=1e-9, atol=1e-12)


# --- several ranks --------------------------------------------------------------------------------


class TwoRanks(SingleRank):
    """Threads that sum as the ranks of a gang do, each with rows of its own."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2, timeout=60)
        self._given: dict[int, Floats] = {}

    def sum_over_ranks(self, values: Floats) -> Floats:
        self._given[threading.get_ident()] = values
        self._both.wait()
        total = sum(self._given.values(), np.zeros(values.shape))
        self._both.wait()
        return total


def on_two_ranks(of_rank: Callable[[int, TwoRanks], None]) -> None:
    ranks = TwoRanks()
    threads = [threading.Thread(target=of_rank, args=(part, ranks)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)


def share(sealed: Sealed, part: int) -> list[RowPayload]:
    return [
        row if index % 2 == part else replace(row, payload=None)
        for index, row in enumerate(sealed.rows)
    ]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (credits.discounted_advantage, {"discount": 0.5}),
        (credits.role_advantage, {}),
        (credits.step_advantage, {"how": "return"}),
        (credits.to_go_advantage, {"coef": 0.1}),
        (credits.less_kl_reward, {"coef": 0.1}),
    ],
)
def test_two_ranks_credit_as_one_does(
    batch: Batch, function: Callable[..., Columns], options: dict[str, float]
) -> None:
    """Each has the tokens of every other row; what is compared is compared over all."""
    sealed = seal(GROUPS)
    sampling_T, reference_T = logprobs(batch)
    by_token = {
        "step_scores": scores_of(batch)[0],
        "sampling_logprobs": sampling_T,
        "reference_logprobs": reference_T,
    }
    declared = declaration_of(function)
    assert declared is not None
    reads = [name for name in by_token if name in declared.reads]

    def credit(part: Batch, total: Sum, tokens: Floats) -> Floats:
        given = {name: by_token[name][tokens.astype(np.int64)] for name in reads}
        layout = Layout.of(part, total)
        [found] = function(layout, reward=part.row_columns["reward"], **given, **options).values()
        return found

    whole = credit(batch, SingleRank().sum_over_ranks, np.arange(batch.samples.ids_T.size * 1.0))
    found: dict[int, Floats] = {}
    places: dict[int, Floats] = {}

    def of_rank(part: int, ranks: TwoRanks) -> None:
        own = assemble(sealed.manifest, share(sealed, part), POLICY, VOCAB_SIZE, ranks=ranks)
        places[part] = np.flatnonzero(batch.rows_T % 2 == part).astype(np.float64)
        found[part] = credit(own, ranks.sum_over_ranks, places[part])

    on_two_ranks(of_rank)
    for part in range(2):
        is_by_row = function is credits.less_kl_reward
        expected = whole if is_by_row else whole[places[part].astype(np.int64)]
        np.testing.assert_allclose(found[part], expected, rtol=1e-12, atol=1e-12)


# --- cut short, and too long ----------------------------------------------------------------------


def test_a_row_that_was_cut_short_goes_on_in_its_last_value(batch: Batch) -> None:
    samples = batch.samples
    values_T = np.random.default_rng(5).standard_normal(samples.ids_T.size)
    truncated_R = np.array([1.0, 0, 1, 0, 1, 1, 1, 0, 0])
    reward = batch.row_columns["reward"]
    found = credits.gae(
        Layout.of(batch), reward=reward, values=values_T, truncated=truncated_R, gamma=0.9, lam=0.8
    )
    expected_T, returns_T = np.zeros(samples.ids_T.size), np.zeros(samples.ids_T.size)
    for start, end, row in zip(samples.starts_S, samples.ends_S, samples.rows_S, strict=True):
        tokens = [token for token in range(start, end) if samples.mask_T[token]]
        values = [float(values_T[token]) for token in tokens]
        rewards = [0.0] * (len(tokens) - 1) + [float(reward[row])]
        after = values[-1] if truncated_R[row] else 0.0
        expected_T[tokens], returns_T[tokens] = oracles.gae(rewards, values, after, 0.9, 0.8)
    is_lost_T = (batch.rows_T == 2) & samples.mask_T
    expected_T[is_lost_T], returns_T[is_lost_T] = 0.0, values_T[is_lost_T]
    np.testing.assert_allclose(found["advantage"], expected_T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found["returns"], returns_T, rtol=1e-12, atol=1e-12)


def test_who_was_cut_short_counts_only_where_it_is_read(batch: Batch) -> None:
    values = {"values": np.random.default_rng(5).standard_normal(batch.samples.ids_T.size)}

    def credit(reads: str, truncated: float) -> Floats:
        options = {"lam": 0.9, "normalise": True}
        made = stage("a", reads, "advantage returns", role="critic", fn=None, options=options)
        truncated_R = np.full(batch.groups_R.size, truncated)
        row_columns = {**batch.row_columns, "truncated": truncated_R}
        found = bind(made)(replace(batch, row_columns=row_columns, token_columns=values))
        assert isinstance(found, Batch)
        return found.token_columns["advantage"]

    plain = credit("reward values", 1.0)
    np.testing.assert_array_equal(credit("reward values truncated", 0.0), plain)
    assert not np.allclose(credit("reward values truncated", 1.0), plain)


def shaped(batch: Batch, reads: str = "turns reward truncated") -> Floats:
    [overlong, *_] = of("dapo")
    options = {**overlong.options, "max_length": 256, "margin": 64}
    made = overlong.model_copy(update={"reads": tuple(reads.split()), "options": options})
    found = bind(made)(batch)
    assert isinstance(found, Batch)
    return found.row_columns["shaped_reward"]


def test_many_short_turns_are_not_one_long_answer() -> None:
    long, cut_off = turn(224), turn(30, "", 0, finish=FinishReason.LENGTH)
    rows = [
        Attempt(turns=chain(*[(60, "")] * 4), reward=1.0),
        Attempt(turns=(turn(20), replace(long, parent=0)), reward=1.0),
        Attempt(turns=(turn(10), turn(250, "", 0, policy=OTHER)), reward=1.0),
        Attempt(turns=(turn(10), cut_off), reward=1.0),
        Attempt(turns=(long,), reward=1.0, is_gone=True),
    ]
    sealed = seal([rows])
    whole = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    assert whole.longest_R.tolist() == [60, 224, 10, 30, 224]
    np.testing.assert_array_equal(shaped(whole), [1.0, 0.5, 1.0, NAN, 0.5])
    np.testing.assert_array_equal(
        shaped(whole, "reward length truncated"), [0.25, 0.1875, 1.0, NAN, 0.5]
    )
    found: dict[int, Batch] = {}

    def of_rank(part: int, ranks: TwoRanks) -> None:
        rows = share(sealed, part)
        found[part] = assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE, ranks=ranks)

    on_two_ranks(of_rank)
    for part in range(2):
        np.testing.assert_array_equal(found[part].longest_R, whole.longest_R)
        np.testing.assert_array_equal(shaped(found[part]), shaped(whole))


def test_a_row_of_one_turn_is_as_long_as_it_was() -> None:
    sealed = random_batch(5)
    batch = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    np.testing.assert_array_equal(batch.longest_R, batch.row_columns["length"])


@pytest.mark.parametrize(
    ("name", "reads", "writes", "options"),
    [
        ("discounted_advantage", "reward", "advantage", {"discount": 0.9}),
        ("role_advantage", "reward", "advantage", {}),
        ("step_advantage", "reward step_scores", "advantage", {"how": "shaping"}),
        (
            "to_go_advantage",
            "reward reference_logprobs sampling_logprobs",
            "advantage",
            {"coef": 0.1},
        ),
        (
            "less_kl_reward",
            "reward reference_logprobs sampling_logprobs",
            "less_kl_reward",
            {"coef": 0.1},
        ),
    ],
)
def test_each_can_be_named_in_a_run_file(
    name: str, reads: str, writes: str, options: dict[str, object]
) -> None:
    made = stage("credit", reads, writes, fn=f"{STAGE_FUNCTIONS_MODULE}:{name}", options=options)
    assert find_function(made) is getattr(credits, name)
