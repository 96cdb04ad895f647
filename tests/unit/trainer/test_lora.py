# SPDX-License-Identifier: Apache-2.0
"""Training an adapter: what it computes, what it changes and what not, and the model without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers.integrations.peft
import transformers.models.auto.auto_factory
from safetensors.torch import load_file, save_file
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, random_batch, settings
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.config import LoraConfig
from penstock.errors import ConfigError, WeightsError
from penstock.trainer import build
from penstock.trainer.actor import Actor
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_models
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.lora import (
    LoraLinear,
    adapter_disabled,
    adapter_tensors,
    attach_adapter,
    init_adapter,
)
from penstock.trainer.model_folders import load_model
from penstock.trainer.models import Models
from penstock.trainer.pipeline.layout import TokenColumn
from penstock.trainer.ranks.group import SingleRank

LORA = {"rank": 2, "alpha": 8}
FILE = "adapter_model.safetensors"
Floats = npt.NDArray[np.float64]


def adapted(model_folder: Path, folder: Path, **lora: Any) -> Path:
    shutil.copytree(model_folder, folder)
    init_adapter(folder, LoraConfig.model_validate({**LORA, **lora}), seed=3)
    return folder


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with an adapter of number 0 beside it."""
    return adapted(model_folder, tmp_path / "adapted")


def batch(seq: int) -> Batch:
    sealed = random_batch(1, seq=seq)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def train(models: Models, *seqs: int) -> list[dict[str, float]]:
    stats = [models.step(batch(seq)) for seq in seqs]
    assert all(one.skipped is None for one in stats)
    return [dict(one.values) for one in stats]


def infer(model: PreTrainedModel, seq: int = 1) -> Floats:
    """Log-probs of the trained tokens."""
    return ForwardPass(ranks=SingleRank()).infer(Actor(model), batch(seq))


def bits(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_layer_is_its_formula(has_bias: bool) -> None:
    """Against float64 NumPy: output, merged weight, and the gradients of A and B."""
    draw = np.random.default_rng(4)
    x, w, bias, a, b, up = (
        draw.standard_normal(shape) for shape in ((5, 7), (6, 7), 6, (2, 7), (6, 2), (5, 6))
    )
    base = nn.Linear(7, 6, bias=has_bias, dtype=torch.float64)
    layer = LoraLinear(base, LoraConfig(rank=2, alpha=5))
    for parameter, value in ((layer.weight, w), (layer.lora_A.weight, a), (layer.lora_B.weight, b)):
        parameter.data = torch.from_numpy(value)
    if has_bias:
        layer.bias.data = torch.from_numpy(bias)
    found = layer(torch.from_numpy(x))
    found.backward(torch.from_numpy(up))
    scale = 5 / 2
    merged = w + scale * b @ a
    expected = x @ merged.T + (bias if has_bias else 0)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-12)
    gradients = (layer.lora_A.weight.grad, layer.lora_B.weight.grad)
    for gradient, oracle in zip(
        gradients, (scale * b.T @ up.T @ x, scale * up.T @ x @ a.T), strict=True
    ):
        assert gradient is not None
        np.testing.assert_allclose(gradient.numpy(), oracle, rtol=0, atol=1e-11)


def test_the_trained_model_is_the_one_with_merged_weights(folder: Path) -> None:
    models = build_models(settings(folder, "grpo", lora=LORA), POLICY, folder)
    train(models, 1, 2, 3)
    merged = load_model(folder)
    held = cast(dict[str, Tensor], models.weights())
    tensors = {name: value.detach().double() for name, value in held.items()}
    for name in {name.partition(".lora_")[0] for name in tensors}:
        weight = merged.get_parameter(f"{name.removeprefix('base_model.model.')}.weight")
        product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        weight.data = (weight.data.double() + 8 / 2 * product).float()
    difference = np.abs(infer(merged) - infer(models.model))
    assert difference.max() < 1e-5
    assert np.abs(infer(merged) - infer(load_model(folder))).max() > 1e-3, "it has learned"


# --- what training changes ------------------------------------------------------------------------


def test_number_0_says_what_the_model_says(folder: Path, model_folder: Path) -> None:
    models = build_models(settings(folder, "grpo", lora=LORA), POLICY, folder)
    assert np.array_equal(infer(models.model), infer(load_model(model_folder)))


def test_only_the_adapter_learns(folder: Path, model_folder: Path) -> None:
    models = build_models(settings(folder, "grpo", lora=LORA), POLICY, folder)
    before = bits(models.model)
    train(models, 1, 2, 3)
    after, base = bits(models.model), bits(load_model(model_folder))
    own = {name.removeprefix("base_model.model.") for name in models.weights()}
    assert len(own) == 2 * 7 * 2, "A and B of each linear layer of both decoder layers"
    assert {name for name in after if not torch.equal(after[name], before[name])} == own
    assert after.keys() - own == base.keys()
    assert all(torch.equal(after[name], value) for name, value in base.items())
    moments = {name.rpartition(".")[0] for name in models.state_tensors()} - {""}
    assert moments == {f"model.{name}" for name in own}


def test_targets_are_the_layers_that_learn(model_folder: Path, tmp_path: Path) -> None:
    lora = {**LORA, "targets": ["v_proj", "q_proj"]}
    folder = adapted(model_folder, tmp_path / "adapted", **lora)
    models = build_models(settings(folder, "grpo", lora=lora), POLICY, folder)
    layers = {name.split(".")[-3] for name in models.weights()}
    assert layers == {"q_proj", "v_proj"} and len(models.weights()) == 8


def test_an_adapter_is_drawn_from_the_seed_alone(model_folder: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        shutil.copytree(model_folder, tmp_path / name)
        init_adapter(tmp_path / name, LoraConfig.model_validate(LORA), seed=seed)
    a, b, c = ((tmp_path / name / FILE).read_bytes() for name in "abc")
    assert a == b != c
    drawn = load_file(tmp_path / "a" / FILE)
    for name, tensor in drawn.items():
        if ".lora_B." in name:
            assert not tensor.any(), "or number 0 were another model"
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound, "kaiming-uniform with a = sqrt 5"


# --- without it -----------------------------------------------------------------------------------


def test_without_its_adapter_the_model_is_the_base_bit_for_bit(
    folder: Path, model_folder: Path
) -> None:
    models = build_models(settings(folder, "grpo", lora=LORA), POLICY, folder)
    train(models, 1, 2)
    base = infer(load_model(model_folder))
    with adapter_disabled(models.model):
        assert np.array_equal(infer(models.model), base)
    assert not np.array_equal(infer(models.model), base)
    with pytest.raises(ZeroDivisionError), adapter_disabled(models.model):
        _ = 1 / 0
    assert not np.array_equal(infer(models.model), base), "on again, whatever happened inside"


SEEN: list[Floats] = []


def remember(layout: Any, *, reference_logprobs: Floats) -> dict[str, TokenColumn]:
    """A stage that lets the test see a column."""
    SEEN.append(reference_logprobs)
    return {"seen": TokenColumn(reference_logprobs)}


def near_reference(**reference: Any) -> dict[str, Any]:
    column = "reference_logprobs"
    stages = [
        {"id": "reference", "type": "infer", "role": "reference", "reads": ["turns"]},
        {"id": "see", "type": "compute", "role": "see", "fn": f"{__name__}:remember"},
        {"id": "credit", "type": "compute", "role": "advantage", "reads": ["reward"]},
        {"id": "learn", "type": "train", "role": "actor"},
    ]
    stages[0] |= {"writes": [column], **reference}
    stages[1] |= {"reads": [column], "writes": ["seen"]}
    stages[2] |= {"writes": ["advantage"]}
    stages[3] |= {"reads": ["turns", "advantage", column]}
    return {"stages": stages}


def test_the_reference_is_the_model_without_its_adapter(folder: Path, model_folder: Path) -> None:
    chosen = settings(folder, "rloo", lora=LORA, pipeline=near_reference())
    models = build_models(chosen, POLICY, folder)
    SEEN.clear()
    train(models, 1, 2, 3)
    base = load_model(model_folder)
    assert all(np.array_equal(seen_T, infer(base, seq)) for seq, seen_T in enumerate(SEEN, start=1))
    assert len(SEEN) == 3


@pytest.mark.parametrize(("lora", "num_models"), [(LORA, 1), (None, 2)])
def test_a_reference_needs_no_second_model_under_an_adapter(
    folder: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: Any,
    num_models: int,
) -> None:
    """The built-in graph of an algorithm with beta > 0."""
    loaded: list[Path] = []

    def load(found: Path, dtype: torch.dtype) -> PreTrainedModel:
        loaded.append(found)
        return load_model(found, dtype)

    monkeypatch.setattr(build, "load_model", load)
    chosen = settings(folder, "rloo", lora=lora, minibatches=1)
    assert chosen.for_policy(POLICY).algorithm.beta > 0
    models = build_models(chosen, POLICY, folder if lora else model_folder)
    assert len(loaded) == num_models
    first, second = train(models, 1, 2)
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert second["reference_kl"] > 1e-6


def test_a_reference_of_its_own_is_not_the_model_without_adapter(
    folder: Path, new_model: Callable[[], PreTrainedModel], tmp_path: Path, model_folder: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.1 * value for name, value in weights.items()}, other / "model.safetensors")
    pipeline = near_reference(model=str(other))
    models = build_models(settings(folder, "rloo", lora=LORA, pipeline=pipeline), POLICY, folder)
    SEEN.clear()
    train(models, 1)
    assert np.array_equal(SEEN[0], infer(load_model(other)))


# --- what is refused ------------------------------------------------------------------------------


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(
    model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no such linear layer; it has down_proj, gate_proj"):
        adapted(model_folder, tmp_path / "adapted", targets=["query"])
    with pytest.raises(ConfigError, match="lm_head"):
        adapted(model_folder, tmp_path / "head", targets=["lm_head"])


@pytest.mark.parametrize("change", [{"rank": 4}, {"alpha": 4}, {"targets": ["q_proj"]}])
def test_an_adapter_keeps_its_shape(folder: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keeps its shape: undo"):
        build_models(settings(folder, "grpo", lora={**LORA, **change}), POLICY, folder)


def test_folder_and_config_must_both_speak_of_an_adapter(folder: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trains all weights, and .* holds an adapter"):
        build_models(settings(folder, "grpo"), POLICY, folder)
    with pytest.raises(ConfigError, match=r"trains an adapter, and .* holds no adapter"):
        build_models(settings(folder, "grpo", lora=LORA), POLICY, model_folder)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"peft_type": "IA3"}, {"r": None}])
def test_another_kind_of_adapter_is_refused(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((WeightsError, ConfigError)):
        attach_adapter(load_model(folder), folder, LoraConfig.model_validate(LORA))


def test_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors.pop(min(tensors))
    save_file(tensors, folder / FILE)
    with pytest.raises(WeightsError, match="is not an adapter of this model"):
        attach_adapter(load_model(folder), folder, LoraConfig.model_validate(LORA))


def test_where_peft_is_installed_it_does_not_load_the_adapter_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers looks for one in every folder, then; here that would end in an ImportError."""
    for module in (transformers.models.auto.auto_factory, transformers.integrations.peft):
        monkeypatch.setattr(module, "is_peft_available", lambda: True)
    model = load_model(folder)
    attach_adapter(model, folder, LoraConfig.model_validate(LORA))
    assert len(adapter_tensors(model)) == 28
