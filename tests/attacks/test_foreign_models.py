# SPDX-License-Identifier: Apache-2.0
"""A downloaded model runs no code: neither its own file nor one that it names on a hub, whatever a
terminal says. Reading its files waits for nobody, and has an end."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from penstock.config import demo_config
from penstock.dataflow.service.nodes.model_limits import read_model_limits
from penstock.errors import ConfigError, EngineError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.gateway.renderer import Renderer
from penstock.hub import MAX_TEXT_BYTES
from penstock.rollout.snapshot import read_snapshot
from penstock.runs.export.merged_model import merge_adapter
from penstock.runs.machine_limits import _window  # pyright: ignore[reportPrivateUsage]
from penstock.runs.preflight import _missing_models  # pyright: ignore[reportPrivateUsage]
from penstock.trainer.model_folders import TINY_QWEN3, init_model, initial_folder
from penstock.trainer.pipeline.memory_estimate import count_parameters, shape_of
from penstock.trainer.prm.head import load_classifier, load_tokenizer
from penstock.trainer.vocabulary_check import _size  # pyright: ignore[reportPrivateUsage]
from penstock.weights.lora import PLAIN_LORA_CONFIG, A, B
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel
Path({marker!r}).write_text("ran")

class Config(PretrainedConfig):
    model_type = "foreign"

class Model(PreTrainedModel):
    config_class = Config
"""


def foreign_model(folder: Path, marker: Path) -> Path:
    folder.mkdir()
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    kinds = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    named = dict.fromkeys(kinds, "foreign.Model")
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config", **named}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _loaders() -> dict[str, Callable[[Path], object]]:
    from penstock.rollout.decoding import hf_decoder
    from penstock.trainer import build, model_folders
    from penstock.trainer.prm import head
    from penstock.trainer.ranks import weight_loading

    return {
        "trainer": lambda folder: model_folders.load_model(folder),
        "rank": weight_loading.make_meta_model,
        "vocabulary": build._vocab_size,  # pyright: ignore[reportPrivateUsage]
        "engine": hf_decoder._build,  # pyright: ignore[reportPrivateUsage]
        "converted": hf_decoder._converted,  # pyright: ignore[reportPrivateUsage]
        "classifier": head.load_classifier,
    }


@pytest.mark.parametrize(
    "loader", ["trainer", "rank", "vocabulary", "engine", "converted", "classifier"]
)
def test_a_model_s_own_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    """The library asks on a terminal unless it is told no."""
    asked: list[str] = []

    def say_yes(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", say_yes)
    marker = tmp_path / "marker"
    folder = foreign_model(tmp_path / "model", marker)
    with pytest.raises(Exception, match=r"(?i)custom code|remote code|foreign"):
        _loaders()[loader](folder)
    assert not marker.exists() and not asked


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("from_pretrained", "from_config"):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def test_every_call_that_loads_a_model_says_no_to_its_code() -> None:
    found = dict(_calls())
    assert len(found) >= 7
    for where, call in found.items():
        said = {word.arg: word.value for word in call.keywords}
        answer = said.get("trust_remote_code")
        assert isinstance(answer, ast.Constant) and answer.value is False, where


# --- its files ------------------------------------------------------------------------------------

KINDS = ("pipe", "device", "long")
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    init_model(TINY_QWEN3, tmp_path / "model", seed=0)
    return tmp_path / "model"


def plant(path: Path, kind: str) -> None:
    """What a reader waits for, or reads until the memory is full."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, MAX_TEXT_BYTES + 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_model_are_read_from_files_that_end(model: Path, name: str, kind: str) -> None:
    plant(model / name, kind)
    with pytest.raises(WeightsError, match=rf"{name}.* (not a regular file|longer than)"):
        Renderer.load(model)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("generation_config.json", {"eos_token_id": ["no"]}, "neither an id nor a list"),
        ("generation_config.json", {"eos_token_id": [[2]]}, "neither an id nor a list"),
        ("config.json", {"eos_token_id": {"id": 2}}, "neither an id nor a list"),
        ("tokenizer_config.json", {"chat_template": [7]}, "no chat template"),
    ],
)
def test_settings_of_another_kind_are_named(
    model: Path, name: str, content: dict[str, Any], match: str
) -> None:
    (model / "generation_config.json").unlink(missing_ok=True)
    if "chat_template" in content:
        (model / "chat_template.jinja").unlink(missing_ok=True)
    path = model / name
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps(found | content))
    with pytest.raises(WeightsError, match=match):
        Renderer.load(model)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_looked_at_without_waiting(model: Path, kind: str) -> None:
    """By the checks before a run, and by what knows its limits; none of them loads it."""
    plant(model / "config.json", kind)
    plant(model / "tokenizer.json", kind)
    assert not read_model_limits({"policy": str(model)}).windows
    assert shape_of(str(model)) is None
    assert _size(str(model)) is None
    assert _window(str(model), 0) is None
    with pytest.raises(EngineError, match=r"regular|longer"):
        read_snapshot(model)
    with pytest.raises(WeightsError, match=r"regular|longer"):
        load_tokenizer(model)
    plant(model / "model.safetensors", kind)
    assert count_parameters(str(model)) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_no_library_gets_a_model_with_files_that_do_not_end(
    model: Path, tmp_path: Path, kind: str
) -> None:
    plant(model / "vocab.json", kind)
    with pytest.raises(ConfigError, match=r"vocab\.json (is not a regular file|has 67,108,865)"):
        init_model(str(model), tmp_path / "copy", seed=0)
    with pytest.raises(ConfigError, match=r"vocab\.json"), initial_folder(str(model), seed=0):
        pass
    with pytest.raises(ConfigError, match=r"vocab\.json"):
        load_classifier(model)
    config = demo_config(0)
    named = config.models["policy"].model_copy(update={"init": str(model)})
    config = config.model_copy(update={"models": {"policy": named}})
    [problem] = _missing_models(config, RunFolder(tmp_path / "run"))
    assert "vocab.json" in problem.text


@pytest.mark.timeout(300)
def test_a_copy_of_a_model_takes_its_files_only(model: Path, tmp_path: Path) -> None:
    """Folders are no part of it: in one there can be anything, such as a link to all there is."""
    (model / "more").mkdir()
    os.mkfifo(model / "more" / "pipe")
    (model / "all").symlink_to("/")
    (model / "config.json").rename(tmp_path / "blob")
    (model / "config.json").symlink_to(tmp_path / "blob")  # as in the Hub's cache
    init_model(str(model), tmp_path / "copy", seed=0)
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name for path in model.iterdir()} - {"more", "all"}
    assert not (tmp_path / "copy" / "config.json").is_symlink()


@pytest.mark.parametrize(
    ("a", "b"), [((1_000_000, 1), (1, 1_000_000)), ((1, 64), (1_000_000, 1)), ((2, 64), (128, 2))]
)
def test_factors_are_multiplied_if_they_fit_their_layer(
    model: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    """Four megabytes each, and four terabytes together."""
    layer = "model.layers.0.self_attn.q_proj"
    prefix = ADAPTER_PREFIX + layer
    factors = {prefix + A: np.ones(a, np.float32), prefix + B: np.ones(b, np.float32)}
    save_file(factors, model / ADAPTER_WEIGHTS)
    settings = {**PLAIN_LORA_CONFIG, "r": 1, "lora_alpha": 1, "target_modules": [layer]}
    (model / ADAPTER_CONFIG).write_text(json.dumps(settings))
    before = (model / "model.safetensors").read_bytes()
    with pytest.raises(WeightsError, match=f"wrong shape.*{layer}"):
        merge_adapter(model)
    assert (model / "model.safetensors").read_bytes() == before
