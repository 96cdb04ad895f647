# SPDX-License-Identifier: Apache-2.0
"""The stored form: reading a dump gives the same config, and changes are named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import (
    RunConfig,
    config_changes,
    demo_config,
    dump,
    identity,
    identity_changes,
    load,
    run_dir,
)
from penstock.config.loader import parse
from penstock.config.store_password import password_in, without_password

LoadText = Callable[..., RunConfig]

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: bool(text.strip()) and text != "???"
)
TRICKY = st.text(alphabet=st.sampled_from(list("\\${}a.'\"#: -?1e\n")), min_size=1).filter(
    lambda text: bool(text.strip()) and text != "???"
)
RATES = st.floats(min_value=1e-300, max_value=0.9)
RULES = [
    [],
    [{"admit": "reward-spread"}],
    [{"admit": "outcome", "allow": ["truncated"]}, {"curate": "greso", "delta": 0.5}],
    [{"replay": "newest", "ratio": 0.3, "max_uses": 4}, {"mix": "curriculum"}],
    [{"admit": "mine.rules:Mine", "list": [1, {"a": None}], "text": "${x}"}],
]
STAGE = {"name": "prm", "reads": ["turns"], "writes": ["steps@1"], "on": "admitted"}


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Any valid config, built without the loader."""
    size = draw(st.integers(2, 50))
    own_training = st.fixed_dictionaries({"learning_rate": RATES})
    model = st.fixed_dictionaries(
        {"init": TEXTS.filter(lambda text: not text.startswith("builtin:"))},
        optional={
            "replicas": st.integers(0, 9),
            "training": own_training,
            "dataflow": st.just({"rules": [{"select": "fifo"}]}),
        },
    )
    command = st.lists(TEXTS | TRICKY | st.just(""), min_size=1)
    return RunConfig.model_validate(
        {
            "name": draw(NAMES),
            "output_dir": draw(TEXTS | TRICKY),
            "models": draw(st.dictionaries(NAMES, model, min_size=1, max_size=3)),
            "sources": [{"name": draw(NAMES), "task": "tasks", "weight": draw(RATES)}],
            "workflow": {"command": [arg for arg in draw(command) if arg != "???"] or ["x"]},
            "dataflow": {
                "closing": draw(st.sampled_from(["complete", "drop", "survivors(2)"])),
                "rules": draw(st.sampled_from(RULES)),
                "stages": draw(st.sampled_from([[], [STAGE]])),
                "spaces": draw(st.sampled_from([[], [{"name": "eval", "quota_mb": 5}]])),
                "pace": draw(st.sampled_from(["any", "all"])),
            },
            "algorithm": {"num_generations": size, "epsilon": draw(RATES)},
            "training": {"steps": draw(st.integers(1, 10**9)), "learning_rate": draw(RATES)},
        }
    )


@settings(deadline=None, max_examples=20)
@given(config=configs())
def test_reading_a_dump_gives_an_equal_config(config: RunConfig) -> None:
    again = parse(dump(config), origin="config.yaml")
    assert again == config
    assert identity(again) == identity(config)
    assert config_changes(config, again) == []
    assert dump(again) == dump(config)


def test_dump_survives_a_file(tmp_path: Path) -> None:
    config = demo_config(3)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_writing_out_a_default_changes_nothing(example: str, load_text: LoadText) -> None:
    written_out = load_text(example, ["sampling.top_p=1", "models.policy.capacity=256"])
    assert identity(load_text(example)) == identity(written_out)


def test_moving_the_folder_changes_nothing(example: str, load_text: LoadText) -> None:
    here, there = load_text(example), load_text(example, ["output_dir=/elsewhere"])
    assert identity(here) == identity(there)
    assert config_changes(here, there) == []


def test_differences_name_keys_and_values(example: str, load_text: LoadText) -> None:
    old = load_text(example)
    new = load_text(
        example,
        ["training.steps=81", "reward=null", "models.b={init: x}", "dataflow.rules=[{admit: all}]"],
    )
    assert identity(old) != identity(new)
    found = config_changes(old, new)
    assert "training.steps: 80 -> 81" in found
    assert 'reward: "penstock.tasks.reverse:reward" -> null' in found
    assert 'models.b.init: (absent) -> "x"' in found
    assert 'dataflow.rules[0].admit: "reward-spread" -> "all"' in found
    assert 'dataflow.rules[1].select: "edf" -> (absent)' in found


def test_what_may_change_freely_is_no_part_of_what_a_run_is(
    example: str, load_text: LoadText
) -> None:
    old = load_text(example)
    free = ["training.steps=81", "models.policy.capacity=9", "dataflow.lease.ttl_s=3"]
    assert identity(load_text(example, free)) == identity(old)
    assert len(config_changes(old, load_text(example, free))) == 3
    for name in ("training.learning_rate=1", "seed=5", "algorithm.epsilon=0.3", "reward=null"):
        assert identity(load_text(example, [*free, name])) != identity(old), name
        (found,) = identity_changes(identity(old), identity(load_text(example, [*free, name])))
        assert found.startswith(name.partition("=")[0])


@pytest.mark.parametrize("shape", ["linear", "cosine", "warmup_stable_decay"])
@pytest.mark.parametrize("where", ["training", "models.policy.training"])
def test_steps_are_free_while_the_learning_rate_stays(
    example: str, load_text: LoadText, shape: str, where: str
) -> None:
    more, falls = f"{where}.steps=81", f"{where}.lr_scheduler_type={shape}"
    same = f"{where}.steps=80"
    assert identity(load_text(example, [more])) == identity(load_text(example, [same]))
    old, new = (load_text(example, [falls, steps]) for steps in (same, more))
    assert identity(old) != identity(new)
    (found,) = identity_changes(identity(old), identity(new))
    key = f"{where}.lr_scheduler_type"
    assert found == (f'{key}: "{shape}" over 80 training.steps -> "{shape}" over 81 training.steps')
    assert identity(parse(dump(old), origin="x")) == identity(old)


def test_run_dir() -> None:
    assert run_dir(demo_config(0)) == Path("outputs/reverse")


def test_the_password_of_a_store_is_kept_nowhere() -> None:
    with_it, without = (
        parse(
            dump(demo_config(0)),
            origin="x",
            overrides=[f"dataflow.store={url}", "dataflow.payload=s3://bucket/run"],
        )
        for url in (
            "postgresql://me:se%2Fcret@db.example:5432/runs?sslmode=require&password=se/cret",
            "postgresql://me@db.example:5432/runs?sslmode=require",
        )
    )
    assert "/cret" not in dump(with_it) and "Fcret" not in dump(with_it)
    assert parse(dump(with_it), origin="x") == without
    assert identity(with_it) == identity(without) and config_changes(with_it, without) == []
    assert password_in(with_it.dataflow.store) == "se/cret"
    assert password_in(without.dataflow.store) == password_in("sqlite") == ""
    assert without_password("postgresql:///runs") == "postgresql:///runs"


def test_a_model_of_the_hub_without_a_revision_is_the_one_the_run_started_with() -> None:
    def named(init: str) -> dict[str, str]:
        return identity(demo_config(0, [f"models.policy.init={init}"]))

    commit = "0123456789abcdef0123456789abcdef01234567"
    assert identity_changes(named(f"a/b@{commit}"), named("a/b")) == []
    for other in ("a/c", "a/b@main", f"a/b@{commit[::-1]}"):
        assert len(identity_changes(named(f"a/b@{commit}"), named(other))) == 1
    assert len(identity_changes(named("a/b"), named(f"a/b@{commit}"))) == 1, "it was a folder"
