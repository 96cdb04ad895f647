# SPDX-License-Identifier: Apache-2.0
"""Router replay: the trainer computes with the experts that the engine chose, and nothing else
changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.doubles import POLICY, make_turn, seal
from tests.unit.trainer.test_packing_check import make_tiny

from penstock.errors import ConfigError
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.engines.hf import HfEngine
from penstock.trainer.actor import Actor
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.compute import ComputeSpec
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.model_folders import load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.router_replay import RouterReplay
from penstock.trainer.samples import ExpertShape
from penstock.types import NO_CHOICE, ExpertChoices, SamplingSpec, Turn, Version, view_ids
from penstock.types import view_log_probs as view

VOCAB, LAYERS = 32, 2
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHAPE = ExpertShape(num_layers=LAYERS, num_chosen=2, num_experts=8)
NUM_ANSWERS, NUM_TOKENS = 24, 24
BF16 = ComputeSpec(precision=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that differ much and score almost the same: a little rounding changes the choice."""
    path, model = tmp_path_factory.mktemp("mixture"), make_tiny("qwen3_moe", MOE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if name.endswith("gate.weight") else 3 if ".experts." in name else 1)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def turns(folder: Path) -> list[Turn]:
    """Sampled by the hf engine, in float32, several at a time."""

    async def sample() -> list[Turn]:
        engine = HfEngine(records_experts=True)
        await engine.load(folder, Version(policy=POLICY, incarnation=1, number=0))
        draw = np.random.default_rng(0)
        prompts = [draw.integers(1, VOCAB, 3 + n % 4).tolist() for n in range(NUM_ANSWERS)]
        requests = [
            GenerationRequest(
                prompt,
                SamplingSpec(max_tokens=NUM_TOKENS, seed=seed),
                policy=POLICY,
                session=str(seed),
            )
            for seed, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(engine, requests))
        await engine.close()
        return [
            replace(
                make_turn(
                    prompt, view_ids(one.sampled_ids).tolist(), logprobs=view(one.logprobs).tolist()
                ),
                experts=one.experts,
            )
            for prompt, one in zip(prompts, answers, strict=True)
        ]

    return asyncio.run(sample())


def batch_of(turns: Sequence[Turn], experts: ExpertShape | None) -> Batch:
    sealed = seal([[(turn, 0.0) for turn in turns]])
    return assemble(sealed.manifest, sealed.rows, POLICY, 1 << 20, experts=experts)


def actor_of(folder: Path, compute: ComputeSpec) -> Actor:
    model = load_model(folder)
    return shard(Actor(model, replay=RouterReplay(model)), model, SingleRank(), compute=compute)


def logprobs(actor: Actor, batch: Batch) -> Floats:
    return ForwardPass(ranks=SingleRank()).infer(actor, batch)[batch.samples.mask_T]


def gap(actor: Actor, turns: Sequence[Turn], experts: ExpertShape | None) -> float:
    """Mean absolute difference of the trainer's log-probs from the engine's."""
    batch = batch_of(turns, experts)
    sampled = batch.samples.logprobs_T[batch.samples.mask_T]
    return float(np.abs(logprobs(actor, batch) - sampled).mean())


def shape_of_turns(turns: Sequence[Turn]) -> ExpertShape:
    found = turns[0].experts
    assert found is not None
    return ExpertShape(
        num_layers=found.num_layers, num_chosen=found.num_chosen, num_experts=found.num_experts
    )


def test_the_gap_between_engine_and_trainer_falls(folder: Path, turns: list[Turn]) -> None:
    """The engine samples in float32 and the trainer computes in bfloat16."""
    assert shape_of_turns(turns) == SHAPE
    actor = actor_of(folder, BF16)
    before, after = gap(actor, turns, None), gap(actor, turns, SHAPE)
    print(f"log-prob gap {before:.4f} before, {after:.4f} after")
    assert after < 0.6 * before


def test_engine_and_trainer_agree_in_the_same_precision(folder: Path, turns: list[Turn]) -> None:
    batch = batch_of(turns, SHAPE)
    sampled = batch.samples.logprobs_T[batch.samples.mask_T]
    found = logprobs(actor_of(folder, ComputeSpec()), batch)
    np.testing.assert_allclose(found, sampled, atol=1e-4)


def test_the_engine_records_what_its_routers_chose(folder: Path, turns: list[Turn]) -> None:
    model: Any = load_model(folder)
    noted: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output: noted.append(output[2]))
    for turn in turns[:6]:
        noted.clear()
        ids = [*view_ids(turn.prompt_ids), *view_ids(turn.sampled_ids)]
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        chosen = torch.stack(noted, dim=1).numpy().astype(np.uint8)
        assert turn.experts is not None
        recorded = np.frombuffer(turn.experts.choices, np.uint8).reshape(len(ids), LAYERS, 2)
        np.testing.assert_array_equal(np.sort(recorded[:-1]), np.sort(chosen[:-1]))
        assert (recorded[-1] == NO_CHOICE[0]).all(), "the last token was not computed"


def test_tokens_without_a_choice_are_routed_as_without_replay(
    folder: Path, turns: list[Turn]
) -> None:
    without = [replace(turn, experts=None) for turn in turns]
    actor = actor_of(folder, BF16)
    plain = logprobs(actor, batch_of(turns, None))
    np.testing.assert_array_equal(logprobs(actor, batch_of(without, SHAPE)), plain)


def test_other_choices_give_other_log_probs_and_are_other_inputs(
    folder: Path, turns: list[Turn]
) -> None:
    [turn] = turns[:1]
    assert turn.experts is not None
    moved = bytes((byte + 1) % 8 for byte in turn.experts.choices)
    other = replace(turn, experts=replace(turn.experts, choices=moved))
    found = logprobs(actor_of(folder, ComputeSpec()), batch_of([turn, other], SHAPE))
    one, two = np.split(found, 2)
    assert np.abs(one - two).max() > 0.01


def test_router_and_chosen_experts_learn_as_without_replay(folder: Path, turns: list[Turn]) -> None:
    """In the engine's precision both choose the same, so the gradients are the same."""
    gradients: list[dict[str, torch.Tensor]] = []
    for experts in (None, SHAPE):
        actor, batch = actor_of(folder, ComputeSpec()), batch_of(turns[:4], experts)
        for _, tokens in ForwardPass(ranks=SingleRank()).run(actor, batch, np.arange(4)):
            tokens.logprobs_K.sum().backward()
        found = {name: one.grad for name, one in actor.named_parameters() if one.grad is not None}
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, rtol=1e-4, atol=1e-5)
    assert any(
        bool(one.any()) for name, one in gradients[1].items() if name.endswith("gate.weight")
    )


def test_choices_of_another_model_are_not_used(turns: list[Turn]) -> None:
    assert turns[0].experts is not None
    other = replace(turns[0].experts, num_experts=9)
    batch = batch_of([replace(turns[0], experts=other)], SHAPE)
    assert (batch.samples.experts_T == NO_CHOICE[0]).all()


def test_many_experts_take_two_bytes(tmp_path: Path) -> None:
    more = {"num_experts": 300, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
    model = make_tiny("qwen3_moe", more)
    replay = RouterReplay(model)
    chosen = np.array([[[299, 0, 256], [1, 2, 3]]], "<u2")
    experts_PW = torch.from_numpy(np.frombuffer(chosen.tobytes(), np.uint8).reshape(1, -1).copy())
    replay.use(experts_PW)
    found = [
        module(torch.randn(1, 32))[2].tolist()
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    assert found == chosen.transpose(1, 0, 2).tolist()


def test_a_router_that_weighs_in_its_own_way_is_refused() -> None:
    model: Any = make_tiny("qwen3_moe", MOE)
    router = model.model.layers[0].mlp.gate
    forward = router.forward

    def doubled(hidden: torch.Tensor) -> Any:
        logits, weights, chosen = forward(hidden)
        return logits, 2 * weights, chosen

    router.forward = doubled
    RouterReplay(model).use(torch.zeros(3, LAYERS * 2, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="in its own way"):
        router(torch.randn(3, 32))
    with pytest.raises(ConfigError, match="has no routers"):
        RouterReplay(make_tiny("qwen3", {}))


def test_the_last_tokens_of_choices() -> None:
    choices = ExpertChoices(num_layers=1, num_chosen=2, num_experts=8, choices=bytes(range(6)))
    assert choices.last(2).choices == bytes([2, 3, 4, 5])
    assert choices.last(4).choices == NO_CHOICE * 2 + bytes(range(6))
    assert choices.last(0).choices == b""
