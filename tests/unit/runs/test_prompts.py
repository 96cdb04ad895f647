# SPDX-License-Identifier: Apache-2.0
"""Prompt templates of a run: read at its start, kept in its folder, checked before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.runs.broken_cases import edited
from tests.unit.runs.test_broken_modules import probe_here, write_run
from tests.unit.runs.test_launch import Started

from penstock.config import RunConfig
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.read_prompts import with_prompts
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.launch import launch
from penstock.runs.preflight import find_problems
from penstock.runs.target import read_target
from penstock.wire.auth import Signer

PROMPTS = "prompts: {solver: solver.txt}"
RUN = """
async def run(task, ctx):
    text = ctx.prompt("solver", question=task.payload["prompt"])
    return (await ctx.policy().chat([{"role": "user", "content": text}])).text
"""


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    path = tmp_path / "solver.txt"
    path.write_text("Solve ${question} with {question}", encoding="utf-8")
    return path


def config(lines: str = PROMPTS) -> RunConfig:
    Path("run.yaml").write_text(edited(lines))
    return read_target(Path("run.yaml")).config


def test_a_node_gets_the_text(template: Path) -> None:
    assert run_info(config()).prompts == {"solver": "Solve ${question} with {question}"}


def test_a_run_keeps_text_and_digest(template: Path) -> None:
    folder = RunFolder(template.parent / "r")
    kept = with_prompts(config())
    folder.write_config(kept)
    template.unlink()
    assert folder.read_config() == kept == with_prompts(kept)
    prompt = kept.prompts["solver"]
    assert prompt.text == "Solve ${question} with {question}" and len(prompt.digest or "") == 64
    assert run_info(folder.read_config()).prompts == {"solver": prompt.text}


def test_a_changed_template_is_refused_until_it_is_accepted(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(template.parent / "r")

    def started(*_: object) -> None:
        raise Started

    def start(*, accept_changes: bool = False) -> None:
        with pytest.raises(Started):
            launch(config(), folder, accept_changes=accept_changes)

    monkeypatch.setattr(Signer, "create", started)
    start()
    start()
    template.write_text("Answer {question}")
    with pytest.raises(ConfigError, match=r'prompts\.solver\.digest: "\w{64}" -> "\w{64}"\n'):
        start()
    start(accept_changes=True)
    start()
    template.rename("moved.txt")
    with pytest.raises(Started):
        launch(config("prompts: {solver: moved.txt}"), folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read ([Errno 2]"),
        (b"\xff", "cannot be read ('utf-8'"),
        (b"{a.b}", "has {a.b}, which is not a plain name"),
        (b"x" * (1 << 19), "a template has at most 262144"),
    ],
)
def test_a_template_that_is_not_one_is_found_before_the_run(
    template: Path, text: bytes | None, says: str
) -> None:
    if text is None:
        template.unlink()
    else:
        template.write_bytes(text)
    Path("run.yaml").write_text(edited(PROMPTS))
    [problem] = find_problems(read_target(Path("run.yaml")))
    assert problem.key == "prompts.solver" and says in problem.text
    assert problem.where.startswith("run.yaml:")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{question} {hint}", "placeholder {hint}, which got no value"),
        ("Solve it.", "no placeholder {question}"),
    ],
)
def test_check_finds_values_that_do_not_fit(template: Path, text: str, says: str) -> None:
    template.write_text(text)
    target = write_run(template.parent, f"fills_{len(text)}", RUN, PROMPTS)
    [problem] = probe_here(target).problems
    assert problem.key == "workflow" and says in problem.text


def test_check_tells_of_an_unreadable_template_once(template: Path) -> None:
    target = write_run(template.parent, "fills_none", RUN, PROMPTS)
    template.unlink()
    assert probe_here(target).problems == []
    assert [problem.key for problem in find_problems(target)] == ["prompts.solver"]
