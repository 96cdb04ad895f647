# SPDX-License-Identifier: Apache-2.0
"""What `training.stream` refuses: each with its key, the reason and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import RunConfig
from penstock.config.algorithms import builtin_algorithms
from penstock.config.builtin_stages import builtin_functions


def load(
    algorithm: dict[str, Any], training: dict[str, Any] | None = None, **more: Any
) -> RunConfig:
    written = {"steps": 3, "groups_per_batch": 4, "minibatches": 1, "stream": True}
    return RunConfig.model_validate(
        {
            "name": "streamed",
            "models": {"policy": {"init": "builtin:tiny-qwen3"}},
            "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
            "algorithm": algorithm,
            "training": written | (training or {}),
            **more,
        }
    )


GOOD = {"name": "dr_grpo"}
SEQUENCES = {"aggregation": "seq-mean-token-mean"}


def advantage(name: str) -> dict[str, Any]:
    stage = {"id": "advantage", "type": "compute", "role": "advantage", "reads": ["reward"]}
    train = {"id": "train", "type": "train", "role": "actor", "reads": ["turns", "advantage"]}
    return {"stages": [stage | {"writes": ["advantage"], "fn": name}, train | {"writes": []}]}


CREDITS = "penstock.trainer.pipeline.credits"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"name": "grpo"}, {}, {}, "token-mean divides by the tokens of the complete batch"),
    (GOOD, {"minibatches": 2}, {}, "minibatches is 2.*set minibatches: 1"),
    (GOOD, {"epochs": 2}, {}, "epochs is 2.*set epochs: 1"),
    (GOOD, {"parallel": {"dp": 2}}, {}, "2 ranks.*set parallel"),
    ({"name": "m2po", **SEQUENCES}, {}, {}, "m2po needs the complete batch: its budget tau"),
    ({"name": "reinforce", **SEQUENCES}, {}, {}, "advantage normalises over the complete batch"),
    ({"name": "ppo", **SEQUENCES}, {}, {}, "train_critic trains the critic before the actor"),
    (GOOD, {}, {"dataflow": {"rules": [{"select": "length-balanced"}]}}, "select length-balanced"),
    (GOOD, {"max_staleness": 2}, {"dataflow": {"rules": [{"replay": "newest"}]}}, "replay newest"),
    (GOOD, {}, {"pipeline": advantage("my.module:mine")}, "advantage runs your own function"),
    (GOOD, {}, {"pipeline": advantage(f"{CREDITS}:group_then_batch_advantage")}, "normalises over"),
]


@pytest.mark.parametrize(("algorithm", "training", "more", "text"), REFUSED)
def test_what_needs_the_complete_batch_is_refused(
    algorithm: dict[str, Any], training: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=f"stream: .*{text}.*or set stream: false"):
        load(algorithm, training, **more)
    assert load(algorithm, training | {"stream": False}, **more), "only because it is streamed"


@pytest.mark.parametrize("name", builtin_algorithms())
def test_an_algorithm_is_streamed_or_says_why_not(name: str) -> None:
    more = {"teacher": "builtin:tiny-qwen3"} if name == "opd" else {}
    chosen = {"name": name, "aggregation": "fixed-constant", **more}
    if name in ("m2po", "reinforce", "ppo"):
        with pytest.raises(ValueError, match="stream: "):
            load(chosen)
    else:
        assert load(chosen).training.stream


def test_each_built_in_function_that_looks_beyond_a_group_says_so() -> None:
    beyond = {name for name, one in builtin_functions().items() if not one.is_by_group}
    assert beyond == {"batch_advantage", "group_then_batch_advantage", "gae", "to_go_advantage"}


def test_it_is_refused_for_the_policy_that_is_streamed() -> None:
    own = {"init": "builtin:tiny-qwen3", "training": {"steps": 3, "minibatches": 1, "stream": True}}
    models = {"policy": {"init": "builtin:tiny-qwen3"}, "other": own}
    with pytest.raises(ValueError, match="token-mean"):
        load({"name": "grpo"}, {"stream": False}, models=models)
