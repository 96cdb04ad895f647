# SPDX-License-Identifier: Apache-2.0
"""Names of TRL, verl and prime-rl: each is refused with what it is called here."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from tests.unit.config.conftest import EXAMPLE

from penstock.config import RunConfig
from penstock.config.algorithms import builtin_algorithms
from penstock.config.loader import parse
from penstock.config.names_elsewhere import NameElsewhere, find_name, names_elsewhere
from penstock.errors import ConfigError

ROWS = names_elsewhere()
BY_FRAMEWORK = Counter(row.framework for row in ROWS)


def message(*overrides: str, text: str = EXAMPLE) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(text, origin="run.yaml", overrides=overrides)
    return str(refused.value)


def row_id(row: NameElsewhere) -> str:
    return f"{row.framework}: {row.name}"


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a value of this type can have, in lists and mappings too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def field_of(key: str) -> Any:
    """The field of a run file with this key; fails if there is none."""
    first, *rest = key.replace("models.policy", "models").split(".")
    annotation = RunConfig.model_fields[first].annotation
    for name in rest:
        [annotation] = [
            section.model_fields[name].annotation
            for section in sections(annotation)
            if name in section.model_fields
        ]
    return annotation


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_name_gets_its_hint(row: NameElsewhere) -> None:
    """As its framework writes it, as an override, which makes the sections it is in."""
    said = message(f"{row.name}=1")
    assert said.startswith(f'override "{row.name}=1": {row.name}: unknown key; '), said
    if row.key:
        assert f'did you mean "{row.key}"?' in said
    else:
        assert "penstock has no such setting. " in said
    assert said.endswith(row.note)
    assert len(said.splitlines()) == 1


_KEY = re.compile(r"\b(?:training|algorithm|sampling|models\.policy)(?:\.\w+)+")


def test_every_hint_names_keys_that_exist() -> None:
    for row in ROWS:
        for key in [*([row.key] if row.key else []), *_KEY.findall(row.note)]:
            field_of(key)


def test_a_row_without_a_key_says_what_to_do() -> None:
    for row in ROWS:
        assert row.key or row.note, row.name
        assert not row.note or row.note.endswith("."), row.name


VALUES = [(row, *pair) for row in ROWS for pair in row.values.items()]


@pytest.mark.parametrize(
    ("row", "value", "line"), VALUES, ids=lambda part: part if isinstance(part, str) else None
)
def test_every_value_gets_a_line_that_loads(row: NameElsewhere, value: str, line: str) -> None:
    said = message(f"{row.name}={value}")
    assert f'did you mean "{line}"?' in said
    key, _, ours = line.partition(": ")
    field_of(key)
    if key == "algorithm.name":
        assert ours in builtin_algorithms()
    elif key == "algorithm.aggregation":
        parse(EXAMPLE, origin="run.yaml", overrides=[f"{key}={ours}"])


def test_there_are_enough_names() -> None:
    assert BY_FRAMEWORK["TRL"] >= 75
    assert BY_FRAMEWORK["verl"] >= 75
    assert BY_FRAMEWORK["prime-rl"] >= 40


def test_names_stand_once_per_framework_and_agree_elsewhere() -> None:
    by_name: dict[str, set[str | None]] = {}
    for row in ROWS:
        by_name.setdefault(row.name, set()).add(row.key)
    assert {name for name, keys in by_name.items() if len(keys) > 1} == set()


@pytest.mark.parametrize(
    ("override", "expected_text"),
    [
        ("train_batch_size=4", '"training.groups_per_batch"?'),
        ("training.train_batch_size=4", '"training.groups_per_batch"?'),
        ("dataflow.train_batch_size=4", '"training.groups_per_batch"?'),
        ("models.policy.model=x", '"models.policy.init"?'),
        ("models.solver.model_name_or_path=x", '"models.solver.init"?'),
        ("models.policy.use_vllm=true", '"models.policy.engine: vllm"?'),
        ("loss_type=dapo", '"algorithm.name: dapo"?'),
        ("rollout.n=8", '"algorithm.num_generations"?'),
        ("algorithm.adv_estimator=gae", '"algorithm.name: ppo"?'),
        ("trainer.steps=3", 'trainer: unknown key; did you mean "training"?'),
        ("trainer={steps: 3, nnodes: 1}", 'trainer.steps: unknown key; did you mean "training.ste'),
        ("trainer.xyz=3", '"training"?'),
        ("trainng.learning_rate=3", 'trainng: unknown key; did you mean "training"?'),
        ("sampling.n=3", "known here: temperature"),
        ("models.policy.name=x", "unknown key"),
    ],
)
def test_a_name_is_known_in_any_section(override: str, expected_text: str) -> None:
    said = message(override)
    assert expected_text in said
    assert "retain_batches" not in said


VERL = """\
actor_rollout_ref:
  model:
    path: Qwen/Qwen3-0.6B
  actor:
    ppo_mini_batch_size: 64
    optim: {lr: 1e-6, eps: 1e-8}
  rollout: {n: 8}
data:
  train_files: train.parquet
"""


def test_each_key_of_a_section_from_elsewhere_has_its_line() -> None:
    said = message(text=EXAMPLE + VERL).splitlines()
    start = len(EXAMPLE.splitlines())
    expected = [
        (3, "actor_rollout_ref.model.path", '"models.policy.init"?'),
        (5, "actor_rollout_ref.actor.ppo_mini_batch_size", "not their size"),
        (6, "actor_rollout_ref.actor.optim.lr", '"training.learning_rate"?'),
        (6, "actor_rollout_ref.actor.optim.eps", "The optimizer is AdamW"),
        (7, "actor_rollout_ref.rollout.n", '"algorithm.num_generations"?'),
        (9, "data.train_files", '"sources"?'),
    ]
    for text, (line, key, part) in zip(said, expected, strict=True):
        assert text.startswith(f"run.yaml:{start + line}: {key}: unknown key; ")
        assert part in text


def test_a_key_that_is_hinted_at_is_not_missing_too() -> None:
    said = message(text=EXAMPLE.replace("  steps: 80\n", "  max_steps: 80\n"))
    assert len(said.splitlines()) == 1, said


def test_no_row_hides_behind_a_key_of_penstock() -> None:
    """At its own place a name is unknown here, so that its hint is ever shown."""
    for row in ROWS:
        found = find_name(tuple(row.name.split(".")))
        assert found is not None
        assert (found.name, found.key) == (row.name, row.key), row.name
