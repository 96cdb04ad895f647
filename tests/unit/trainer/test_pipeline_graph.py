# SPDX-License-Identifier: Apache-2.0
"""Graphs of stages: order, refusals, functions; and plans: placement, memory, pictures."""

from __future__ import annotations

import inspect
import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from tests.unit.trainer.stage_makers import OWN, of, stage, train

from penstock.config import HostConfig, LoraConfig, PipelineConfig, PipelineStageConfig
from penstock.config.algorithms import builtin_algorithms
from penstock.config.builtin_stages import (
    STAGE_FUNCTIONS_MODULE,
    builtin_functions,
    default_functions,
)
from penstock.config.pipeline import ParallelConfig
from penstock.config.pipeline_checks import BATCH_COLUMNS
from penstock.errors import ConfigError
from penstock.plugins import load_function
from penstock.trainer.advantages.credit import Combine
from penstock.trainer.model_folders import TINY_QWEN3, init_model
from penstock.trainer.pipeline import credits
from penstock.trainer.pipeline.functions import find_function, signature_errors
from penstock.trainer.pipeline.graph import depths, topological_order
from penstock.trainer.pipeline.memory_estimate import count_adapter, count_parameters, estimate
from penstock.trainer.pipeline.plan import Plan, PolicyToPlan, make_plan
from penstock.trainer.pipeline.svg import to_svg
from penstock.trainer.stage_functions.overlong import Overlong

BUILTINS = tuple(builtin_algorithms())


def plan_for(
    stages: Sequence[PipelineStageConfig],
    hosts: Mapping[str, HostConfig] | None = None,
    num_parameters: int | None = 1_000_000_000,
) -> Plan:
    policies = {"policy": PolicyToPlan(init="model", stages=stages)}
    return make_plan(policies, hosts, count=lambda model: num_parameters)


# --- order ----------------------------------------------------------------------------------------


def test_stages_run_after_what_they_read_and_after_whom_they_name() -> None:
    stages = [
        train(),
        stage("c", "b2", "advantage"),
        stage("b", "a1", "b2"),
        stage("a", "turns", "a1"),
    ]
    assert [one.id for one in topological_order(stages)] == ["a", "b", "c", "train"]
    waiting = [stage("x", "turns", "x1", after=["y"]), stage("y", "turns", "y1")]
    assert [one.id for one in topological_order(waiting)] == ["y", "x"]
    assert depths(stages) == {"a": 0, "b": 1, "c": 2, "train": 3}


def test_the_order_is_one_of_the_graph_and_the_same_each_time() -> None:
    stages = of("ppo")
    for shuffled in itertools.permutations(stages):
        found = topological_order(shuffled)
        assert found == topological_order(shuffled)
        written = {*BATCH_COLUMNS}
        for one in found:
            assert {*one.reads} <= written
            written |= {*one.writes}


def test_of_stages_that_can_run_the_first_in_the_list_runs() -> None:
    stages = [stage(name, "turns", name * 2) for name in "cab"]
    assert [one.id for one in topological_order(stages)] == ["c", "a", "b"]


# --- functions ------------------------------------------------------------------------------------


def test_a_users_graph_needs_nothing_but_its_functions() -> None:
    graph = PipelineConfig(
        stages=(
            stage("score", "turns", "score", type="infer", fn=f"{OWN}:score", place=("gpu",)),
            stage("shape", "reward", "shaped_reward", options={"bonus": 0.5}),
            stage(
                "advantage",
                "shaped_reward",
                "advantage",
                role="advantage",
                fn=None,
                rename={"shaped_reward": "reward"},
            ),
            train(fn=f"{OWN}:plain_loss", options={"scale": 2.0}),
        )
    )
    assert [find_function(one) is not None for one in graph.stages] == [True] * 4
    plan = plan_for(graph.stages)
    assert [one.id for one in plan.chains[0].stages] == ["shape", "advantage", "train"]
    assert [one.stage.id for one in plan.services] == ["score"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (stage("s", "length", "shaped_reward"), "has no keyword length for the column"),
        (stage("s", "reward", "x", options={"bonos": 1}), "has no keyword bonos for the option"),
        (stage("s", "reward", "x", fn=f"{OWN}:needy"), "needs strength, which the stage neither"),
        (stage("s", "reward", "x", fn=f"{OWN}:no_layout"), "takes no layout"),
        (stage("s", "reward", "x", fn=f"{OWN}:unannotated"), "write -> Mapping[str, …]"),
        (stage("s", "reward", "x", fn=f"{OWN}:NOT_A_FUNCTION"), "has no function"),
        (stage("s", "reward", "x", fn="no_such_module:f"), "cannot import 'no_such_module'"),
        (train(fn=f"{OWN}:plain_loss"), "needs scale"),
        (
            stage(
                "s",
                "reward",
                "shaped_reward excluded",
                role="overlong",
                fn=None,
                options={"max_length": 3, "margin": 1},
            ),
            "needs truncated, which the stage neither reads",
        ),
    ],
)
def test_a_function_that_does_not_fit_its_stage(made: PipelineStageConfig, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_function(made)
    assert says in str(caught.value) and f"stage {made.id}: " in str(caught.value)


@pytest.mark.parametrize("name", builtin_functions())
def test_options_of_built_in_functions_are_their_keywords(name: str) -> None:
    """Every keyword is a column or an option, and the options' defaults are the signature's."""
    function, declared = getattr(credits, name), builtin_functions()[name]
    assert function.__name__ == name and find_name(name) is function
    parameters = [*inspect.signature(function).parameters.values()][1:]
    taken = {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in declared.reads
    }
    none = inspect.Parameter.empty
    known = declared.options.model_fields
    assert taken == {n: none if f.is_required() else f.default for n, f in known.items()}


def find_name(name: str) -> object:
    return load_function(f"{STAGE_FUNCTIONS_MODULE}:{name}")


def test_choices_of_built_in_functions() -> None:
    assert {*default_functions().values()} <= {
        f"{STAGE_FUNCTIONS_MODULE}:{name}" for name in builtin_functions()
    }
    hows = {"step_advantage": Combine, "overlong": Overlong}
    for name, values in hows.items():
        field = builtin_functions()[name].options.model_fields["how"]
        assert {*get_args(field.annotation)} == {*values}
    with pytest.raises(AttributeError, match="has no attribute 'grup_advantage'"):
        _ = credits.grup_advantage


def test_what_is_shipped_takes_what_the_built_in_graphs_give() -> None:
    used: set[str] = set()
    for name in BUILTINS:
        for one in of(name):
            function = find_function(one)
            assert (function is None) == (one.type != "compute")
            if function is not None:
                assert not list(signature_errors(one, function))
                used.add(one.fn or default_functions()[one.type, one.role])
    assert used >= set(default_functions().values())


# --- built-in graphs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("grpo", "advantage train"),
        ("dr_grpo", "advantage train"),
        ("reinforce", "advantage train"),
        ("decoupled", "proximal advantage train"),
        ("cispo", "advantage train"),
        ("sapo", "advantage train"),
        ("ppo", "reference values advantage train_critic train"),
        ("dapo", "overlong advantage train"),
        ("m2po", "reference advantage train"),
        ("gspo", "advantage train"),
        ("rloo", "reference advantage train"),
        ("opd", "teacher advantage train"),
    ],
)
def test_the_chain_of_each_algorithm(name: str, chain: str) -> None:
    plan = plan_for(of(name))
    assert [one.id for one in plan.chains[0].stages] == chain.split()
    assert plan.services == ()


def test_a_reference_is_there_when_a_divergence_is_weighed() -> None:
    assert [one.id for one in of("grpo", beta=0.01)] == ["reference", "advantage", "train"]
    assert of("grpo", beta=0.01)[-1].reads == ("turns", "advantage", "reference_logprobs")
    assert [one.id for one in of("m2po", beta=0.0)] == ["advantage", "train"]


def test_the_actor_looks_first_where_its_loss_needs_the_start_of_the_step() -> None:
    corrected = of("grpo", ratio_against="proximal", correction={"weighting": "truncate"})
    assert [one.id for one in corrected] == ["proximal", "advantage", "train"]
    assert corrected[-1].reads == ("turns", "advantage", "proximal_logprobs")
    both = of("grpo", ratio_against="proximal", beta=0.01)
    assert [one.id for one in both] == ["proximal", "reference", "advantage", "train"]


def test_dapo_masks_and_punishes() -> None:
    overlong, advantage, learn = of("dapo")
    assert overlong.options == {"how": "both", "max_length": 1024, "margin": 256}
    assert advantage.reads == ("shaped_reward",)
    assert "excluded" in learn.reads


# --- memory and placement -------------------------------------------------------------------------


def test_memory_is_parameters_times_bytes() -> None:
    learning, frozen = estimate(1000, is_trained=True), estimate(1000, is_trained=False)
    assert (learning.weights_bytes, learning.gradients_bytes) == (4000, 4000)
    assert (learning.optimizer_bytes, learning.total_bytes) == (8000, 16000)
    assert frozen.total_bytes == frozen.weights_bytes == 4000
    assert learning.per_rank(3).total_bytes == 1334 + 1334 + 2667


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    init_model(TINY_QWEN3, folder, seed=0)
    assert count_parameters(str(folder)) == count_parameters(TINY_QWEN3) == 100_800
    assert count_parameters(str(tmp_path / "nothing")) is None
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "a.safetensors").write_bytes(struct.pack("<Q", 20) + b"{")
    assert count_parameters(str(tmp_path / "torn")) is None


def test_a_gang_holds_each_of_its_models_once() -> None:
    chain = plan_for(of("ppo")).chains[0]
    assert chain.memory.weights_bytes == 3 * 4_000_000_000, "actor, critic, reference"
    assert chain.memory.optimizer_bytes == 2 * 8_000_000_000, "two of them learn"
    wide = [
        one.model_copy(update={"parallel": one.parallel.model_copy(update={"dp": 2, "tp": 2})})
        for one in of("grpo")
    ]
    chain = plan_for(wide).chains[0]
    assert (chain.num_ranks, chain.memory.total_bytes) == (4, 4_000_000_000)
    assert plan_for(of("grpo"), num_parameters=None).chains[0].unknown_models == ("model",)


def spread(name: str, **dp: int) -> list[PipelineStageConfig]:
    """The algorithm's stages, some of them over so many ranks."""
    return [
        one.model_copy(update={"parallel": ParallelConfig(dp=dp.get(one.id, 1))})
        for one in of(name)
    ]


def test_a_critic_begins_where_the_stage_that_trains_it_says() -> None:
    values, credit, critic, actor = of("ppo", beta=0.0)
    stages = (values, credit, critic.model_copy(update={"model": "small"}), actor)
    trained = PolicyToPlan(init="large", stages=stages)
    [chain] = make_plan({"policy": trained}, count={"large": 100, "small": 10}.get).chains
    assert chain.memory.total_bytes == 16 * (100 + 10)


def test_models_may_be_spread_differently_but_each_of_them_in_one_way() -> None:
    assert plan_for(spread("ppo", reference=3, values=2, train_critic=2)).chains[0].num_ranks == 3
    with pytest.raises(
        ConfigError, match=r"values has .*dp: 2.* stage train_critic trains with .*dp: 4.* the same"
    ):
        plan_for(spread("ppo", values=2, train_critic=4))
    bare = PolicyToPlan(init=TINY_QWEN3, stages=tuple(spread("rloo", train=2)), lora=LoraConfig())
    with pytest.raises(ConfigError, match=r"reference has .* the model that stage train trains"):
        make_plan({"policy": bare})


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    more = {"num_hidden_layers": 2, "vocab_size": 32, "num_experts_per_tok": 2, "num_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **more}))
    (tmp_path / "model.safetensors").touch()

    def plan(init: str, ep: int) -> Plan:
        parallel = ParallelConfig(dp=4, ep=ep)
        stages = tuple(one.model_copy(update={"parallel": parallel}) for one in of("grpo"))
        trained = PolicyToPlan(init=init, stages=stages)
        return make_plan({"policy": trained}, count=lambda model: 1000)

    assert plan(str(tmp_path), 2).chains[0].num_ranks == 4
    with pytest.raises(ConfigError, match=r"ep 4 cannot share the 6 experts .* a divisor of 6"):
        plan(str(tmp_path), 4)
    with pytest.raises(ConfigError, match=r"has no experts to spread over ep 2; set ep to 1"):
        plan(TINY_QWEN3, 2)


def test_under_an_adapter_that_alone_learns_and_the_reference_takes_no_room() -> None:
    trained = PolicyToPlan(init=TINY_QWEN3, stages=of("rloo"), lora=LoraConfig(rank=3))
    [chain] = make_plan({"policy": trained}).chains
    num_adapter = 3 * 2 * (3 * (64 + 128) + 2 * (64 + 128) + 2 * (64 + 64))
    assert count_adapter(TINY_QWEN3, LoraConfig(rank=3)) == num_adapter
    assert count_adapter(TINY_QWEN3, LoraConfig(rank=3, targets=("k_proj",))) == 3 * 2 * 128
    assert chain.memory.gradients_bytes == 4 * num_adapter
    assert chain.memory.optimizer_bytes == 8 * num_adapter
    num_parameters = count_parameters(TINY_QWEN3)
    assert num_parameters and chain.memory.weights_bytes == 4 * (num_parameters + num_adapter)


def hosts(*kinds: tuple[str, float, int]) -> dict[str, HostConfig]:
    """Machines h0, h1, ..., each with tags, GB and a number of devices."""
    return {
        f"h{index}": HostConfig(tags=tuple(tags.split()), memory_gb=size, devices=devices)
        for index, (tags, size, devices) in enumerate(kinds)
    }


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    grpo = of("grpo")
    fitting = plan_for(grpo, hosts(("rollout", 80, 1), ("train h100", 16, 2)))
    assert fitting.chains[0].hosts == ("h1:0",)
    cpu = plan_for(grpo, hosts(("rollout", 80, 0), ("train", 16, 0)))
    assert cpu.chains[0].hosts == ("h1",)
    with pytest.raises(
        ConfigError, match=r"needs 1 place tagged train, .* 0 of the 3 places .*1 short"
    ):
        plan_for(grpo, hosts(("rollout", 80, 3)))
    with pytest.raises(ConfigError, match=r"16 GB free on each .* has 12\.5 GB: 3\.5 GB short"):
        plan_for(grpo, hosts(("train", 10, 1), ("train", 12.5, 1)))
    both = [
        one.model_copy(update={"parallel": one.parallel.model_copy(update={"dp": 2})})
        for one in grpo
    ]
    with pytest.raises(ConfigError, match=r"needs 2 places tagged train, .* 1 of .*1 short"):
        plan_for(both, hosts(("train", 80, 1), ("gpu", 80, 1)))


def test_services_go_where_their_tags_are_and_share_what_is_left() -> None:
    score = stage(
        "score", "turns", "score", type="infer", fn=f"{OWN}:score", place=("gpu",), model="judge"
    )
    stages = (score, *of("grpo"))
    plan = plan_for(stages, hosts(("train gpu", 21, 1)))
    assert plan.services[0].hosts == plan.chains[0].hosts == ("h0:0",)
    with pytest.raises(ConfigError, match=r"service score needs .* 4 GB .* has 3 GB: 1 GB short"):
        plan_for(stages, hosts(("train gpu", 19, 1)))
    with pytest.raises(ConfigError, match=r"service score needs 1 place tagged gpu, .* 0 of"):
        plan_for(stages, hosts(("train", 21, 1)))


# --- pictures -------------------------------------------------------------------------------------


def boxes_and_texts(svg: str) -> tuple[list[dict[str, str]], list[str]]:
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    rects = [dict(rect.attrib) for rect in root.iter(f"{space}rect") if rect.get("rx") == "7"]
    return rects, [text.text or "" for text in root.iter(f"{space}text")]


@pytest.mark.parametrize("name", BUILTINS)
def test_the_picture_has_every_stage_and_column(name: str) -> None:
    rects, texts = boxes_and_texts(to_svg(plan_for(of(name)), f"a <run> & {name}"))
    assert len(rects) == len(of(name))
    for number, one in enumerate(plan_for(of(name)).chains[0].stages, 1):
        assert f"{number}. {one.id}" in texts
        for column in one.reads:
            assert any(column in text.split(", ") for text in texts)


def test_boxes_of_several_gangs_do_not_lie_on_each_other() -> None:
    score = stage("score", "turns", "score", type="infer", fn=f"{OWN}:score", place=("gpu",))
    shape = stage("shape", "reward score", "shaped_reward", fn=f"{OWN}:shape")
    policies = {
        "a": PolicyToPlan(init="model", stages=(score, shape, *of("ppo"))),
        "b": PolicyToPlan(init="model", stages=(score, shape, *of("m2po"))),
    }
    plan = make_plan(policies, count=lambda model: 1000)
    assert [one.stage.id for one in plan.services] == ["score"], "one service for both gangs"
    rects, texts = boxes_and_texts(to_svg(plan, "run"))
    assert len(rects) == 1 + 6 + 4 and "score" in texts
    spans = [(float(r["x"]), float(r["y"]), float(r["width"]), float(r["height"])) for r in rects]
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(spans, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_planning_and_drawing_need_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "import penstock.trainer.pipeline.svg, penstock.trainer.pipeline.builtin\n"
        "import penstock.trainer.pipeline.functions, penstock.trainer.pipeline.credits\n"
        "print('[]')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
