# SPDX-License-Identifier: Apache-2.0
"""Broken modules of the user are refused by `check` with key, file, line, reason and fix.

Most cases run the steps of the probe in this process, each with a module of its own. Those that
hang or end their process run in a real one."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.unit.runs.broken_cases import (
    BROKEN_MODULES,
    GOOD_MODULE,
    STAGES,
    BrokenModule,
    edited,
)

from penstock.config import RunConfig
from penstock.runs.check_problem import CheckProblem, located
from penstock.runs.preflight import check_run
from penstock.runs.probe import run_probe
from penstock.runs.probe_process import probe
from penstock.runs.probe_report import ProbeResult, Reporter
from penstock.runs.target import RunTarget, read_target

pytestmark = pytest.mark.timeout(900)  # several of these start processes or import torch

DEADLINE_S = 20.0
"""Long enough for the steps before the one that hangs, on a slow machine."""
IN_PROCESS = [case for case in BROKEN_MODULES if not case.tags & {"blocks", "exits"}]
IN_A_PROCESS = [case for case in BROKEN_MODULES if case.tags & {"blocks", "exits"}]


def write_run(folder: Path, module: str, code: str, config: str = "") -> RunTarget:
    """A run file whose source, reward and workflow are in one module of the user."""
    (folder / f"{module}.py").write_text(GOOD_MODULE + code + "\n")
    named = (
        f"sources:\n  - {{name: train, task: {module}}}",
        f"reward: {module}:reward",
        f"workflow: {module}:run",
        *([config.replace("MODULE", module)] if config else []),
    )
    path = folder / f"{module}.yaml"
    path.write_text(edited(*named))
    return read_target(path)


def probe_here(target: RunTarget) -> ProbeResult:
    """The steps of the probe process, in this one."""
    reporter = Reporter(target.python_path, lambda step, key: None)
    config = RunConfig.model_validate(target.config.model_dump(mode="json"))
    probe(config, reporter, deadline_s=600.0, with_loss=True)
    return reporter.result


def assert_refused(case: BrokenModule, problems: list[CheckProblem], target: RunTarget) -> None:
    [problem] = problems
    text = str(located(problem, target))
    assert problem.key == case.key
    assert case.says in text
    assert case.fix in text
    assert target.config_file is not None
    found = re.match(re.escape(str(target.config_file)) + ":([0-9]+): ", text)
    assert found, text
    line = target.config_file.read_text().splitlines()[int(found[1]) - 1]
    assert target.config_file.stem in line, "the line of the run file that names the module"
    if case.at:
        file, _, number = problem.code.partition(" in ")[0].rpartition(":")
        assert case.at in Path(file).read_text().splitlines()[int(number) - 1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    return tmp_path


def test_there_are_twenty() -> None:
    assert len({case.problem for case in BROKEN_MODULES}) == len(BROKEN_MODULES) >= 20


@pytest.mark.parametrize("case", IN_PROCESS, ids=lambda case: case.problem)
def test_a_broken_module_is_refused(case: BrokenModule, folder: Path) -> None:
    target = write_run(folder, f"user_{IN_PROCESS.index(case)}", case.code, case.config)
    assert_refused(case, probe_here(target).problems, target)


def test_modules_that_hang_or_exit_are_refused_at_the_deadline(folder: Path) -> None:
    targets = [
        write_run(folder, f"hangs_{index}", case.code, case.config)
        for index, case in enumerate(IN_A_PROCESS)
    ]
    with ThreadPoolExecutor(len(targets)) as pool:
        probes = pool.map(partial(run_probe, deadline_s=DEADLINE_S), targets)
        for case, target, result in zip(IN_A_PROCESS, targets, probes, strict=True):
            assert_refused(case, result.problems, target)
            assert result.import_cpu_s == 0, "refused before torch is imported"


def test_a_refusal_costs_little_and_imports_no_torch(folder: Path) -> None:
    result = run_probe(write_run(folder, "cheap", "async def run(task): return ''"))
    assert [problem.key for problem in result.problems] == ["workflow"]
    print(f"refused after {result.cpu_s:.1f} CPU s")
    assert result.import_cpu_s == 0
    assert 0 < result.cpu_s < 30, "CPU seconds; about 2 on an ordinary machine"


def test_columns_of_services_are_made_up(folder: Path) -> None:
    stages = (
        "pipeline:\n  stages:\n"
        '    - {id: judge, type: infer, role: reward, fn: "MODULE:judge", reads: [turns], '
        "writes: [style], place: [cpu]}\n"
        '    - {id: credit, type: compute, role: advantage, fn: "MODULE:credit", '
        "reads: [turns, reward, style], writes: [advantage]}\n"
        "    - {id: learn, type: train, role: actor, reads: [turns, advantage], writes: []}"
    )
    code = (
        "def judge(trajectory) -> dict: raise RuntimeError('only on its own host')\n"
        "def credit(layout, *, reward, style) -> dict:\n"
        "    return {'advantage': layout.by_token(reward - style)}"
    )
    result = probe_here(write_run(folder, "with_service", code, stages))
    assert (result.problems, result.notes) == ([], [])
    assert set(result.losses) == {"policy"}


def test_a_good_module_reaches_a_loss_and_the_steps_are_shown(folder: Path) -> None:
    code = (
        "def credit(layout, *, reward) -> dict:\n"
        "    return {'advantage': layout.by_token(reward - reward.mean())}"
    )
    target = write_run(folder, "good", code, STAGES)
    steps: list[str] = []
    report = check_run(target, on_step=steps.append)
    assert report.problems == ()
    assert all(note.startswith("isolation of rewards: ") for note in report.notes)
    assert set(report.probed.losses) == {"policy"}
    for step in ("source train", "stage credit", "workflow good:run", "reward good:reward"):
        assert step in steps
    assert steps[-2:] == ["torch", "loss of policy"]
    probed = report.probed
    print(f"probe: {probed.cpu_s:.1f} CPU s, and {probed.import_cpu_s:.1f} s to import torch")
    assert probed.cpu_s < 5 * probed.import_cpu_s


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (
            "import json\nasync def run(task, ctx):\n"
            "    answer = await ctx.policy().chat([{'role': 'user', 'content': 'ab>'}])\n"
            "    return json.loads(answer.text)['answer']",
            "raised on the scripted answer 'abc'",
        ),
        (
            "async def run(task, ctx):\n"
            "    text = ''\n"
            "    while 'done' not in text:\n"
            "        ask = [{'role': 'user', 'content': 'ab>'}]\n"
            "        text = (await ctx.policy().chat(ask)).text",
            "still called the model after 64 scripted answers",
        ),
    ],
)
def test_what_a_better_answer_may_avoid_is_a_note(code: str, note: str, folder: Path) -> None:
    result = probe_here(write_run(folder, f"noted_{len(note)}", code))
    assert result.problems == []
    [found] = result.notes
    assert note in found
