# SPDX-License-Identifier: Apache-2.0
"""A head on a tiny model: it recovers a linear teacher, is split by trajectory, and refuses labels
of other texts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.trainer.model_folders import TINY_QWEN3
from penstock.trainer.prm.head import Regressor
from penstock.trainer.prm.step_text import scored_texts, text_digest
from penstock.trainer.prm.traces import LabelledTrace, Step, Trace, write_lines
from penstock.trainer.prm.training import (
    Example,
    TrainingSpec,
    examples_of,
    split,
    train_version,
)
from penstock.trainer.prm.versions import newest, numbers

LETTERS = "abcdefghij"


def trace(row: int, draw: random.Random, num_steps: int = 3) -> Trace:
    def word() -> str:
        return "".join(draw.choices(LETTERS, k=draw.randint(2, 6)))

    steps = tuple(
        Step(prompt=f"{word()}>", action=word(), parent=index - 1) for index in range(num_steps)
    )
    key = f"p0-{row}.0.1"
    return Trace(row=key, group=f"p0-{row}", task={}, outcome="completed", reward=1.0, steps=steps)


def labelled(one: Trace, labels: tuple[float | None, ...]) -> LabelledTrace:
    return LabelledTrace(
        trace=one, labels=labels, labeller="program:teacher", text_digest=text_digest()
    )


def teach(path: Path, model_folder: Path, num_traces: int) -> None:
    """Labels that are linear in the hidden state of the step's last token."""
    draw = random.Random(3)
    traces = [trace(row, draw) for row in range(num_traces)]
    model = Regressor.load(model_folder, max_tokens=512)
    with torch.no_grad():
        texts = [
            model.tokenize(text) for one in traces for text in scored_texts(one.steps).values()
        ]
        features = model.features(texts).numpy()
    weights = np.random.default_rng(0).standard_normal(features.shape[1])
    values = (features - features.mean(0)) @ weights
    values = iter((0.5 + 0.15 * values / values.std()).clip(0, 1).tolist())
    write_lines(path, [labelled(one, tuple(next(values) for _ in one.steps)) for one in traces])


def test_the_head_recovers_a_linear_teacher(model_folder: Path, tmp_path: Path) -> None:
    teach(tmp_path / "labels.jsonl", model_folder, 120)
    spec = TrainingSpec(model=str(model_folder), held_out=0.2, is_head_only=True)
    made = train_version(tmp_path / "labels.jsonl", tmp_path / "prm", spec)
    agreement = made.card.agreement
    assert agreement.mae < 0.05 < agreement.constant_mae
    assert agreement.spearman > 0.9
    assert sum(one.num_steps for one in agreement.calibration) == agreement.num_steps
    again = Regressor.load(made.folder, max_tokens=512, offset=made.card.offset)
    fresh = Regressor.load(model_folder, max_tokens=512, offset=0.5)
    texts = ["abc>cab", "j>a"]
    assert fresh.score(texts) == [0.5, 0.5], "a new head gives its offset"
    assert again.score(texts) != [0.5, 0.5]
    assert again.score(texts) == pytest.approx([*again.score(texts[:1]), *again.score(texts[1:])])


def test_training_all_weights_lowers_the_error(tmp_path: Path) -> None:
    """Good steps end in a, bad ones in b."""
    draw = random.Random(5)
    path = tmp_path / "labels.jsonl"
    records: list[LabelledTrace] = []
    for row in range(24):
        one = trace(row, draw, num_steps=2)
        ends = [draw.choice("ab") for _ in one.steps]
        steps = tuple(
            replace(step, action=step.action + end)
            for step, end in zip(one.steps, ends, strict=True)
        )
        labels = tuple(1.0 if end == "a" else 0.0 for end in ends)
        records.append(labelled(replace(one, steps=steps), labels))
    write_lines(path, records)
    losses: list[float] = []
    spec = TrainingSpec(model=TINY_QWEN3, epochs=5, learning_rate=3e-3, batch_steps=8, held_out=0.2)
    made = train_version(path, tmp_path / "prm", spec, lambda _, loss: losses.append(loss))
    assert len(losses) == 5 and losses[-1] < losses[0] / 4
    assert made.card.agreement.mae < 0.2


def test_training_again_makes_the_next_version(model_folder: Path, tmp_path: Path) -> None:
    teach(tmp_path / "labels.jsonl", model_folder, 20)
    spec = TrainingSpec(model=str(model_folder), held_out=0.3, epochs=1)
    first, second = (
        train_version(tmp_path / "labels.jsonl", tmp_path / "prm", spec) for _ in range(2)
    )
    assert (first.number, second.number, numbers(tmp_path / "prm")) == (1, 2, [1, 2])
    assert first.card == second.card, "the same seed gives the same model"
    assert newest(tmp_path / "prm") == second
    assert [path.name for path in (tmp_path / "prm").iterdir() if path.name[0] == "."] == []


def test_a_trajectory_is_on_one_side_only() -> None:
    examples = [Example(row=f"r{n // 5}", text="", label=0.0) for n in range(1000)]
    known, held_out = split(examples, 0.2)
    assert not {one.row for one in known} & {one.row for one in held_out}
    assert 20 <= len({one.row for one in held_out}) <= 60
    more, _ = split([*examples, Example(row="new", text="", label=0.0)], 0.2)
    assert {one.row for one in known} <= {one.row for one in more}


def test_malformed_and_unlabelled_steps_are_not_shown() -> None:
    one = trace(0, random.Random(1))
    steps = (replace(one.steps[0], malformed="empty"), *one.steps[1:])
    found = list(examples_of(labelled(replace(one, steps=steps), (0.0, None, 0.5))))
    assert [example.label for example in found] == [0.5]


def test_labels_of_other_texts_are_refused(tmp_path: Path) -> None:
    one = labelled(trace(0, random.Random(1)), (0.1, 0.2, 0.3))
    write_lines(tmp_path / "labels.jsonl", [replace(one, text_digest="0" * 32)])
    with pytest.raises(
        ConfigError, match=r"row p0-0\.0\.1 was made with step texts of another form"
    ):
        train_version(tmp_path / "labels.jsonl", tmp_path / "prm", TrainingSpec(model=TINY_QWEN3))
    assert numbers(tmp_path / "prm") == []


def test_too_few_labels_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "labels.jsonl", [labelled(trace(0, random.Random(1)), (0.1, 0.2, 0.3))])
    with pytest.raises(ConfigError, match="label more trajectories"):
        train_version(tmp_path / "labels.jsonl", tmp_path / "prm", TrainingSpec(model=TINY_QWEN3))
