# SPDX-License-Identifier: Apache-2.0
"""Rules, stages and stores as the file writes them: accepted forms, and what they resolve to."""

from collections.abc import Callable

import pytest

from penstock.config import Hook, RuleConfig, RunConfig, dump
from penstock.config.loader import parse
from penstock.errors import ConfigError

LoadText = Callable[..., RunConfig]


def rules(config: RunConfig) -> list[tuple[str, str]]:
    return [(rule.hook.value, rule.name) for rule in config.dataflow.rules]


def test_options_stand_beside_the_rule_and_defaults_are_written_out(
    example: str, load_text: LoadText
) -> None:
    written = "[{replay: newest, ratio: 0.5}, {admit: outcome}, {admit: dedup, window: 7}]"
    config = load_text(example, [f"dataflow.rules={written}"])
    assert rules(config) == [("replay", "newest"), ("admit", "outcome"), ("admit", "dedup")]
    replay, outcome, dedup = config.dataflow.rules
    assert replay.options == {"ratio": 0.5, "max_uses": 4, "max_staleness": None}
    assert outcome.options == {"allow": ["completed"]}
    assert dedup.options == {"window": 7}
    assert "replay: newest\n    ratio: 0.5\n    max_uses: 4\n" in dump(config)


def test_admit_and_curate_chain_in_declared_order(example: str, load_text: LoadText) -> None:
    written = "[{admit: dedup}, {admit: all}, {curate: greso}, {admit: reward-spread}]"
    config = load_text(example, [f"dataflow.rules={written}"])
    in_force = [rule.name for rule in config.for_policy("policy").rules if rule.hook is Hook.ADMIT]
    assert in_force == ["dedup", "all", "reward-spread"]


def test_one_rule_may_chain_with_other_options(example: str, load_text: LoadText) -> None:
    written = "[{admit: reward-range, low: 0.1}, {admit: reward-range, high: 0.9}]"
    assert len(load_text(example, [f"dataflow.rules={written}"]).dataflow.rules) == 2


def test_a_users_rule_keeps_its_options_unread(example: str, load_text: LoadText) -> None:
    config = load_text(example, ["dataflow.rules=[{select: my_rules.mine:Own, depth: [1, two]}]"])
    [rule] = config.dataflow.rules
    assert (rule.name, rule.options) == ("my_rules.mine:Own", {"depth": [1, "two"]})
    assert not rule.is_builtin
    assert parse(dump(config), origin="config.yaml") == config


def test_a_rule_may_be_built_by_hand() -> None:
    assert RuleConfig(admit="reward-spread").options == {"same_reward": 1e-6}
    assert RuleConfig.model_validate(RuleConfig(admit="all").model_dump()).name == "all"


@pytest.mark.parametrize("own", ["null", "{rules: [{replay: newest}]}"])
def test_replay_with_a_zero_bound_is_refused(own: str, example: str, load_text: LoadText) -> None:
    shared = "[]" if "replay" in own else "[{replay: newest}]"
    overrides = ["training.max_staleness=0", f"dataflow.rules={shared}"]
    overrides.append(f"models.policy.dataflow={own}")
    with pytest.raises(ConfigError, match="so nothing can be replayed; set max_s"):
        load_text(example, overrides)
    given = [text.replace("newest", "newest, max_staleness: 2") for text in overrides]
    assert load_text(example, given).training.max_staleness == 0


def test_a_policy_without_a_bound_cannot_take_the_shared_replay(
    example: str, load_text: LoadText
) -> None:
    overrides = ["models.b={init: x, training: {max_staleness: 0}}"]
    with pytest.raises(ConfigError, match="policy b has max_staleness 0"):
        load_text(example, [*overrides, "dataflow.rules=[{replay: uniform}]"])


def test_stages_are_read_with_a_bare_on(example: str, load_text: LoadText) -> None:
    text = example.replace(
        "  store: sqlite\n",
        "  stages:\n"
        "    - {name: score, reads: [turns], writes: [reward]}\n"
        "    - name: prm\n"
        "      reads: [turns, reward]\n"
        "      writes: [step_scores@3]\n"
        "      on: admitted\n"
        "      deadline_s: 30\n",
    )
    config = load_text(text, ["reward=null"])
    score, prm = config.dataflow.stages
    assert (score.on, score.deadline_s, score.ttl_s, score.max_attempts) == (
        "delivered",
        600.0,
        12.0,
        3,
    )
    assert (prm.on, prm.deadline_s, prm.writes) == ("admitted", 30.0, ("step_scores@3",))
    assert parse(dump(config), origin="config.yaml") == config
    assert load_text(text, ["reward=null", "dataflow.stages[0].on=delivered"]) == config


def test_only_on_is_text_though_yaml_says_otherwise(example: str, load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match="yes is not text; put quotes around the key"):
        load_text(example.replace("seed: 0", "yes: 0"))
    with pytest.raises(ConfigError, match="duplicate key"):
        load_text(example.replace("seed: 0", 'on: 0\n"on": 1'))


@pytest.mark.parametrize(
    ("store", "payload"),
    [
        ("sqlite", "memory"),
        ("sqlite", "file:///data/run"),
        ("sqlite", "my_stores.mine:Own"),
        ("postgresql://localhost/run", "segments"),
        ("postgresql://user@127.0.0.1:5433/run", "segments"),
        ("postgresql:///run", "segments"),
        ("postgresql://db.lab/run", "s3://bucket/run"),
        ("postgresql://db.lab/run", "file:///shared/run"),
    ],
)
def test_stores_that_fit_together(
    store: str, payload: str, example: str, load_text: LoadText
) -> None:
    config = load_text(example, [f"dataflow.store={store}", f"dataflow.payload={payload}"])
    assert (config.dataflow.store, config.dataflow.payload) == (store, payload)


@pytest.mark.parametrize("pace", ["any", "all", "policy"])
def test_pace(pace: str, example: str, load_text: LoadText) -> None:
    assert load_text(example, [f"dataflow.pace={pace}"]).dataflow.pace == pace
