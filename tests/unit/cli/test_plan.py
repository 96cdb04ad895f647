# SPDX-License-Identifier: Apache-2.0
"""`penstock plan` and `penstock check` on pipelines, and who is started for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.unit.cli.test_commands import run_main
from tests.unit.runs.test_broken_modules import probe_here

from penstock.config import load
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.service_tokens import TOKEN_FILE_ENV
from penstock.fleet.services import ServiceKind, local_services
from penstock.runs.preflight import find_problems
from penstock.runs.service_process import find_service_stage
from penstock.runs.target import read_target
from penstock.wire.auth import Audience, Role, Signer

RUN = """\
name: own
models: {policy: {init: builtin:tiny-qwen3}}
sources: [{name: train, task: penstock.tasks.reverse}]
reward: penstock.tasks.reverse:reward
training: {steps: 2}
pipeline:
  stages:
    - {id: judge, type: infer, role: reward, fn: "my_dag:judge", place: [gpu],
       reads: [turns], writes: [score]}
    - {id: shape, type: compute, role: shaping, fn: "my_dag:shape",
       reads: [reward, score], writes: [shaped]}
    - {id: advantage, type: compute, role: advantage,
       reads: [shaped], rename: {shaped: reward}, writes: [advantage]}
    - {id: train, type: train, role: actor, fn: "my_dag:loss",
       reads: [turns, advantage], options: {scale: 1.0}}
"""
MODULE = """\
def judge(trajectory) -> dict: return {"score": 1.0}
def shape(layout, *, reward, score) -> dict: return {"shaped": reward + score}
def loss(tokens, *, scale): raise AssertionError("looked at, never called")
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a custom pipeline, and its module next to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_dag.py").write_text(MODULE)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def passes_check(run_file: Path, overrides: Sequence[str]) -> bool:
    """To a loss, in this process: another one would import torch."""
    target = read_target(run_file, overrides)
    return not [*find_problems(target), *probe_here(target).problems]


def test_a_plan_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    path = run_file.with_name("drawn.svg")
    code, out, err = run_main(capsys, "plan", str(run_file), "--svg", str(path))
    assert code == 0 and f"wrote {path}" in err
    for text in ("own: custom pipeline", "trainer for policy: 1 rank", "1. shape", "3. train",
                 "weights 403 kB", "AdamW 806 kB", "judge on [gpu]: no model"):  # fmt: skip
        assert text in out
    drawn = path.read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for stage in ("judge", "1. shape", "2. advantage", "3. train"):
        assert f">{stage}</text>" in drawn


def test_a_plan_writes_no_file_unless_it_is_asked_to(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    before = sorted(run_file.parent.iterdir())
    code, out, _ = run_main(capsys, "plan", str(run_file), "--json")
    assert (code, json.loads(out)["svg"]) == (0, None)
    assert [p for p in sorted(run_file.parent.iterdir()) if p.name != "__pycache__"] == [
        p for p in before if p.name != "__pycache__"
    ]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "m2po", "gspo", "rloo"])
def test_the_plan_of_every_algorithm(
    capsys: pytest.CaptureFixture[str], run_file: Path, name: str
) -> None:
    words = ("pipeline=null", f"algorithm.name={name}", "--json", "--svg", "drawn.svg")
    code, out, _ = run_main(capsys, "plan", str(run_file), *words)
    plan = json.loads(out.splitlines()[-1])
    assert code == 0 and plan["svg"] == "drawn.svg" and Path("drawn.svg").exists()
    (chain,) = plan["chains"]
    assert chain["stages"][-1]["type"] == "train" and chain["memory_bytes"] >= 16 * 100_800


def test_a_plan_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    hosts = "hosts={a: {memory_gb: 0.05}, b: {tags: [gpu], memory_gb: 1}}"
    code, _, err = run_main(capsys, "plan", str(run_file), hosts)
    assert code == 1 and "needs 1 place tagged train with 65.7 MB" in err
    assert "15.7 MB short; raise training.parallel.dp, or cp for long samples, set " in err
    for smaller in ("training.micro_batch_tokens=2048", "training.recompute=layer"):
        assert run_main(capsys, "plan", str(run_file), hosts, smaller)[0] == 0


def test_check_looks_at_the_functions_of_stages(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    assert run_main(capsys, "check", str(run_file))[0] == 0
    (run_file.parent / "my_dag.py").write_text(MODULE.replace("*, reward, score", "*, reward"))
    wrong = run_file.read_text().replace("rename: {shaped: reward}, ", "")
    run_file.write_text(wrong.replace("{scale: 1.0}", "{}"))
    code, _, err = run_main(capsys, "check", str(run_file))
    assert code == 1
    for text in (
        "stage shape: my_dag:shape: has no keyword score for the column of that name",
        "stage advantage: penstock.trainer.pipeline.credits:group_advantage: has no keyword shaped",
        "stage train: my_dag:loss: needs scale",
    ):
        assert text in err


def test_check_looks_for_the_models_of_stages(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    """Those that a trainer loads; a service has its own where it runs."""
    reference = (
        "    - {id: ref, type: infer, role: reference, reads: [turns], writes: "
        "[reference_logprobs], model: ./models/Nowhere-7B}\n"
    )
    text = run_file.read_text().replace("place: [gpu]", "place: [gpu], model: far/away")
    run_file.write_text(text + reference)
    code, _, err = run_main(capsys, "check", str(run_file))
    assert code == 1 and "1 problem" in err
    assert "pipeline.stages[4].model: no config.json and" in err
    run_file.write_text(text + reference.replace("./models/Nowhere-7B", "builtin:tiny"))
    _, _, err = run_main(capsys, "check", str(run_file))
    assert "in builtin:tiny; built-in models: builtin:tiny-qwen3" in err


def test_check_compares_the_vocabularies(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    (run_file.parent / "other").mkdir()
    (run_file.parent / "other" / "config.json").write_text('{"vocab_size": 50257}')
    (run_file.parent / "other" / "model.safetensors").write_bytes(b"")
    teacher = "{name: opd, teacher: other}"
    overrides = (f"algorithm={teacher}", "pipeline=null")
    code, _, err = run_main(capsys, "check", str(run_file), *overrides)
    assert code == 1 and "stage teacher: other has a vocabulary of 50,257 tokens and" in err
    assert "one of 16, so that the same numbers are other tokens to it; name a model wi" in err
    (run_file.parent / "other" / "config.json").write_text('{"text_config": {"vocab_size": 16}}')
    assert passes_check(run_file, overrides)


def test_check_looks_for_the_teacher(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    words = ("pipeline=null", "algorithm={name: opd, teacher: ./models/Nowhere-7B}")
    code, _, err = run_main(capsys, "check", str(run_file), *words)
    assert code == 1 and "algorithm.teacher: no config.json and" in err
    built_in = (words[0], words[1].replace("./models/Nowhere-7B", "builtin:tiny-qwen3"))
    assert passes_check(run_file, built_in)


def test_the_launcher_starts_a_worker_of_every_service(run_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "outputs")
    Signer.create(folder.keys, "own")
    services = {one.name: one for one in local_services(load(run_file), folder)}
    worker = services["stage-judge"]
    assert worker.kind is ServiceKind.SERVER
    assert worker.command[-3:] == ("stage", str(folder.path), "judge")
    verifier = Signer.read(folder.keys, "own").verifier(Audience.DATAFLOW)
    token = Path(worker.build_env()[TOKEN_FILE_ENV]).read_text().strip()
    assert verifier.verify(token).role is Role.STAGE


def test_only_stages_placed_elsewhere_have_workers(run_file: Path) -> None:
    config = load(run_file)
    assert find_service_stage(config, "judge")[1].writes == ("score",)
    with pytest.raises(ConfigError, match='did you mean "judge"'):
        find_service_stage(config, "judg")
    with pytest.raises(ConfigError, match="available: judge"):
        find_service_stage(config, "train")
