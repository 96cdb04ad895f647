# SPDX-License-Identifier: Apache-2.0
"""Exported models: complete, described, and the same model in other programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from tests.unit.cli.test_commands import run_main
from tests.unit.runs.export import transformers_program
from tests.unit.runs.export.stored_runs import ADAPTED, ALPHA, POLICY, RANK, full_run, lora_run

from penstock.errors import ConfigError
from penstock.evals.results import Answer, Evaluation, SuiteResult
from penstock.fleet.run_folder import ForkOrigin, RunFolder
from penstock.gateway.renderer import Renderer
from penstock.runs.export.model import export_gguf, export_model
from penstock.runs.stored_versions import stored_versions, write_version
from penstock.weights.lora import A, B
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS

QUESTIONS = ["abc>", "j>", "gfedcba>"]


def greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What the run's own engine answers at temperature 0, without an end."""
    from penstock.rollout.decoding.hf_decoder import HfDecoder

    decoder = HfDecoder(torch_threads=1)
    decoder.stage(folder).apply()
    logits = decoder.join([prompt])
    sampled: list[int] = []
    while True:
        logits[0, 1] = -np.inf  # the other program is told not to end either
        sampled.append(int(logits[0].argmax()))
        if len(sampled) == num_tokens:
            return sampled
        logits = decoder.advance(np.array([0]), np.array([sampled[-1]])).copy()


def engine_answers(run: RunFolder, folder: Path) -> list[dict[str, list[int]]]:
    newest = stored_versions(run, POLICY)[-1]
    write_version(run, newest, folder)
    renderer = Renderer.load(folder)
    prompts = [
        [*renderer.encode(renderer.render([{"role": "user", "content": text}]))]
        for text in QUESTIONS
    ]
    num_tokens = transformers_program.NUM_TOKENS
    return [{"prompt": ids, "sampled": greedy(folder, ids, num_tokens)} for ids in prompts]


def test_other_programs_answer_as_the_engine_of_the_run_does(tmp_path: Path) -> None:
    """A fresh process, with transformers alone; all weights, and a merged adapter."""
    full, lora = full_run(tmp_path / "full"), lora_run(tmp_path / "lora")
    exports = [tmp_path / "full-export", tmp_path / "merged-export"]
    export_model(full.path, exports[0])
    export_model(lora.path, exports[1], merge=True)
    program = Path(transformers_program.__file__)
    done = subprocess.run(
        [sys.executable, "-I", str(program), *map(str, exports)],
        input=json.dumps(QUESTIONS),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for run, export in zip((full, lora), exports, strict=True):
        wanted = engine_answers(run, tmp_path / f"{run.path.name}-version")
        assert found[str(export)] == wanted
        assert len({tuple(answer["sampled"]) for answer in wanted}) > 1, "questions matter"
    assert found[str(exports[0])] != found[str(exports[1])]


def test_an_adapter_alone_is_the_adapter_of_the_version_and_names_its_model(
    tmp_path: Path,
) -> None:
    run = lora_run(tmp_path / "lora")
    done = export_model(run.path, tmp_path / "adapter")
    assert (done.kind, done.step, done.version) == ("adapter", 2, "policy@1.2")
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == [
        "README.md",
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    settings = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert settings["base_model_name_or_path"] == "lora-model", "no path of this machine"
    assert str(tmp_path) not in (tmp_path / "adapter" / ADAPTER_CONFIG).read_text()
    given = load_file(tmp_path / "lora-model" / ADAPTER_WEIGHTS)
    found = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[name], given[name]) for name in given)
    front, _ = read_card(tmp_path / "adapter")
    assert front["library_name"] == "peft"


def test_a_merged_model_is_the_model_plus_the_scaled_product(tmp_path: Path) -> None:
    run = lora_run(tmp_path / "lora")
    export_model(run.path, tmp_path / "merged", merge=True)
    base = load_file(tmp_path / "lora-model" / "model.safetensors")
    adapter = load_file(tmp_path / "lora-model" / ADAPTER_WEIGHTS)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer in ADAPTED:
            a, b = (adapter[f"{ADAPTER_PREFIX}{layer}{part}"].astype(np.float64) for part in (A, B))
            wanted = weight + ALPHA / RANK * (b @ a)
            assert np.allclose(merged[name], wanted, rtol=1e-5, atol=1e-5)
            assert not np.allclose(merged[name], weight, atol=0.1)
        else:
            assert np.array_equal(merged[name], weight)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert ADAPTER_CONFIG not in names and ADAPTER_WEIGHTS not in names


# --- which version ---------------------------------------------------------------------------


def test_step_best_and_newest_choose_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = full_run(tmp_path / "full")
    digests = {v.manifest.number: v.manifest.weights_digest for v in stored_versions(run, POLICY)}
    with pytest.raises(ConfigError, match="no best version: no evaluation has ended"):
        export_model(run.path, tmp_path / "best", best=True)
    write_evaluations(run)
    for name, words, number in (
        ("newest", (), 2),
        ("step", ("--step", "0"), 0),
        ("best", ("--best",), 1),
    ):
        words = ("export", "model", str(run.path), "--to", str(tmp_path / name), *words, "--json")
        code, out, err = run_main(capsys, *words)
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["version"] == f"policy@1.{number}"
        assert digests[number] in (tmp_path / name / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"at step 9; stored steps: 0, 1, 2\."):
        export_model(run.path, tmp_path / "none", step=9)
    with pytest.raises(ConfigError, match="does not train judge"):
        export_model(run.path, tmp_path / "none", policy="judge")
    with pytest.raises(ConfigError, match="no adapter to merge"):
        export_model(run.path, tmp_path / "none", merge=True)
    with pytest.raises(ConfigError, match="keep one"):
        export_model(run.path, tmp_path / "none", step=1, best=True)
    with pytest.raises(ConfigError, match="replaces nothing"):
        export_model(run.path, tmp_path / "best")
    assert not (tmp_path / "none").exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# --- the card --------------------------------------------------------------------------------


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    empty, front, text = (folder / "README.md").read_text().split("---\n", 2)
    assert not empty
    return yaml.safe_load(front), text


def write_evaluations(run: RunFolder) -> None:
    """Version 1 has 3 of 4 points on `sums`; one answer failed."""
    folder = run.path / "evaluations"
    folder.mkdir()
    scores = {0: (0.0, 0.0, 0.0, None), 1: (1.0, 1.0, 1.0, None)}
    for number, values in scores.items():
        answers = tuple(
            Answer(question=f"q{at // 2}", sample=at % 2, seed=at, score=score)
            for at, score in enumerate(values)
        )
        result = SuiteResult(
            suite="sums",
            scorer="exact",
            suite_digest="d",
            policy=POLICY,
            version=number,
            samples=2,
            temperature=0.6,
            answers=answers,
        )
        evaluation = Evaluation(model="full", step=number, suites=(result,))
        (folder / f"step_{number}.json").write_bytes(msgspec.json.encode(evaluation))
    (folder / "damaged.json").write_text("{")
    best = {"policy": POLICY, "version": 1, "step": 1, "suite": "sums", "score": 0.75}
    (folder / "best.json").write_text(json.dumps(best))


def test_the_card_states_data_algorithm_evaluation_and_lineage(tmp_path: Path) -> None:
    run = full_run(tmp_path / "full")
    write_evaluations(run)
    metrics = [
        {"policy": POLICY, "number": n, "seq": n, "time": n, "reward/mean": n / 10} for n in (1, 2)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    run.write_source_digests({"train": "abcdef0123456789ff"})
    run.write_parent(ForkOrigin(run=str(tmp_path / "older"), step=7))
    export_model(run.path, tmp_path / "best", best=True)
    front, text = read_card(tmp_path / "best")
    assert front["library_name"] == "transformers" and "grpo" in front["tags"]
    assert "| train | penstock.tasks.reverse | 100% | single_turn |" in text
    assert "abcdef0123456789 |" in text
    assert "\n  num_generations: " in text and "\n  learning_rate: " in text
    assert "| sums | exact | 0.750 | " in text and " | 2 | 2 | 1 | 0.6 |" in text
    assert "0.100 at step 1" in text and "step 2" not in text, "nothing of later steps"
    version = stored_versions(run, POLICY)[1]
    assert f"`{version.digest}`" in text and "`policy@1.1`" in text
    assert "forked from: step 7 of `older`" in text and "base model: `full-model`" in text
    assert str(tmp_path) not in text, "no local path"
    export_model(run.path, tmp_path / "newest")
    assert "This version was not evaluated." in read_card(tmp_path / "newest")[1]


def test_a_gguf_folder_has_the_same_card(tmp_path: Path) -> None:
    run = lora_run(tmp_path / "lora")
    done = export_gguf(run.path, tmp_path / "small")
    assert done.kind == "gguf"
    assert {path.name for path in (tmp_path / "small").iterdir()} == {
        "small.gguf",
        "Modelfile",
        "README.md",
    }
    assert read_card(tmp_path / "small")[0]["library_name"] == "gguf"
