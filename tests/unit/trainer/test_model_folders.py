# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jinja2 import Template
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from penstock.errors import ConfigError, WeightsError
from penstock.trainer.model_folders import (
    TINY_QWEN3,
    WEIGHTS,
    init_model,
    initial_folder,
    load_model,
    static_files,
)


def test_the_tokenizer_gives_one_token_per_letter_and_text_without_spaces(
    model_folder: Path,
) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids = tokenizer.encode("abc>").ids
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "abc>"
    assert tokenizer.decode(tokenizer.encode("jihgfedcba").ids) == "jihgfedcba"
    assert tokenizer.decode([*ids, 1]) == "abc>"  # the end is no text
    assert tokenizer.encode("x y").ids == [2, 2, 2]
    config = json.loads((model_folder / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 16


def test_the_template_is_the_bare_contents(model_folder: Path) -> None:
    template = Template((model_folder / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "abc>"}, {"role": "assistant", "content": "cba"}]
    assert template.render(messages=messages, add_generation_prompt=True) == "abc>cba"


def test_weights_come_from_the_seed_alone(model_folder: Path, tmp_path: Path) -> None:
    init_model(TINY_QWEN3, tmp_path / "same", seed=0)
    init_model(TINY_QWEN3, tmp_path / "other", seed=1)
    first = (model_folder / WEIGHTS).read_bytes()
    assert (tmp_path / "same" / WEIGHTS).read_bytes() == first
    assert (tmp_path / "other" / WEIGHTS).read_bytes() != first


def test_the_model_is_what_the_demo_promises(model_folder: Path) -> None:
    model = load_model(model_folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert not config.tie_word_embeddings
    assert model.generation_config is not None and model.generation_config.eos_token_id == 1
    stored = load_file(model_folder / WEIGHTS)
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(stored[name])), name


def test_a_folder_is_taken_as_it_is(model_folder: Path, tmp_path: Path) -> None:
    init_model(str(model_folder), tmp_path / "copy", seed=7)
    names = {path.name for path in model_folder.iterdir()}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == names
    assert all(
        (tmp_path / "copy" / name).read_bytes() == (model_folder / name).read_bytes()
        for name in names
    )
    assert WEIGHTS not in {path.name for path in static_files(tmp_path / "copy")}


def test_a_folder_is_read_where_it_lies(model_folder: Path) -> None:
    with initial_folder(str(model_folder), seed=7) as folder:
        assert folder == model_folder
    with initial_folder(TINY_QWEN3, seed=7) as made:
        assert (made / WEIGHTS).is_file()
    assert not made.exists()


def test_a_missing_folder_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model of the Hub like"):
        init_model(str(tmp_path / "nowhere"), tmp_path / "model", seed=0)


def test_a_folder_with_a_missing_tensor_is_refused(model_folder: Path, tmp_path: Path) -> None:
    init_model(str(model_folder), tmp_path / "model", seed=0)
    weights = load_file(tmp_path / "model" / WEIGHTS)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="up_proj"):
        load_model(tmp_path / "model")


def test_the_module_imports_without_torch() -> None:
    check = "import sys, penstock.trainer.model_folders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_nothing_of_the_trainer_imports_a_tokenizer() -> None:
    sources = Path(__file__).parents[3] / "src" / "penstock" / "trainer"
    for path in sources.rglob("*.py"):
        text = path.read_text()
        assert "import tokenizers" not in text and "AutoTokenizer" not in text, path.name
