# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine against a fake server: swaps, spans, rejections, faults, recovery.

Tests that need a real vLLM are in test_vllm_real.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.contract.dataflow_server import serving
from tests.contract.fake_vllm_server import (
    VOCAB,
    VllmDouble,
    token,
    weights_of,
    write_environment,
)

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines.vllm import ChildServer, RemoteServer, VllmEngine
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)

POLICY = PolicyName("policy")
PROMPT = [1, 2, 3]
LONG = 150
"""Tokens of an answer that is still running while a slow machine loads versions."""


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


def write_folder(folder: Path, content: int, names: tuple[str, ...] = ("w",)) -> Path:
    folder.mkdir(parents=True)
    config = {"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    head = {
        name: {"dtype": "I32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}
        for at, name in enumerate(names)
    }
    text = json.dumps(head).encode()
    body = struct.pack("<i", content) * len(names)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_folder(tmp_path / "versions" / str(n), n) for n in range(3)]


@pytest.fixture
def double(folders: list[Path]) -> VllmDouble:
    return VllmDouble(folders[2], root=folders[0].parent)


@pytest.fixture
async def engine(double: VllmDouble) -> AsyncIterator[VllmEngine]:
    with serving(double.app()) as url:
        engine = VllmEngine(RemoteServer(url, start_s=60))
        yield engine
        await engine.close()


@pytest.fixture
async def hasty(double: VllmDouble) -> AsyncIterator[VllmEngine]:
    """An engine that takes a server without a token for dead after a moment."""
    with serving(double.app()) as url:
        engine = VllmEngine(RemoteServer(url, start_s=60), stall_s=0.4)
        yield engine
        await engine.close()


async def ask(engine: VllmEngine, num_tokens: int = 5, **spec: object) -> Completion:
    sampling = SamplingSpec(max_tokens=num_tokens, **spec)  # pyright: ignore[reportArgumentType]
    return await engine(GenerationRequest(PROMPT, sampling, policy=POLICY, session="s"))


async def until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.01)


def numbers(completion: Completion) -> list[int]:
    """The version of each token."""
    return [span.number for span in completion.spans for _ in range(span.start, span.end)]


def check_tokens(completion: Completion, folders: list[Path]) -> None:
    """Check that each token comes from the weights of its version."""
    expected = [
        token(weights_of(folders[number % len(folders)]), PROMPT, at)
        for at, number in enumerate(numbers(completion))
    ]
    assert list(view_ids(completion.sampled_ids)) == expected


@pytest.mark.parametrize("has_plugin", [True, False])
async def test_an_answer_is_of_the_weights_that_were_loaded(
    engine: VllmEngine, double: VllmDouble, folders: list[Path], has_plugin: bool
) -> None:
    double.has_plugin = has_plugin
    assert engine.live is None
    with pytest.raises(EngineError, match="no version"):
        await ask(engine)
    await engine.load(folders[0], version(0))
    assert engine.live == version(0)
    answer = await ask(engine)
    check_tokens(answer, folders)
    assert answer.finish is FinishReason.LENGTH
    assert list(view_log_probs(answer.logprobs)) == pytest.approx(
        [-1 - made / 100 for made in view_ids(answer.sampled_ids)]
    )
    await engine.load(folders[1], version(1))
    again = await ask(engine)
    assert numbers(again) == [1] * 5
    check_tokens(again, folders)


async def test_a_swap_pauses_loads_drops_the_cache_and_labels_in_this_order(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.log.clear()
    await engine.load(folders[1], version(1))
    assert double.log == ["check", "pause", "load", "reset", "label", "resume"]
    assert engine.paused_s >= 0.02
    await ask(engine)
    assert double.bodies[-1]["cache_salt"] == "policy.1.1"


async def test_answers_go_on_over_many_swaps_and_every_token_has_its_version(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    """Full and streamed; chunks have the same versions as the completion."""
    double.token_s = 0.004
    await engine.load(folders[0], version(0))
    heard: list[list[TokenChunk]] = [[] for _ in range(4)]
    spec = SamplingSpec(max_tokens=LONG)
    calls = [
        asyncio.create_task(
            engine(
                GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=pieces.append)
            )
        )
        for pieces in heard
    ]
    calls += [asyncio.create_task(ask(engine, LONG)) for _ in range(4)]
    for number in range(1, 6):
        await asyncio.sleep(0.03)
        await engine.load(folders[number % 3], version(number))
    answers = await asyncio.gather(*calls)
    for answer in answers:
        assert len(view_ids(answer.sampled_ids)) == LONG
        assert len(answer.spans) >= 3
        check_tokens(answer, folders)
    for answer, pieces in zip(answers, heard, strict=False):
        told = [(chunk.version.number, i) for chunk in pieces for i in chunk.sampled_ids]
        assert told == list(zip(numbers(answer), view_ids(answer.sampled_ids), strict=True))


async def test_the_spec_and_our_own_stop_rules_reach_the_server(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    spec: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 5}
    await ask(engine, stop=("x",), json_schema='{"type":"object"}', **spec)
    sent = double.bodies[-1]["sampling_params"]
    assert {key: sent[key] for key in spec} == spec
    assert sent["stop_token_ids"] == [7]
    assert (sent["stop"], sent["include_stop_str_in_output"]) == (["x"], True)
    assert sent["structured_outputs"] == {"json": '{"type":"object"}'}
    assert sent["logprobs"] == 0
    await ask(engine, num_tokens=2000)
    assert double.bodies[-1]["sampling_params"]["max_tokens"] == 512 - len(PROMPT)


async def test_what_vllm_would_do_otherwise_is_refused(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    for temperature in (0.001, 2.5):
        with pytest.raises(RequestRejected, match="temperature"):
            await ask(engine, temperature=temperature)
    with pytest.raises(RequestRejected, match="vocabulary"):
        await engine(GenerationRequest([VOCAB], SamplingSpec(), policy=POLICY, session="s"))
    with pytest.raises(RequestRejected, match="Shorten"):
        await engine(GenerationRequest([1] * 512, SamplingSpec(), policy=POLICY, session="s"))
    double.answers["/inference/v1/generate"] = (400, "bad schema")
    with pytest.raises(RequestRejected, match="bad schema"):
        await ask(engine)


async def test_a_server_without_log_probs_under_the_spec_is_refused_at_start(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    double.is_raw = True
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        await engine.load(folders[0], version(0))
    assert engine.live is None


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/collective_rpc", "/pause"])
async def test_a_server_that_lacks_a_route_is_told_its_options(
    engine: VllmEngine, double: VllmDouble, folders: list[Path], path: str
) -> None:
    double.answers[path] = (404, "Not Found")
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1 and `--enable-scale-out"):
        await engine.load(folders[0], version(0))
    assert engine.live is None


async def test_a_folder_outside_the_root_or_of_another_model_leaves_the_old_version(
    engine: VllmEngine, double: VllmDouble, folders: list[Path], tmp_path: Path
) -> None:
    await engine.load(folders[0], version(0))
    double.log.clear()
    with pytest.raises(EngineError, match="not inside the root"):
        await engine.load(write_folder(tmp_path / "elsewhere", 9), version(1))
    other = write_folder(folders[0].parent / "other", 9, ("w", "more"))
    with pytest.raises(EngineError, match="has a different model"):
        await engine.load(other, version(1))
    assert double.log == ["check"], "nothing was paused for it"
    assert engine.live == version(0)
    check_tokens(await ask(engine), folders)


async def test_a_load_that_fails_half_way_puts_the_old_weights_back(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    double.token_s = 0.005
    await engine.load(folders[0], version(0))
    running = asyncio.create_task(ask(engine, LONG))
    await asyncio.sleep(0.03)
    double.fail_loads = 1
    with pytest.raises(EngineError, match="half of it"):
        await engine.load(folders[1], version(1))
    assert engine.live == version(0)
    answer = await running
    assert set(numbers(answer)) == {0}
    check_tokens(answer, folders)


async def test_weights_that_go_neither_way_answer_nobody_and_are_loaded_anew(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    double.token_s = 0.005
    await engine.load(folders[0], version(0))
    running = asyncio.create_task(ask(engine, LONG))
    await asyncio.sleep(0.03)
    double.fail_loads = 2
    with pytest.raises(EngineError, match="half of it"):
        await engine.load(folders[1], version(1))
    assert engine.live is None
    with pytest.raises(EngineError, match="lost"):
        await running
    await until(lambda: engine.live == version(0))
    check_tokens(await ask(engine), folders)


async def test_a_server_that_makes_no_token_is_dead_whatever_it_says(
    hasty: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await hasty.load(folders[0], version(0))
    double.is_stalled = True
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"requests waiting, no token for|token counters"):
        await ask(hasty)
    assert time.monotonic() - began > 0.3
    assert hasty.live is None
    double.is_stalled = False
    await until(lambda: hasty.live == version(0))
    check_tokens(await answered(hasty, 5), folders)


async def answered(hasty: VllmEngine, num_tokens: int) -> Completion:
    """Asked again where the machine stood still: then the engine is right to take the server for
    dead, but not ten times in a row."""
    for _ in range(9):
        with suppress(EngineError):
            return await ask(hasty, num_tokens)
        await until(lambda: hasty.live == version(0))
    return await ask(hasty, num_tokens)


async def test_slow_is_not_dead(hasty: VllmEngine, double: VllmDouble, folders: list[Path]) -> None:
    """Answers that take longer than the limit but make progress, and an idle server."""
    await hasty.load(folders[0], version(0))
    await asyncio.sleep(0.6)
    assert hasty.live == version(0)
    double.token_s = 0.15
    answer = await answered(hasty, 8)
    assert len(view_ids(answer.sampled_ids)) == 8


async def test_a_broken_stream_is_an_error_at_once_and_the_engine_lives_on(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.is_cutting = True
    heard: list[TokenChunk] = []
    with pytest.raises(EngineError, match="connection to vLLM lost"):
        await engine(
            GenerationRequest(
                PROMPT, SamplingSpec(), policy=POLICY, session="s", on_chunk=heard.append
            )
        )
    assert len(heard) == 3
    double.is_cutting = False
    await until(lambda: engine.live == version(0))
    check_tokens(await ask(engine), folders)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_caller_who_goes_away_gives_up_its_place(
    engine: VllmEngine, double: VllmDouble, folders: list[Path], is_streamed: bool
) -> None:
    double.token_s = 0.01
    await engine.load(folders[0], version(0))
    heard: list[TokenChunk] = []
    on_chunk = heard.append if is_streamed else None
    spec = SamplingSpec(max_tokens=500)
    call = asyncio.create_task(
        engine(GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=on_chunk))
    )
    await asyncio.sleep(0.1)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    await until(lambda: double.num_cut_off == 1)


async def test_tokens_of_weights_nobody_loaded_are_refused(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.label = "somebody else's"
    with pytest.raises(EngineError, match="never loaded"):
        await ask(engine)
    double.label, double.ends_with = str(version(0)), "abort"
    with pytest.raises(EngineError, match="'abort'"):
        await ask(engine)


async def test_close_fails_what_is_running(
    engine: VllmEngine, double: VllmDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.token_s = 0.05
    calls = [asyncio.create_task(ask(engine, LONG)) for _ in range(3)]
    await asyncio.sleep(0.1)
    await engine.close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineError), result
    with pytest.raises(EngineError, match="closed"):
        await ask(engine)


# --- the child ----------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fake virtual environment with vLLM in it."""
    return write_environment(tmp_path / "environment", tmp_path / "pids")


def pids(tmp_path: Path) -> list[int]:
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("victim", ["the server", "the guardian"])
async def test_a_killed_child_comes_back_with_the_last_version(
    environment: Path,
    folders: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret")
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    server = ChildServer(environment, ["--dtype", "float32"], state_dir=tmp_path / "state")
    engine = VllmEngine(server)
    try:
        await engine.load(folders[0], version(0))
        await engine.load(folders[1], version(1))
        before = pids(tmp_path)
        running = asyncio.create_task(ask(engine, 400))
        await asyncio.sleep(0.1)
        group = server.group
        assert group is not None
        os.kill(group if victim == "the guardian" else before[0], signal.SIGKILL)
        [ending] = await asyncio.gather(running, return_exceptions=True)
        if victim == "the server":  # without a guardian it runs until it notices
            assert isinstance(ending, EngineError) and "connection to vLLM lost" in str(ending)
        await until(lambda: pids(tmp_path) != before and engine.live == version(1), 60)
        assert not any(map(is_alive, before)), "nothing of the old server is left"
        check_tokens(await ask(engine), folders)
        assert numbers(await ask(engine)) == [1] * 5
    finally:
        await engine.close()
    await until(lambda: not any(map(is_alive, pids(tmp_path))))
    assert list((tmp_path / "state").glob("vllm-*.log"))


async def test_a_stopped_child_ends_by_itself(
    environment: Path, folders: list[Path], tmp_path: Path
) -> None:
    """It gets SIGTERM, and time to clean up; nothing in between swallows the signal."""
    server = ChildServer(environment, ["--dtype", "float32"], state_dir=tmp_path / "state")
    await server.start(folders[0])
    await server.stop()
    [log] = (tmp_path / "state").glob("vllm-*.log")
    assert "Finished server process" in log.read_text()


async def test_a_child_dies_with_the_node_that_was_killed(
    environment: Path, folders: list[Path], tmp_path: Path
) -> None:
    node = f"""
import asyncio
from pathlib import Path
from typing import Any
from penstock.rollout.engines.vllm import ChildServer
async def main():
    server = ChildServer(Path({str(environment)!r}), ["--dtype", "float32"])
    await server.start(Path({str(folders[0])!r}))
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", node, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert b"up" in [line.strip() async for line in _first(process.stdout)]
    process.kill()
    await process.wait()
    await until(lambda: not any(map(is_alive, pids(tmp_path))))


async def _first(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await stream.readline():
        yield line
        if line.strip() == b"up":
            return


async def test_a_child_that_cannot_start_says_what_to_do(
    folders: list[Path], tmp_path: Path
) -> None:
    engine = VllmEngine(ChildServer(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="penstock doctor"):
        await engine.load(folders[0], version(0))
    await engine.close()
    program = tmp_path / "broken" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no memory left >&2\nexit 3\n")
    program.chmod(0o755)
    engine = VllmEngine(ChildServer(tmp_path / "broken"))
    with pytest.raises(EngineError, match=r"(?s)exited during startup.*no memory left"):
        await engine.load(folders[0], version(0))
    await engine.close()
