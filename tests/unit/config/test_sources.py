# SPDX-License-Identifier: Apache-2.0
"""Sources with a data set, a workflow, a reward and a sampling of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.config import CommandWorkflow, RunConfig, dump
from penstock.config.sources import NamedWorkflow
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.build_sources import build_source, data_spec
from penstock.errors import ConfigError

LoadText = Callable[..., RunConfig]
RUN = """\
name: mixed
models: {policy: {init: builtin:tiny-qwen3}}
training: {steps: 1}
reward: rewards:shared
sampling: {temperature: 0.5, max_tokens: 64}
sources:
  - {name: plain, task: penstock.tasks.reverse}
  - name: sums
    data: {path: openai/gsm8k, name: main, columns: {prompt: question}, limit: 9}
    sampling: {max_tokens: 8}
  - name: games
    data: games.csv
    workflow: {command: [play, --fast]}
    reward: rewards:game
"""


def test_what_a_source_does_not_set_is_the_runs(load_text: LoadText) -> None:
    config = load_text(RUN)
    plain, sums, games = config.sources
    assert [config.reward_of(one) for one in config.sources] == [
        "rewards:shared",
        "rewards:shared",
        "rewards:game",
    ]
    assert config.workflow_of(plain) == config.workflow_of(sums) == "single_turn"
    assert config.workflow_of(games) == CommandWorkflow(command=("play", "--fast"))
    sampling = config.sampling_of(sums)
    assert (sampling.max_tokens, sampling.temperature) == (8, 0.5)
    assert config.sampling_of(games) == config.sampling
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert load_text(dump(config)) == config


def test_a_node_is_told_of_the_sources_that_differ(load_text: LoadText) -> None:
    info = run_info(load_text(RUN))
    assert [source.name for source in info.sources] == ["sums", "games"]
    sums, games = info.sources
    assert (sums.workflow, sums.reward, sums.sampling.max_tokens) == (
        "single_turn",
        "rewards:shared",
        8,
    )
    assert (games.workflow, games.reward) == ('["play", "--fast"]', "rewards:game")
    assert games.sampling == info.sampling


def test_prompts_are_checked_where_we_read_them(load_text: LoadText) -> None:
    config = load_text(RUN)
    plain, sums, games = (data_spec(config, source) for source in config.sources)
    assert plain is None
    assert sums is not None and games is not None
    assert (sums.has_prompt, sums.columns, sums.limit) == (True, {"prompt": "question"}, 9)
    assert (games.has_prompt, games.path) == (False, "games.csv")


def test_a_file_under_task_is_a_data_set(load_text: LoadText) -> None:
    config = load_text(RUN.replace("penstock.tasks.reverse", "a.jsonl"))
    spec = data_spec(config, config.sources[0])
    assert spec is not None and (spec.path, spec.has_prompt) == ("a.jsonl", True)


PLAIN = "task: penstock.tasks.reverse"
BROKEN = [
    ("reward: rewards:shared\n", "", "sources[0]: source plain has no reward, and workflow single"),
    (PLAIN, f"{PLAIN}, data: a.csv", "sources[0].data: source plain needs exactly one of task:"),
    (PLAIN, "session: {}, reward: 'a:b'", "sources[0].reward: reward has no effect on sessions"),
    (PLAIN, "session: {}, sampling: {}", "sources[0].sampling: sampling has no effect on sessions"),
    (PLAIN, "session: {}, workflow: single_turn", "sources[0].workflow: workflow has no effect"),
    (PLAIN, "data: {path: a.csv, split: test}", "data.split: split belongs to a data set with"),
    (PLAIN, "data: {path: ./a, revision: v1}", "data.revision: revision belongs to a data set of"),
    (PLAIN, f"{PLAIN}, workflow: sinlge_turn", 'workflow: unknown workflow "sinlge_turn"; did you'),
    (PLAIN, f"{PLAIN}, reward: mine", "sources[0].reward: "),
    (PLAIN, f"{PLAIN}, sampling: {{temprature: 1}}", 'did you mean "temperature"?'),
    ("data: games.csv", "data: {path: g.csv, max_prompt_tokens: 9}", "source games has another"),
    ("engine: hf", "engine: vllm", "sources[0].sampling.temperature: temperature 3: vLLM"),
    (
        "reward: rewards:shared",
        "dataflow: {stages: [{name: judge, reads: [turns], writes: [reward]}]}",
        "stage judge writes reward, but the nodes already score with",
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), BROKEN)
def test_what_does_not_go_together(load_text: LoadText, old: str, new: str, expected: str) -> None:
    text = RUN.replace("qwen3}", "qwen3, engine: hf}")
    if "vllm" in new:
        text = text.replace(PLAIN, f"{PLAIN}, sampling: {{temperature: 3}}")
    changed = text.replace(old, new, 1)
    assert changed != text
    with pytest.raises(ConfigError) as caught:
        load_text(changed)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("workflow", "options"),
    [
        ("{name: tool_loop}", {"max_turns": 8}),
        ("{name: tool_loop, max_turns: 3}", {"max_turns": 3}),
        ("{name: 'my_agent:run', depth: 2, words: [a]}", {"depth": 2, "words": ["a"]}),
    ],
)
def test_a_workflow_has_options(
    load_text: LoadText, workflow: str, options: dict[str, object]
) -> None:
    config = load_text(f"{RUN}workflow: {workflow}\n")
    assert isinstance(config.workflow, NamedWorkflow) and config.workflow.options == options
    assert load_text(dump(config)) == config
    text = run_info(config).workflow
    assert json.loads(text) == {"name": config.workflow.name, **options}
    assert config.workflow_name_of(config.sources[0]) == config.workflow.name


@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        ("{name: tool_loop, max_turn: 3}", r'workflow.max_turn: unknown option "max_turn" of tool'),
        ("{name: tool_loop, max_turns: 0}", r"workflow\.max_turns: .*must be greater than 0"),
        ("{name: tool_lop}", r'workflow\.name: unknown workflow "tool_lop"; did you mean'),
        ("{max_turns: 3}", r"workflow\.max_turns: unknown key"),
        ("{command: [a], max_turns: 3}", r"workflow\.max_turns"),
    ],
)
def test_options_that_do_not_fit_are_refused(load_text: LoadText, workflow: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_text(f"{RUN}workflow: {workflow}\n")


LAKE = """\
  - name: lake
    workflow: my_flow:play
    env: {gymnasium: FrozenLake-v1, options: {is_slippery: false}, actions: {left: 0}, num_tasks: 2}
"""


def test_a_source_may_be_an_environment(load_text: LoadText) -> None:
    config = load_text(RUN + LAKE)
    lake = config.sources[-1]
    assert load_text(dump(config)) == config
    env = run_info(config).sources[-1].env
    assert env is not None and (env.library, env.calls_model) == ("gymnasium", False)
    assert env.settings["name"] == "FrozenLake-v1" and env.settings["actions"] == {"left": 0}
    source = build_source(config, lake)
    tasks = [source.task(n, seed=config.seed, workflow="") for n in range(3)]
    assert [task.payload["index"] for task in tasks] == [0, 1, 0]
    assert tasks[0].key == tasks[2].key != tasks[1].key
    assert tasks[0].payload["seed"] != tasks[1].payload["seed"]


def test_rows_of_a_data_set_may_be_the_tasks_of_an_environment(load_text: LoadText) -> None:
    both = LAKE.replace("    env:", "    data: games.csv\n    env:")
    config = load_text(RUN + both)
    spec = data_spec(config, config.sources[-1])
    assert spec is not None and not spec.has_prompt


BROKEN_ENVIRONMENTS = [
    ("my_flow:play", "single_turn", "source lake has an environment, and workflow single_turn"),
    ("{gymnasium:", "{openenv: 'a:b', gymnasium:", "env needs exactly one of gymnasium,"),
    ("gymnasium: FrozenLake-v1, ", "", "env needs exactly one of gymnasium,"),
    ("gymnasium:", "verifiers:", "actions belongs to gymnasium, and this environment is verifiers"),
    ("num_tasks: 2", "calls_model: true", "calls_model belongs to command"),
    ("num_tasks: 2", "before_step: hook", "write module:function"),
    ("num_tasks: 2", "step_timeout_s: 0", "env.step_timeout_s"),
    ("    env:", "    session: {}\n    env:", "env has no effect on sessions"),
    (
        "gymnasium: FrozenLake-v1, options: {is_slippery: false}, actions: {left: 0}",
        "command: [play], python: bin/python",
        "name the interpreter first in command",
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), BROKEN_ENVIRONMENTS)
def test_environments_that_cannot_be(
    load_text: LoadText, old: str, new: str, expected: str
) -> None:
    assert old in LAKE
    with pytest.raises(ConfigError) as caught:
        load_text(RUN + LAKE.replace(old, new, 1))
    assert expected in str(caught.value)
