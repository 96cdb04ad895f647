# SPDX-License-Identifier: Apache-2.0
"""AdamW with its moments in host memory: the same bits, and every move counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.trainer.doubles import make_learner, random_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock.trainer.host_moments import MOMENTS, HostMoments
from penstock.trainer.learner import Learner


class Copied(TorchDispatchMode):
    """Elements that are copied one for one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.num_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def optimizers() -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=draw)) for size in (6, 15, 1)]
    return weights, torch.optim.AdamW(weights, lr=0.1, fused=True)


def give_gradients(weights: list[torch.nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.device)


def test_moves_are_counted_and_there_are_no_others() -> None:
    weights, optimizer = optimizers()
    moments, sizes = HostMoments(optimizer), [weight.numel() for weight in weights]
    out = 2 * sum(sizes)  # two moments
    for seed, expected in enumerate([out, 2 * out, 2 * out]):  # the first ones are made there
        give_gradients(weights, seed)
        before = moments.num_moved_bytes
        with Copied() as copied:
            moments.step()
        assert copied.num_elements == expected
        assert moments.num_moved_bytes - before == 4 * expected


def test_a_parameter_without_a_gradient_moves_nothing() -> None:
    weights, optimizer = optimizers()
    moments = HostMoments(optimizer)
    give_gradients(weights, 1)
    weights[1].grad = None
    moments.step()
    assert moments.num_moved_bytes == 4 * 2 * (6 + 1)
    assert weights[1] not in optimizer.state
    assert optimizer.param_groups[0]["params"] == weights


def test_updates_are_those_of_the_optimizer_alone() -> None:
    (plain_weights, plain), (weights, offloaded) = optimizers(), optimizers()
    moments = HostMoments(offloaded)
    for seed in range(5):
        for given in (plain_weights, weights):
            give_gradients(given, seed)
        for optimizer in (plain, offloaded):
            optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
        plain.step()
        moments.step()
    assert all(map(torch.equal, plain_weights, weights))
    for one, other in zip(plain_weights, weights, strict=True):
        assert all(
            torch.equal(plain.state[one][key], offloaded.state[other][key]) for key in MOMENTS
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_moments_are_in_pinned_memory_of_the_host() -> None:
    found: list[list[Tensor]] = []
    for is_offloaded in (False, True):
        weights = [torch.nn.Parameter(weight.detach().cuda()) for weight in optimizers()[0]]
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        moments = HostMoments(optimizer)
        for seed in range(3):
            give_gradients(weights, seed)
            (moments if is_offloaded else optimizer).step()
        kept = [optimizer.state[weight][key] for weight in weights for key in MOMENTS]
        assert all(one.is_pinned() == is_offloaded for one in kept)
        found.append([one.detach().cpu() for one in (*weights, *kept)])
    assert all(map(torch.equal, *found))


def steps(learner: Learner, numbers: range) -> dict[str, Tensor]:
    for number in numbers:
        learner.step(random_batch(2, seq=number).assembled())
    return {**learner.weight_tensors(), **learner.state_tensors()}


@pytest.mark.parametrize("goes_on_offloaded", [False, True])
def test_a_learner_goes_on_from_the_others_state(
    new_model: Callable[[], PreTrainedModel], goes_on_offloaded: bool
) -> None:
    straight = steps(make_learner(new_model()), range(1, 5))
    half = steps(make_learner(new_model(), is_offloaded=not goes_on_offloaded), range(1, 3))
    resumed = make_learner(new_model(), is_offloaded=goes_on_offloaded)
    resumed.restore(half, with_weights=True)
    found = steps(resumed, range(3, 5))
    assert found.keys() == straight.keys()
    assert [name for name in found if not torch.equal(found[name], straight[name])] == []
