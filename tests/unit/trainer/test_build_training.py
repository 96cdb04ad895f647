# SPDX-License-Identifier: Apache-2.0
"""The keys of `training` that say how passes are made and how fast is learned, from the run file
to the models."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, random_batch, settings
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_models
from penstock.trainer.models import Models


def batch(seq: int) -> Batch:
    sealed = random_batch(1, seq=seq)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def models(model_folder: Path, name: str = "grpo", **training: Any) -> Models:
    return build_models(settings(model_folder, name, **training), POLICY, model_folder)


@contextmanager
def outputs_of_linear_layers() -> Generator[list[Tensor]]:
    """What all models of this process compute meanwhile."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            found.append(output.detach())

    handle: RemovableHandle = register_module_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_every_models_activations(
    model_folder: Path, precision: torch.dtype
) -> None:
    """Actor, critic and reference all; only the critic's values are float32 at once, as log-probs
    are."""
    name = str(precision).removeprefix("torch.")
    trained = models(model_folder, "ppo", minibatches=1, precision=name)
    with outputs_of_linear_layers() as found:
        trained.step(batch(1))
    layers_per_model = sum(isinstance(module, nn.Linear) for module in trained.model.modules())
    assert len(found) >= 3 * (layers_per_model - 1)
    assert {output.dtype for output in found if output.shape[-1] > 1} == {precision}
    assert {output.dtype for output in found if output.shape[-1] == 1} == {torch.float32}
    held = cast(dict[str, Tensor], trained.weights())
    kept = [*held.values(), *trained.state_tensors().values()]
    assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}


def test_bfloat16_learns_nearly_the_same(model_folder: Path) -> None:
    exact, near = (
        models(model_folder, precision=name).step(batch(1)).values
        for name in ("float32", "bfloat16")
    )
    assert near["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert near["grad_norm"] != exact["grad_norm"]


def test_micro_batch_tokens_cuts_passes_and_not_the_gradient(model_folder: Path) -> None:
    """AdamW's first moment is then a tenth of the gradient."""
    moments: list[dict[str, Tensor]] = []
    num_passes: list[int] = []
    for size in (4096, 16):
        trained = models(model_folder, micro_batch_tokens=size)
        with outputs_of_linear_layers() as found:
            trained.step(batch(1))
        num_passes.append(sum(output.shape[-1] == VOCAB_SIZE for output in found))
        state = trained.state_tensors()
        moments.append({key: state[key] for key in state if key.endswith(".exp_avg")})
    assert num_passes[0] == 1
    assert num_passes[1] >= 4
    whole, cut = moments
    largest = max(float(value.abs().max()) for value in whole.values())
    for key, value in whole.items():
        torch.testing.assert_close(cut[key], value, rtol=1e-4, atol=1e-5 * largest)


def test_the_learning_rate_rises_and_falls_as_the_file_says(model_folder: Path) -> None:
    trained = models(model_folder, learning_rate=4e-3, warmup_steps=2, lr_scheduler_type="linear")
    rates = [trained.step(batch(seq)).values["learning_rate"] for seq in (1, 2, 3, 4, 5)]
    assert rates == pytest.approx([2e-3, 4e-3, 4e-3, 3e-3, 2e-3])
