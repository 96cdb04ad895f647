# SPDX-License-Identifier: Apache-2.0
"""Scores of rows: malformed steps get 0 unseen, a new version is picked up, a wrong one is not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.trainer.doubles import make_trajectory, make_turn

from penstock.errors import ConfigError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.decoded import DecodedToolCall, DecodedTurn, Decoder
from penstock.runs.prm.scoring import ConversationScorer, RowScores, StepScorer
from penstock.runs.prm.steps import (
    BROKEN_CALL,
    CUT_OFF,
    EMPTY,
    NOT_JSON,
    UNKNOWN_TOOL,
    steps_of,
    why_malformed,
)
from penstock.trainer.model_folders import TINY_QWEN3, init_model
from penstock.trainer.prm.head import Regressor
from penstock.trainer.prm.report import Agreement
from penstock.trainer.prm.reward_model import RewardModel, conversation
from penstock.trainer.prm.step_text import text_digest
from penstock.trainer.prm.traces import Step
from penstock.trainer.prm.versions import Card, new_version, write_card
from penstock.types import FinishReason, PolicyName, ToolUse, Trajectory

NOBODY = Agreement(
    num_steps=0, num_trajectories=0, mae=0, constant_mae=0, spearman=0, calibration=()
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    init_model(TINY_QWEN3, folder, seed=0)
    return folder


def add_version(
    folder: Path, base: Path, offset: float, digest: str = "", weight: float = 0.0
) -> None:
    with new_version(folder) as made:
        model = Regressor.load(base, max_tokens=64)
        torch.nn.init.constant_(model.head.weight, weight)
        model.save(made, base)
        card = Card(
            text_digest=digest or text_digest(),
            base="tiny",
            labellers=("program:x",),
            labels_digest="",
            max_tokens=64,
            offset=offset,
            num_steps=1,
            agreement=NOBODY,
        )
        write_card(made, card)


class FakeDecoder:
    """Decodes turns to what a test says they are."""

    def __init__(self, *turns: DecodedTurn) -> None:
        self._turns = turns

    def turns(self, trajectory: Trajectory) -> tuple[DecodedTurn, ...]:
        return self._turns


def decoded(answer: str, parent: int = -1, finish: str = "stop", calls: str = "") -> DecodedTurn:
    return DecodedTurn(
        policy="policy",
        role="",
        parent=parent,
        prompt="abc>",
        answer=answer,
        reasoning="",
        tool_calls=(DecodedToolCall(name="search", arguments=calls),) if calls else (),
        versions=(),
        finish=finish,
        num_tokens=1,
    )


def scorer_of(folder: Path, *turns: DecodedTurn) -> StepScorer:
    return StepScorer(folder, cast(Decoder, FakeDecoder(*turns)), {"policy"})


def row(*lengths: int) -> Trajectory:
    turns = [make_turn([1], [4] * n, parent=at - 1) for at, n in enumerate(lengths)]
    return make_trajectory(*turns)


def test_each_token_has_the_score_of_its_turn(base: Path, tmp_path: Path) -> None:
    add_version(tmp_path / "prm", base, offset=0.5)
    turns = (decoded("ab"), decoded("", parent=0), decoded("cd", parent=1))
    scorer = scorer_of(tmp_path / "prm", *turns)
    trajectory = row(2, 3, 1)
    other = replace(trajectory.turns[2], policy=PolicyName("other"))
    trajectory = replace(trajectory, turns=(*trajectory.turns[:2], other))
    columns = scorer(trajectory)
    scores = np.frombuffer(columns["step_scores"], "<f4").tolist()
    assert scores == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "malformed, and another policy's turn"
    record = msgspec.json.decode(columns["step_scores@1"], type=RowScores)
    assert record.scores == (0.5, 0.0, None) and record.text_digest == text_digest()


def test_an_all_malformed_row_gets_zeros_without_the_model(base: Path, tmp_path: Path) -> None:
    add_version(tmp_path / "prm", base, offset=0.5, weight=math.nan)
    empty = decoded(" ")
    assert not any(scorer_of(tmp_path / "prm", empty, empty)(row(1, 2))["step_scores"])
    with pytest.raises(ValueError, match="not finite"):
        scorer_of(tmp_path / "prm", decoded("a"))(row(1))


def test_a_new_version_is_used_at_once_and_a_wrong_one_never(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prm"
    with pytest.raises(ConfigError, match="has no process reward model"):
        scorer_of(folder)
    add_version(folder, base, offset=0.25)
    scorer = scorer_of(folder, decoded("a"))
    assert "step_scores@1" in scorer(row(1))
    add_version(folder, base, offset=0.75)
    found = scorer(row(1))
    assert np.frombuffer(found["step_scores"], "<f4") == 0.75 and "step_scores@2" in found
    add_version(folder, base, offset=1.0, digest="f" * 32)
    assert "step_scores@2" in scorer(row(1)), "made with other texts"
    with pytest.raises(ConfigError, match="was made with step texts of another form"):
        scorer_of(folder)


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (decoded("fine"), ""),
        (decoded("  \n"), EMPTY),
        (decoded("abc", finish="length"), CUT_OFF),
        (decoded("abc", finish="abort"), CUT_OFF),
        (decoded("", calls='{"q": 1}'), ""),
        (decoded("", calls="[1]"), NOT_JSON),
        (decoded("", calls="{q"), NOT_JSON),
        (decoded('<tool_call>{"name"'), BROKEN_CALL),
    ],
)
def test_what_is_malformed(turn: DecodedTurn, why: str) -> None:
    assert why_malformed(turn, ()) == why


def test_a_call_of_an_unknown_tool_is_malformed_and_a_failed_one_is_not() -> None:
    turn = decoded("", calls="{}")
    use = ToolUse(turn=0, name="search", arguments="{}", result="there is no tool 'x'; the tools")
    assert why_malformed(turn, [replace(use, is_error=True)]) == UNKNOWN_TOOL
    assert why_malformed(turn, [use]) == ""
    assert why_malformed(turn, [replace(use, is_error=True, result="timeout")]) == ""


def test_turns_are_decoded_with_the_tokenizer_of_the_run(base: Path, tmp_path: Path) -> None:
    from tests.contract.dataflow_server import small_config

    config = small_config()
    model = config.models["policy"].model_copy(update={"init": str(base)})
    folder = RunFolder(tmp_path)
    folder.write_config(config.model_copy(update={"models": {"policy": model}}))
    turn = replace(make_turn([4, 5, 3], [5, 4, 1]), finish=FinishReason.STOP)
    [step] = steps_of(make_trajectory(turn), Decoder(folder), {turn.policy})
    assert (step.prompt, step.action, step.malformed) == ("ab>", "ba", "")


def classifier(base: Path, folder: Path, num_labels: int) -> Path:
    from penstock.trainer.prm.head import load_classifier

    model, missing = load_classifier(base, num_labels=num_labels)
    assert missing == {"score.weight"}
    torch.nn.init.constant_(model.score.weight, 0.0)
    model.score.weight.data[-1] = 0.01
    Regressor(model, Regressor.load(base, max_tokens=8)._tokenizer, max_tokens=8, offset=0).save(  # pyright: ignore[reportPrivateUsage]
        folder, base
    )
    return folder


@pytest.mark.parametrize("num_labels", [1, 2])
def test_a_reward_model_scores_conversations(base: Path, tmp_path: Path, num_labels: int) -> None:
    model = RewardModel(classifier(base, tmp_path / "rm", num_labels), max_tokens=64)
    first, second = model.score("abc>cba"), model.score("abc>j")
    assert first != second and math.isfinite(first)
    if num_labels == 2:
        assert 0 < first < 1
    turns = (decoded("ab"), decoded("cd", parent=0))
    scorer = ConversationScorer(model, cast(Decoder, FakeDecoder(*turns)), {"policy"})
    assert scorer(row(1, 1)) == {"reward": model.score("abc>ababc>cd")}


def test_what_is_not_a_reward_model_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is not a reward model"):
        RewardModel(base, max_tokens=64)
    with pytest.raises(ConfigError, match="has 3 labels"):
        RewardModel(classifier(base, tmp_path / "rm", 3), max_tokens=64)
    with pytest.raises(ValueError, match="no turn of a trained policy"):
        conversation((Step(prompt="", action="", is_scored=False),))
