# SPDX-License-Identifier: Apache-2.0
"""`check` and `run` read all data sets of a run before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import RunConfig, load
from penstock.dataflow.service.build_sources import build_source
from penstock.runs.data_check import data_problems
from penstock.trainer.model_folders import init_model

RUN = """\
name: small
models: {policy: {init: builtin:tiny-qwen3}}
training: {steps: 1}
reward: penstock.tasks.reverse:reward
sources:
  - {name: old, task: old.jsonl}
  - {name: plain, task: penstock.tasks.reverse}
  - {name: new, data: {path: new.jsonl, max_prompt_tokens: 5}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    return load(Path("run.yaml"), ())


def write(name: str, *prompts: object) -> None:
    Path(name).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def test_prompts_are_counted_by_the_tokenizer_of_the_policy(config: RunConfig) -> None:
    """The built-in model has one token per character."""
    write("old.jsonl", "abcdef>")
    write("new.jsonl", "abcd>", [{"role": "user", "content": "abcd>"}])
    assert not [*data_problems(config)]
    write("new.jsonl", "abcd>", "abcde>", [{"role": "user", "content": "abcdefg>"}])
    [(key, text)] = data_problems(config)
    assert key == "sources[2].data"
    assert "new.jsonl:2: prompt: has 6 tokens, more than max_prompt_tokens (5)" in text
    assert "new.jsonl:3: prompt: has 8 tokens" in text


def test_every_source_is_read(config: RunConfig) -> None:
    write("old.jsonl", "a", 3)
    problems = dict(data_problems(config))
    assert [*problems] == ["sources[0].task", "sources[2].data"]
    assert "old.jsonl:2: prompt: is of type int" in problems["sources[0].task"]
    assert "source 'new': new.jsonl: No such file" in problems["sources[2].data"]


def test_what_an_earlier_launch_has_read_is_not_read_again(config: RunConfig) -> None:
    write("old.jsonl", "a", 3)
    write("new.jsonl", "a")
    old, _, _ = config.sources
    digest = build_source(config, old).digest(0)
    assert not [*data_problems(config, {"old": digest})]
    write("old.jsonl", "b", 3)
    assert [key for key, _ in data_problems(config, {"old": digest})] == ["sources[0].task"]


def test_messages_that_the_template_refuses_are_shown(config: RunConfig) -> None:
    init_model("builtin:tiny-qwen3", Path("model"), 0)
    Path("model/chat_template.jinja").write_text("{{ raise_exception('no tools') }}")
    write("old.jsonl", "a")
    write("new.jsonl", [{"role": "tool", "content": "abc"}])
    [(_, text)] = data_problems(load(Path("run.yaml"), ["models.policy.init=model"]))
    assert "cannot render these messages: no tools" in text
    assert "abc" in text
