# SPDX-License-Identifier: Apache-2.0
"""Order, replay, results and limits of a Tinker service, without HTTP and without the SDK."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load
from tests.unit.tinker.tinker_harness import (
    LINE,
    Client,
    make_folder,
    opened,
    pass_body,
    random_lines,
    read_logprobs,
)

from penstock.errors import BadRequest, Busy, Forbidden, NotFound, StoreError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.continuous import ContinuousEngine
from penstock.tinker import samplers
from penstock.tinker.folder import BASE_ADAPTER
from penstock.tinker.journal import Kind, State
from penstock.tinker.limits import Limits
from penstock.tinker.memory import PassLimit
from penstock.tinker.protocol import MESSAGES, Sample

TOLERANCE = 5e-5
"""As the engine's own tests have it (tests/unit/rollout/engines/test_hf_lora.py)."""
TRAINED: LINE = ([4, 5, 6], {"target_tokens": [5, 6, 7]})


async def test_requests_of_a_model_take_effect_in_their_order(tmp_path: Path) -> None:
    """Whatever order they arrive in: a gap is waited for."""
    async with opened(make_folder(tmp_path / "a")) as client:
        model = await client.create()
        bodies = {n: pass_body(model, n, random_lines(n)) for n in (1, 3)}
        step = json.dumps({"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}})
        await client.send(Kind.FORWARD_BACKWARD, model, 3, bodies[3])
        await client.send(Kind.OPTIM, model, 2, step.encode())
        assert await client.service.await_result(f"{model}:2", "alice", 0.01) is None
        await client.send(Kind.FORWARD_BACKWARD, model, 1, bodies[1])
        after, _ = read_logprobs(await client.done(f"{model}:3"))
        client.numbers[model] = 3
        first = await client.weights(model)
    async with opened(make_folder(tmp_path / "b")) as client:
        model = await client.create()
        for number, kind, body in (
            (1, Kind.FORWARD_BACKWARD, bodies[1]),
            (2, Kind.OPTIM, step.encode()),
            (3, Kind.FORWARD_BACKWARD, bodies[3]),
        ):
            await client.done(await client.send(kind, model, number, body))
        assert np.array_equal(read_logprobs(await client.done(f"{model}:3"))[0], after)
        client.numbers[model] = 3
        assert await client.weights(model) == first


@pytest.mark.parametrize("snapshot_every", [1, 3, 1000])
async def test_a_restart_changes_no_bit(tmp_path: Path, snapshot_every: int) -> None:
    """After any number of requests, with a state on disk that is as old as it may be."""
    async with opened(make_folder(tmp_path / "straight")) as client:
        model = await client.create()
        answers = [
            await client.done(id) for step in range(4) for id in await client.train(model, step)
        ]
        expected = await client.weights(model)
    folder, numbers = make_folder(tmp_path / "restarted"), dict[str, int]()
    found: list[bytes] = []
    for step in range(4):
        async with opened(folder, snapshot_every=snapshot_every) as client:
            client.numbers = numbers
            model = model if step else await client.create()
            found += [await client.done(id) for id in await client.train(model, step)]
    assert found == answers
    async with opened(folder, snapshot_every=snapshot_every) as client:
        client.numbers = numbers
        assert await client.weights(model) == expected


async def test_an_effect_without_a_result_is_applied_once(tmp_path: Path) -> None:
    """Killed after the optimizer call, before its result was written: the call is repeated on the
    model as it was before, so it counts once."""
    folder = make_folder(tmp_path / "a")
    async with opened(folder, snapshot_every=1000) as client:
        model = await client.create()
        ids = await client.train(model, 0)
        before = [await client.done(id) for id in ids]
        numbers = client.numbers
        await client.forget_results(ids[1])
    async with opened(folder, snapshot_every=1000) as client:
        client.numbers = numbers
        assert [await client.done(id) for id in ids] == before
        twice = await client.weights(model)
    async with opened(make_folder(tmp_path / "b")) as client:
        model = await client.create()
        await asyncio.gather(*(client.done(id) for id in await client.train(model, 0)))
        assert await client.weights(model) == twice


async def test_a_state_on_disk_is_of_its_last_result(tmp_path: Path) -> None:
    """They are written together, so what is replayed begins after the state."""
    async with opened(make_folder(tmp_path), snapshot_every=3) as client:
        model = await client.create()
        for step in range(3):
            for id in await client.train(model, step):
                await client.done(id)
        [(snapshot,)] = client.service.journal.rows("SELECT snapshot FROM models")
        assert snapshot == 5
        states = list((tmp_path / "states").glob("*/*"))
        assert [file.name for file in states] == ["5.safetensors"]
        waiting = client.service.journal.rows(
            "SELECT number FROM requests WHERE body IS NOT NULL ORDER BY number"
        )
        assert waiting == [(5,), (6,)]


async def test_the_same_request_is_the_same_future(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path)) as client:
        model = await client.create()
        body = pass_body(model, 1, [TRAINED])
        await asyncio.gather(
            *(client.send(Kind.FORWARD_BACKWARD, model, 1, body) for _ in range(5))
        )
        first = await client.done(f"{model}:1")
        await client.send(Kind.FORWARD_BACKWARD, model, 1, body)
        assert await client.done(f"{model}:1") == first
        with pytest.raises(BadRequest, match="with another content"):
            await client.send(Kind.FORWARD_BACKWARD, model, 1, pass_body(model, 1, [TRAINED] * 2))
        client.numbers[model] = 1
        gradient = load(await client.weights(model))
        once = max(float(t.abs().max()) for name, t in gradient.items() if "grad/" in name)
        assert once > 0
    async with opened(make_folder(tmp_path / "once")) as other:
        model = await other.create()
        await other.done(await other.send(Kind.FORWARD_BACKWARD, model, 1, body))
        other.numbers[model] = 1
        assert load(await other.weights(model)).keys() == gradient.keys()
        again = load(await other.weights(model))
        assert all(bool((again[name] == tensor).all()) for name, tensor in gradient.items())


@pytest.mark.parametrize(
    ("line", "loss", "words"),
    [
        (TRAINED, "nonsense", "no loss 'nonsense'"),
        (([4, 5], {"target_tokens": [5, 99]}), "cross_entropy", "token ids must be"),
        (TRAINED, "ppo", "this loss reads advantages, logprobs"),
        (([4, 5], {"target_tokens": [5]}), "cross_entropy", "one number for each"),
        (([4], {"target_tokens": [5], "weights": [float("nan")]}), "cross_entropy", "not finite"),
    ],
)
async def test_a_refused_request_changes_nothing(
    tmp_path: Path, line: LINE, loss: str, words: str
) -> None:
    """The gradient so far stays, and the next request goes on."""
    async with opened(make_folder(tmp_path)) as client:
        model = await client.create()
        await client.done(
            await client.send(Kind.FORWARD_BACKWARD, model, 1, pass_body(model, 1, [TRAINED]))
        )
        client.numbers[model] = 1
        before = await client.weights(model)
        body = pass_body(model, 3, [TRAINED, line], loss=loss)
        assert words in await client.error(await client.send(Kind.FORWARD_BACKWARD, model, 3, body))
        client.numbers[model] = 3
        assert await client.weights(model) == before


async def test_gradients_add_up_over_requests(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path)) as client:
        found: list[dict[str, np.ndarray]] = []
        for session, parts in (("s-1", [[TRAINED] * 2]), ("s-2", [[TRAINED], [TRAINED]])):
            model = await client.create(session)
            for number, lines in enumerate(parts, 1):
                body = pass_body(model, number, lines)
                await client.done(await client.send(Kind.FORWARD_BACKWARD, model, number, body))
                client.numbers[model] = number
            state = load(await client.weights(model))
            found.append({n: t.numpy() for n, t in state.items() if n.startswith("grad/")})
        one, two = found
        assert one.keys() == two.keys() and any(
            np.abs(values).max() > 0.1 for values in one.values()
        )
        for name, values in one.items():
            assert np.allclose(values, two[name], rtol=1e-4, atol=1e-5)


async def test_clients_share_a_base_and_not_their_adapters(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path)) as alice:
        bob = Client(alice.service, owner="bob")
        models = [await alice.create("s-a"), await bob.create("s-b")]
        ids = await alice.train(models[0], 0)
        await asyncio.gather(*map(alice.done, ids))
        body = pass_body(models[1], 1, [TRAINED], is_forward_only=True)
        untouched, _ = read_logprobs(
            await bob.done(await bob.send(Kind.FORWARD, models[1], 1, body))
        )
        base = alice.service.base
        shared = {p.data_ptr() for p in base.model.parameters()}
        for lane in alice.service._lanes.values():  # pyright: ignore[reportPrivateUsage]
            assert lane.model is not None
            own = lane.model._actor.model.named_parameters()  # pyright: ignore[reportPrivateUsage]
            assert {p.data_ptr() for n, p in own if ".lora_" not in n} == shared
        fresh = await alice.create("s-c")
        body = pass_body(fresh, 1, [TRAINED], is_forward_only=True)
        again, _ = read_logprobs(await alice.done(await alice.send(Kind.FORWARD, fresh, 1, body)))
        assert np.array_equal(untouched, again)
        with pytest.raises(NotFound):
            await bob.service.await_result(ids[0], "bob", 0.01)
        with pytest.raises(NotFound):
            await bob.send(Kind.FORWARD, models[0], 3, pass_body(models[0], 3, [TRAINED]))


async def test_saved_weights_continue_bit_for_bit(tmp_path: Path) -> None:
    """In a new model, also after a restart and when what was saved is gone."""
    folder = make_folder(tmp_path)
    async with opened(folder) as client:
        model = await client.create()
        for id in await client.train(model, 0):
            await client.done(id)
        saved = await client.next(Kind.SAVE, model, path="x")
        path = json.loads(await client.done(saved))["path"]
        body = {"session_id": "s-2", "model_seq_id": 0, "path": path, "optimizer": True}
        other = "s-2:train:0"
        await client.done(await client.send(Kind.LOAD, other, 0, json.dumps(body).encode()))
        client.numbers[other] = 0
        again = await client.next(Kind.SAVE, model, path="x")
        assert "exists; pass overwrite" in await client.error(again)
        for one in (model, other):
            for id in await client.train(one, 1):
                await client.done(id)
        expected = await client.weights(model)
        assert await client.weights(other) == expected
        numbers = client.numbers
        (client.service.effects.checkpoint(path, "alice")[0] / "state.bin").unlink()
    async with opened(folder) as client:
        client.numbers = numbers
        assert await client.weights(other) == expected
        bob = Client(client.service, owner="bob")
        stolen = {"session_id": "s-3", "model_seq_id": 0, "path": path, "optimizer": True}
        with pytest.raises(BadRequest, match="no saved weights"):
            await bob.send(Kind.LOAD, "s-3:train:0", 0, json.dumps(stolen).encode())


async def test_sampled_logprobs_are_the_trainers(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path)) as client:
        model = await client.create()
        for step in range(3):
            for id in await client.train(model, step):
                await client.done(id)
        session = await client.sampling_session(model)
        prompt = [4, 5, 6, 3]
        content = await client.done(await client.sample(session, 0, prompt, num_samples=4))
        found = MESSAGES["SampleResponse"]()
        found.ParseFromString(content)
        assert len({one.tokens for one in found.sequences}) > 1
        for number, one in enumerate(found.sequences, 1):
            tokens = np.frombuffer(one.tokens, np.int32)
            recorded = np.frombuffer(one.logprobs, np.float32)
            line = [*prompt, *tokens.tolist()]
            body = pass_body(
                model, 100, [(line[:-1], {"target_tokens": line[1:]})], is_forward_only=True
            )
            client.numbers[model] += 1
            id = await client.send(Kind.FORWARD, model, client.numbers[model], body)
            trained, _ = read_logprobs(await client.done(id))
            assert np.abs(trained[len(prompt) - 1 :] - recorded).max() < TOLERANCE
            asked = await client.sample(
                session, number, line, sampling_params={"max_tokens": 1}, prompt_logprobs=True
            )
            scored = MESSAGES["SampleResponse"]()
            scored.ParseFromString(await client.done(asked))
            scores = np.frombuffer(scored.prompt_logprobs, np.float32)
            assert np.isnan(scores[0]) and np.abs(scores[1:] - trained).max() < TOLERANCE


async def test_sampling_goes_on_after_a_restart_with_the_same_draws(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    async with opened(folder) as client:
        session = await client.sampling_session(await client.create())
        id = await client.sample(session, 0, [4, 5, 3])
        first = await client.done(id)
        await client.forget_results(id)
    async with opened(folder) as client:
        assert await client.done(id) == first
        ended = await client.sample(session, 1, [4], sampling_params={"stop": [4, 5, 6, 7, 8]})
        found = MESSAGES["SampleResponse"]()
        found.ParseFromString(await client.done(ended))
        tokens = np.frombuffer(found.sequences[0].tokens, np.int32).tolist()
        assert not {4, 5, 6, 7, 8} & {*tokens[:-1]}
        refused = await client.sample(session, 2, [4], topk_prompt_logprobs=3)
        assert "no top-k" in await client.error(refused)


async def test_clients_that_share_weights_share_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked last gave back a place that the first one held: a request failed, and the place was
    lost. Both sample the base model here."""
    generate, may_answer = ContinuousEngine.__call__, asyncio.Event()
    monkeypatch.setattr(samplers, "MAX_LOADED", 1)

    async def gated(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        if request.session == "last":
            await may_answer.wait()
        return await generate(engine, request)

    monkeypatch.setattr(ContinuousEngine, "__call__", gated)
    async with opened(make_folder(tmp_path)) as client:
        folder = client.service.folder / BASE_ADAPTER
        shared = client.service.sampling._samplers  # pyright: ignore[reportPrivateUsage]
        body = msgspec.convert(
            {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]},
                "sampling_params": {"max_tokens": 2},
                "sampling_session_id": "s",
                "seq_id": 0,
            },
            Sample,
        )
        asked = samplers.question_of(body, window=32, vocab_size=32)
        first = asyncio.create_task(shared.sample("first", "alice", folder, asked))
        last = asyncio.create_task(shared.sample("last", "bob", folder, asked))
        await first
        may_answer.set()
        assert await last
        assert await shared.sample("again", "carol", folder, asked), "the place is free again"


async def test_limits_of_a_credential(tmp_path: Path) -> None:
    limits = Limits(max_models=1, max_waiting=2)
    async with opened(make_folder(tmp_path), limits=limits) as alice:
        bob = Client(alice.service, owner="bob")
        model = await alice.create()
        with pytest.raises(Forbidden, match="1 models in use"):
            await alice.create("s-2")
        other = await bob.create("s-b")  # its own limit
        for number in (2, 3):  # 1 never comes, so they wait
            body = pass_body(model, number, [TRAINED])
            await alice.send(Kind.FORWARD_BACKWARD, model, number, body)
        with pytest.raises(Busy, match="2 requests"):
            await alice.send(Kind.FORWARD_BACKWARD, model, 4, pass_body(model, 4, [TRAINED]))
        await bob.done(await bob.next(Kind.SAVE, other, path="x"))


async def test_models_that_are_idle_are_put_aside_and_come_back(tmp_path: Path) -> None:
    limits = Limits(max_models=1, idle_s=-1.0)
    async with opened(make_folder(tmp_path), limits=limits) as client:
        model = await client.create()
        for id in await client.train(model, 0):
            await client.done(id)
        before = await client.weights(model)
        await client.create("s-2")
        assert model not in client.service._lanes  # pyright: ignore[reportPrivateUsage]
        assert await client.weights(model) == before


async def test_damage_is_an_error_and_never_other_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    async with opened(folder, snapshot_every=1) as client:
        model = await client.create()
        for id in await client.train(model, 0):
            await client.done(id)
        numbers = client.numbers
    [state] = (tmp_path / "states").glob("*/*")
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    async with opened(folder) as client:
        client.numbers = numbers
        await client.train(model, 1)
        with pytest.raises(StoreError, match="is damaged"):
            await client.service.failed


async def test_what_is_old_is_deleted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    async with opened(folder, snapshot_every=1, limits=Limits(keep_s=-10.0)) as client:
        model = await client.create()
        for id in await client.train(model, 0):
            await client.done(id)
        await client.sampling_session(model)
        kept = await client.weights(model)
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2
        await client.service.prune()
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1
        with pytest.raises(NotFound):
            await client.service.await_result(f"{model}:1", "alice", 0.01)
        with pytest.raises(BadRequest, match="has taken effect"):
            await client.send(Kind.FORWARD_BACKWARD, model, 1, pass_body(model, 1, [TRAINED]))
        assert await client.weights(model) == kept
        assert (await client.result(f"{model}:{client.numbers[model]}")).state is State.DONE


async def test_what_is_computed_again_has_the_same_bits(tmp_path: Path) -> None:
    """Large models keep only the input of each layer for the backward pass."""
    weights: list[bytes] = []
    for recompute in ("none", "layer"):
        async with opened(make_folder(tmp_path / recompute)) as client:
            assert client.service.base.limit.recompute == "none"
            client.service.base.limit = PassLimit(max_tokens=4096, recompute=recompute)
            model = await client.create()
            for id in [*await client.train(model, 0), *await client.train(model, 1)]:
                await client.done(id)
            weights.append(await client.weights(model))
    assert weights[0] == weights[1]
