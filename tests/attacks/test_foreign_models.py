# SPDX-License-Identifier: Apache-2.0
"""A downloaded model runs no code: neither its own file nor one that it names on a hub, whatever a
terminal says."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
