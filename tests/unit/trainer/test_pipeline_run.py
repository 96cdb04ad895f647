# SPDX-License-Identifier: Apache-2.0
"""A planned chain at work on a real batch: columns flow, train stages are told apart, wrong results
are refused; and the shipped stage functions against plain loops."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, make_turn, random_batch, seal
from tests.unit.trainer.stage_makers import OWN, of, stage, train

from penstock.config.builtin_stages import Axis, builtin_functions
from penstock.config.pipeline_checks import BATCH_COLUMNS
from penstock.errors import ConfigError
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.learner import SkipReason, Stats
from penstock.trainer.pipeline import credits
from penstock.trainer.pipeline.layout import Columns, Layout, Sum
from penstock.trainer.pipeline.run import Pipeline, bind, column_of

SEED = 5


@pytest.fixture
def batch() -> Batch:
    """As it is when the first stage sees it."""
    sealed = random_batch(SEED)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def told(name: str, value: float, skipped: SkipReason | None = None) -> Stats:
    return Stats(skipped=skipped, values={name: value})


def test_every_batch_has_what_stages_may_read(batch: Batch) -> None:
    assert {*BATCH_COLUMNS} - {"turns"} == {*batch.column_names, "sampling_logprobs"}
    for name in {*BATCH_COLUMNS} - {"turns"}:
        axis, values = column_of(batch, name, "any")
        assert values.dtype == np.float64
        assert axis is (Axis.TOKEN if name == "sampling_logprobs" else Axis.ROW)
    with pytest.raises(ConfigError, match="stage any reads values, and batch 1 has only"):
        column_of(batch, "values", "any")


def test_a_users_chain_runs_and_the_loss_sees_its_columns(batch: Batch) -> None:
    seen: list[Batch] = []

    def learn(given: Batch) -> Stats:
        seen.append(given)
        return told("loss", 0.5)

    chain = [
        bind(stage("shape", "reward", "shaped_reward", options={"bonus": 7.0})),
        bind(
            stage(
                "advantage",
                "shaped_reward",
                "advantage",
                role="advantage",
                fn=None,
                rename={"shaped_reward": "reward"},
            )
        ),
        bind(train(), learn),
    ]
    stats = Pipeline(chain).run(batch)
    assert stats.skipped is None and stats.values["loss"] == 0.5
    assert stats.values["seconds/stage/shape"] >= 0
    lengths = [int(batch.samples.mask_T[batch.rows_T == row].sum()) for row in range(16)]
    shaped = [
        reward + (7.0 if length <= 2 else 0.0)
        for reward, length in zip(batch.row_columns["reward"], lengths, strict=True)
    ]
    np.testing.assert_allclose(seen[0].row_columns["shaped_reward"], shaped)
    for token in range(batch.samples.ids_T.size):
        row = int(batch.rows_T[token])
        mates = shaped[row - row % 4 : row - row % 4 + 4]
        mean = math.fsum(mates) / 4
        std = math.sqrt(math.fsum((one - mean) ** 2 for one in mates) / 3)
        expected = (shaped[row] - mean) / (std + 1e-5) if batch.samples.mask_T[token] else 0.0
        assert seen[0].token_columns["advantage"][token] == pytest.approx(expected, abs=1e-12)
    assert "advantage" not in batch.column_names, "a batch is never changed"


def test_the_actor_makes_the_version_and_others_are_told_beside_it(batch: Batch) -> None:
    critic = stage("learn", "turns", type="train", role="critic", fn=None)
    chain = [
        bind(critic, lambda batch: told("loss", 2.0)),
        bind(train("turns"), lambda batch: told("loss", 1.0, SkipReason.ZERO_ADVANTAGE)),
    ]
    stats = Pipeline(chain).run(batch)
    assert stats.skipped is SkipReason.ZERO_ADVANTAGE
    assert (stats.values["loss"], stats.values["critic/loss"]) == (1.0, 2.0)
    with pytest.raises(ConfigError, match="the pipeline has no train stage with role actor"):
        Pipeline(chain[:1]).run(batch)


def test_what_a_stage_must_not_give(batch: Batch) -> None:
    other = bind(stage("s", "reward", "advantage", fn=f"{OWN}:other_column"))
    with pytest.raises(ConfigError, match="stage s must write advantage and returned advantages"):
        other(batch)
    ragged = bind(stage("s", "reward", "values"), lambda batch: {"values": [[1.0], [2.0, 3.0]]})  # pyright: ignore
    with pytest.raises(ConfigError, match="stage s: column values is not numeric"):
        ragged(batch)
    short = bind(stage("s", "reward", "values"), lambda batch: {"values": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"values is a token column and has shape \(3,\)"):
        Pipeline([short, bind(train("turns"), lambda batch: told("loss", 0.0))]).run(batch)
    with pytest.raises(ConfigError, match="no callable was given to run the model of role actor"):
        bind(train())


def test_columns_that_losses_take_by_token(batch: Batch) -> None:
    with pytest.raises(
        ConfigError, match=r"column advantage is a token .* shape \(16,\) .* layout\.by_token"
    ):
        bind(stage("s", "reward", "advantage", fn=f"{OWN}:by_row"))(batch)
    num_tokens = batch.samples.ids_T.size
    for given in (1.0, np.zeros((num_tokens, 1))):
        for name, size in (("values", num_tokens), ("shaped_reward", 16)):
            wrong = bind(stage("s", "reward", name), lambda _, x=given, name=name: {name: x})  # pyright: ignore
            with pytest.raises(ConfigError, match=rf"has shape .* instead of \({size},\)"):
                wrong(batch)
    excluded = bind(stage("s", "reward", "excluded"), lambda _: {"excluded": np.zeros(num_tokens)})
    with pytest.raises(
        ConfigError, match=rf"excluded is a row column and has shape \({num_tokens},\)"
    ):
        excluded(batch)


def test_no_credit_may_be_nan_where_it_trains(batch: Batch) -> None:
    """Rows may have no reward, and columns of rewards say so."""
    reward_R = batch.row_columns["reward"].copy()
    reward_R[[2, 5]] = math.nan
    lacking = replace(batch, row_columns={**batch.row_columns, "reward": reward_R})
    is_lacking_T = np.isin(batch.rows_T, [2, 5]) & batch.samples.mask_T
    num, num_trained = int(is_lacking_T.sum()), int(batch.samples.mask_T.sum())
    own = bind(stage("s", "reward", "advantage", fn=f"{OWN}:all_compared"))
    with pytest.raises(
        ConfigError, match=f"stage s: column advantage is NaN or infinite on {num} of {num_trained}"
    ):
        own(lacking)
    assert isinstance(own(batch), Batch)
    aside = lacking.with_columns(row_columns={"excluded": np.isnan(reward_R).astype(np.float64)})
    assert isinstance(own(aside), Batch), "masked tokens are not checked"
    shaped = bind(stage("shape", "reward", "shaped_reward"))(lacking)
    assert isinstance(shaped, Batch) and np.isnan(shaped.row_columns["shaped_reward"]).sum() == 2
    for name in ("group_advantage", "leave_one_out_advantage", "batch_advantage"):
        fn = f"penstock.trainer.pipeline.credits:{name}"
        assert isinstance(bind(stage("s", "reward", "advantage", fn=fn))(lacking), Batch)


@pytest.mark.parametrize("name", ["rows", "tokens"])
def test_a_custom_column_has_the_axis_that_its_type_or_declaration_says(
    batch: Batch, name: str
) -> None:
    """Also where a batch has as many tokens as rows, nothing depends on the length."""
    turn = make_turn([3], [5])
    level = seal([[(turn, 1.0), (make_turn([3], [5], reached_agent=False), 0.0)]]).assembled()
    assert level.samples.ids_T.size == level.groups_R.size == 2
    for given in (batch, level):
        for form in ("typed", "declared"):
            found = bind(stage("s", "reward", "bonus", fn=f"{OWN}:{form}_{name}"))(given)
            assert isinstance(found, Batch)
            written = found.row_columns if name == "rows" else found.token_columns
            assert (written["bonus"] == 2.0).all()


def test_a_custom_column_without_an_axis_is_refused(batch: Batch) -> None:
    plain = bind(stage("s", "reward", "bonus", fn=f"{OWN}:plain_bonus"))
    with pytest.raises(ConfigError, match=r"column bonus is a plain array.*RowColumn\(values\)"):
        plain(batch)
    wrong = bind(stage("s", "reward", "advantage", fn=f"{OWN}:row_advantage"))
    with pytest.raises(ConfigError, match="advantage is a token column and was returned as a row"):
        wrong(batch)


# --- shipped functions ----------------------------------------------------------------------------


def test_dapo_punishes_and_excludes_before_it_compares(batch: Batch) -> None:
    length_R = np.array([0.0, 768, 896, 1024] * 4)
    truncated_R = np.array([0.0, 0, 0, 1] * 4)
    options = of("dapo")[0].options
    reward = batch.row_columns["reward"]
    shaped = credits.overlong(
        Layout.of(batch), reward=reward, length=length_R, truncated=truncated_R, **options
    )
    expected = reward + np.array([0.0, 0.0, -0.5, math.nan] * 4)
    np.testing.assert_allclose(shaped["shaped_reward"], expected)
    np.testing.assert_array_equal(shaped["excluded"], truncated_R)
    advantage = credits.group_advantage(Layout.of(batch), reward=shaped["shaped_reward"])
    for row in range(16):
        of_row = advantage["advantage"][(batch.rows_T == row) & batch.samples.mask_T]
        kept = expected[row - row % 4 : row - row % 4 + 3]
        value = 0.0 if row % 4 == 3 else (expected[row] - kept.mean()) / (kept.std(ddof=1) + 1e-5)
        np.testing.assert_allclose(of_row, value, atol=1e-12)


def test_gae_credits_through_the_values(batch: Batch) -> None:
    draw = np.random.default_rng(SEED)
    values_T = draw.standard_normal(batch.samples.ids_T.size)
    found = credits.gae(
        Layout.of(batch), reward=batch.row_columns["reward"], values=values_T, gamma=0.9, lam=0.8
    )
    samples = batch.samples
    for start, end, row in zip(samples.starts_S, samples.ends_S, samples.rows_S, strict=True):
        tokens = [token for token in range(start, end) if samples.mask_T[token]]
        for place, token in enumerate(tokens):
            advantage = 0.0
            for later in range(place, len(tokens)):
                is_last = later == len(tokens) - 1
                after = 0.0 if is_last else values_T[tokens[later + 1]]
                reward = batch.row_columns["reward"][row] if is_last else 0.0
                error = reward + 0.9 * after - values_T[tokens[later]]
                advantage += (0.9 * 0.8) ** (later - place) * error
            assert found["advantage"][token] == pytest.approx(advantage, abs=1e-12)
            expected = advantage + values_T[token]
            assert found["returns"][token] == pytest.approx(expected, abs=1e-12)


def test_normalised_gae_is_over_the_trained_tokens_of_rows_with_a_reward(batch: Batch) -> None:
    values_T = np.random.default_rng(SEED).standard_normal(batch.samples.ids_T.size)
    reward = batch.row_columns["reward"].copy()
    reward[5] = math.nan
    layout = Layout.of(batch)
    plain = credits.gae(layout, reward=reward, values=values_T, lam=0.9)
    found = credits.gae(layout, reward=reward, values=values_T, lam=0.9, normalise=True)
    pluralise = [t for t in np.flatnonzero(batch.samples.mask_T) if batch.rows_T[t] != 5]
    known = [float(plain["advantage"][t]) for t in pluralise]
    mean, std = statistics.fmean(known), statistics.pstdev(known)
    expected = np.zeros(values_T.size)
    expected[pluralise] = [(value - mean) / (std + 1e-5) for value in known]
    np.testing.assert_allclose(found["advantage"], expected, atol=1e-12)
    np.testing.assert_array_equal(found["returns"], plain["returns"])


def test_two_ranks_normalise_as_one_does(batch: Batch) -> None:
    """Each has the tokens of its own rows; what is summed over tokens is that of both."""
    values_T = np.random.default_rng(SEED).standard_normal(batch.samples.ids_T.size)
    reward = batch.row_columns["reward"]
    row_R = np.arange(reward.size)
    parts = [batch.without(row_R % 3 != 0), batch.without(row_R % 3 == 0)]
    heard: list[Floats] = []

    def credit(part: Batch, total: Sum) -> Floats:
        layout = Layout.of(part, total)
        return credits.gae(layout, reward=reward, values=values_T, normalise=True)["advantage"]

    def listen(values: Floats) -> Floats:
        heard.append(values)
        return values

    apart = credit(parts[0], listen) + credit(parts[1], listen)
    total = heard[0] + heard[1]
    together = credit(parts[0], lambda _: total) + credit(parts[1], lambda _: total)
    whole = credits.gae(Layout.of(batch), reward=reward, values=values_T, normalise=True)
    np.testing.assert_allclose(together, whole["advantage"], atol=1e-12)
    assert not np.allclose(apart, whole["advantage"], atol=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        credits.centred_advantage,
        credits.leave_one_out_advantage,
        credits.batch_advantage,
        credits.group_then_batch_advantage,
        credits.last_turn_advantage,
    ],
)
def test_credit_is_on_trained_tokens_only(batch: Batch, function: Callable[..., Columns]) -> None:
    found = function(Layout.of(batch), reward=batch.row_columns["reward"])
    advantage_T = found["advantage"]
    assert advantage_T.shape == batch.samples.ids_T.shape
    assert not advantage_T[~batch.samples.mask_T].any() and advantage_T.any()


def test_leave_one_out_is_the_others_mean(batch: Batch) -> None:
    reward = batch.row_columns["reward"]
    found = credits.leave_one_out_advantage(Layout.of(batch), reward=reward)["advantage"]
    token = int(np.flatnonzero(batch.samples.mask_T & (batch.rows_T == 6))[0])
    assert found[token] == pytest.approx(reward[6] - (reward[4] + reward[5] + reward[7]) / 3)


@pytest.mark.parametrize("name", builtin_functions())
def test_the_config_knows_what_gives_groups_of_one_no_credit(name: str) -> None:
    sealed = random_batch(SEED, num_groups=8, size=1)
    alone = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    by_token = np.random.default_rng(SEED).standard_normal(alone.samples.ids_T.size)
    given = {"reference_logprobs": by_token, "values": by_token, "discount": 0.5, "coef": 0.1}
    given |= {"reward": alone.row_columns["reward"]}
    given |= {"sampling_logprobs": alone.samples.logprobs_T.astype(np.float64)}
    function = getattr(credits, name)
    if (
        "advantage" in builtin_functions()[name].writes and name != "step_advantage"
    ):  # turns are compared
        taken = {key: given[key] for key in inspect.signature(function).parameters if key in given}
        has_credit = bool(function(Layout.of(alone), **taken)["advantage"].any())
        assert has_credit is not builtin_functions()[name].is_group_relative
    else:
        assert not builtin_functions()[name].is_group_relative
