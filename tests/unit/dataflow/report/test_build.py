# SPDX-License-Identifier: Apache-2.0
"""A report from figures: each field against its definition, and against the published schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.unit.dataflow.report.report_factories import (
    counts,
    figures,
    flow,
    node_figures,
    policy_figures,
)

from penstock.dataflow.report.build import make_report, rule_memory
from penstock.dataflow.report.figures import (
    REFUSAL_REASONS,
    BalanceSettings,
    Figures,
    NodeActivity,
    StepTiming,
)
from penstock.dataflow.report.schema import report_schema
from penstock.dataflow.report.shape import SCHEMA_VERSION, Amount, BalanceReport, WindowReport
from penstock.types import DropReason
from penstock.wire.codec import decode, encode_json

PUBLISHED = Path(__file__).parents[4] / "docs" / "report.schema.json"
TERMS = BalanceSettings()
NOW = 1101.0


def report(given: Figures, terms: BalanceSettings = TERMS) -> BalanceReport:
    return make_report(given, terms, NOW)


def as_json(given: BalanceReport) -> Any:
    return json.loads(encode_json(given))


def validate(value: Any) -> None:
    validator: Any = jsonschema.Draft202012Validator(json.loads(PUBLISHED.read_text()))
    validator.validate(value)


# --- the schema -----------------------------------------------------------------------------------


def test_the_published_schema_matches_the_records() -> None:
    made = json.dumps(report_schema(), indent=2, ensure_ascii=False) + "\n"
    hint = "python -m penstock.dataflow.report.schema > docs/report.schema.json"
    assert PUBLISHED.read_text() == made, hint
    jsonschema.Draft202012Validator.check_schema(report_schema())


@pytest.mark.parametrize(
    "given",
    [
        figures(),
        figures(
            policies=(),
            nodes=(),
            window=WindowReport(index=0, opened_at=0, closed_at=0, complete=False),
        ),
        figures(policies=(policy_figures(samples=(), window=flow(0, 0, 0), staleness={}),)),
        figures(nodes=(node_figures("n0", activity=NodeActivity.SILENT, silent_s=90.0),)),
    ],
    ids=["busy", "empty", "nothing moved", "nobody there"],
)
def test_every_report_is_valid(given: Figures) -> None:
    made = report(given)
    validate(as_json(made))
    assert decode(encode_json(made), BalanceReport, media_type="application/json") == made


def _spoil(value: Any, path: str, wrong: Any) -> Any:
    *parents, last = path.split(".")
    place = value
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place[name]
    if wrong is None:
        del place[last]
    else:
        place[last] = wrong
    return value


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("schema_version", 2),
        ("decision.branch", "grow"),
        ("nodes.0.status", "dead"),
        ("nodes.0.status", None),
        ("policies.0.window.rollout_wait_fraction", 1.5),
        ("policies.0.window.production.produced.tokens", -1),
        ("policies.0.window.production.wasted", []),
        ("policies.0.trainer_time.shares", None),
        ("pool.total_gpus", "8"),
    ],
)
def test_the_schema_rejects_an_invalid_report(path: str, wrong: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(_spoil(as_json(report(figures())), path, wrong))


# --- fields ---------------------------------------------------------------------------------------


def test_the_window_of_a_policy() -> None:
    window = report(figures()).policies[0].window
    assert (window.num_versions, window.num_samples) == (10, 2)
    assert (window.wall_time_s, window.eval_time_s, window.training_time_s) == (100.0, 4.0, 96.0)
    assert (window.avg_step_time_s, window.avg_batch_wait_s) == (10.0, 1.5)
    assert window.rollout_wait_fraction == pytest.approx(0.15)
    assert window.throughput_per_gpu == 400.0
    assert window.staleness_histogram == {
        "0": Amount(sequences=40, tokens=400),
        "1": Amount(sequences=20, tokens=200),
    }


def test_a_window_with_only_evaluation_has_a_training_time_of_one_second() -> None:
    given = figures(policies=(policy_figures(eval_s=100.0),))
    assert report(given).policies[0].window.training_time_s == 1.0


def test_production_in_sequences_and_tokens() -> None:
    made = report(figures()).policies[0]
    production = made.window.production
    assert production.produced == Amount(sequences=100, tokens=1000)
    assert production.entered == Amount(sequences=80, tokens=800)
    assert production.consumed == Amount(sequences=60, tokens=600)
    assert production.stale_skipped == Amount(sequences=4, tokens=40)
    assert production.wasted["uniform_reward"].tokens == 150
    assert (production.accept_rate, production.stale_rate) == (0.8, 0.05)
    assert production.produce_consume_ratio == pytest.approx(1000 / 600)
    assert made.totals.produced.tokens == 5000
    assert (made.queues.issued_groups, made.queues.ready_groups) == (12, 3)


def test_drop_reasons_are_rejections_or_losses() -> None:
    losses = set(DropReason) - REFUSAL_REASONS
    assert DropReason.STALE in losses and DropReason.REMAINDER in losses
    assert DropReason.OUTPACED in REFUSAL_REASONS, "pacing rejects before data enters"


def test_gone_and_suspect_nodes_are_not_capacity() -> None:
    nodes = (
        node_figures("n0", gpus=4),
        node_figures("n1", gpus=4, silent_s=TERMS.suspect_s + 0.1),
        node_figures("n2", gpus=4, activity=NodeActivity.SILENT, silent_s=30.0),
        node_figures("n3", gpus=4, activity=NodeActivity.STARTING),
        node_figures("n4", gpus=4, activity=NodeActivity.DRAINING),
        node_figures("n5", gpus=4, left=True),
    )
    made = report(figures(nodes=nodes))
    assert (made.pool.total_gpus, made.pool.pending_gpus) == (4, 4)
    assert (made.pool.suspect, made.pool.gone) == (("n1",), ("n2", "n5"))
    assert (made.pool.nodes_healthy, made.pool.nodes_pending, made.pool.nodes_draining) == (3, 1, 1)
    statuses = [node.status for node in made.nodes]
    assert statuses == ["healthy", "suspect", "gone", "healthy", "healthy", "gone"]
    assert made.decision.branch == "hold" and "4 GPUs are already starting" in made.decision.reason
    alone = report(figures(nodes=nodes[:1]))
    assert alone.decision.target_gpus == 6, "w = 0.15 of 4 GPUs, and a tenth more"


def test_a_node_is_suspect_only_beyond_its_limit() -> None:
    at_limit = node_figures("n0", silent_s=TERMS.suspect_s)
    assert report(figures(nodes=(at_limit,))).nodes[0].status == "healthy"


def test_each_node_has_its_rates_and_the_pool_their_sum() -> None:
    nodes = (
        node_figures("n0", gpus=2, cost_per_hour=3.0, produced=counts(500), accepted=counts(100)),
        node_figures("n1", produced=counts(0), accepted=counts(0), cost_per_hour=1.5),
    )
    made = report(figures(nodes=nodes))
    first, second = made.nodes
    assert (first.accept_rate, first.throughput_per_gpu) == (0.2, 50.0)
    assert (second.accept_rate, second.throughput_per_gpu) == (None, 0.0)
    assert made.pool.produced.tokens == 500 and made.pool.accepted.tokens == 100
    assert made.pool.cost_per_hour == 4.5


def test_accounts_sum_to_all() -> None:
    made = report(figures(departed_time={"silent": 200.0}))
    accounts = [made.pool.node_time, *(n.time for n in made.nodes)]
    accounts += [p.trainer_time for p in made.policies]
    for account in accounts:
        assert sum(account.shares.values()) == pytest.approx(1.0)
        assert sum(account.seconds.values()) == pytest.approx(account.total_s)
    assert made.pool.node_time.seconds["silent"] == 200.0
    assert made.schema_version == SCHEMA_VERSION


# --- the decision ---------------------------------------------------------------------------------


def test_the_worst_wait_of_the_policies_decides() -> None:
    calm = policy_figures("a", samples=(StepTiming(wait_s=0.0, step_s=10.0),))
    starved = policy_figures("b", samples=(StepTiming(wait_s=5.0, step_s=10.0),))
    made = report(figures(policies=(calm, starved)))
    assert made.decision.rollout_wait_fraction == 0.5
    assert made.decision.branch == "scale_up"
    done = report(figures(policies=(calm, replace(starved, done=True))))
    assert done.decision.rollout_wait_fraction == 0.0, "a finished policy does not wait"


def test_the_neediest_policy_keeps_the_pool() -> None:
    calm = (StepTiming(wait_s=0.0, step_s=10.0),)
    idle = policy_figures("a", samples=calm, window=flow(1000, 1000, 100))
    needy = policy_figures("b", samples=calm, window=flow(1000, 1000, 1000))
    assert report(figures(policies=(idle, needy))).decision.need == 1.0
    assert report(figures(policies=(idle,))).decision.need == pytest.approx(0.1)


def test_time_without_work_counts_as_capacity() -> None:
    """Pacing limits nodes, so nearly all accepted data is used: only idle time shows spare
    capacity."""
    calm = (StepTiming(wait_s=0.0, step_s=10.0),)
    policy = policy_figures(samples=calm, window=flow(1000, 1000, 1000))
    nodes = tuple(
        node_figures(f"n{i}", window_account={"rolling_out": 40.0, "waiting": 60.0})
        for i in range(10)
    )
    first = report(figures(policies=(policy,), nodes=nodes))
    assert (first.pool.busy_share, first.decision.need) == (0.4, 0.4)
    assert first.decision.branch == "hold" and first.decision.low_windows == 1
    given = figures(policies=(policy,), nodes=nodes, memory=rule_memory(first))
    second = report(given)
    assert (second.decision.branch, second.decision.target_gpus) == ("scale_down", 5)


def test_which_nodes_to_drain_first() -> None:
    calm = (StepTiming(wait_s=0.0, step_s=10.0),)
    policy = policy_figures(samples=calm, window=flow(1000, 1000, 300))
    nodes = (
        node_figures("fast-dear", accepted=counts(1000), cost_per_hour=10.0),
        node_figures("slow-cheap", accepted=counts(200), cost_per_hour=1.0),
        node_figures("fast-cheap", accepted=counts(1000), cost_per_hour=1.0),
        node_figures("big-lazy", accepted=counts(1), gpus=8, cost_per_hour=1.0),
        node_figures("lost", silent_s=8.0),
    )
    given = figures(policies=(policy,), nodes=nodes)
    made = report(replace(given, memory=rule_memory(report(given))))
    assert made.decision.branch == "scale_down" and made.decision.estimated_delta_gpus == -6
    assert made.decision.drain_first == ("lost", "fast-dear", "slow-cheap", "fast-cheap")


def test_loading_weights_does_not_scale_up() -> None:
    share = TERMS.max_loading
    nodes = (node_figures("n0", window_account={"rolling_out": 1 - share, "loading": share}),)
    assert not report(figures(nodes=nodes)).decision.weight_transfer_active
    nodes = (node_figures("n0", window_account={"rolling_out": 0.8, "loading": 0.2}),)
    made = report(figures(nodes=nodes))
    assert made.decision.weight_transfer_active and made.decision.branch == "hold"


def test_a_window_is_judged_once() -> None:
    first = report(figures())
    assert first.decision.branch == "scale_up"
    given = figures(memory=rule_memory(first))
    assert make_report(given, TERMS, NOW + 50, decision=first.decision).decision == first.decision
    assert make_report(given, TERMS, NOW + 50).decision.branch == "hold", "cooling down"
