# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine on a real vLLM for CPUs, against the trainer's own computation, in float32.

Needs `make setup-engine`. One server for all tests; the last of them kills it.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from jsonschema import validate
from scripts.setup_engine import CACHE, ENGINE, MARKER
from tests.unit.weights.patch_files import patch_between

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines.vllm import ChildServer, VllmEngine
from penstock.rollout.engines.vllm.control import Control
from penstock.rollout.http_client import HttpClient
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.patches import FULL_CHECK_EVERY, VALUES

POLICY = PolicyName("policy")
PROMPT = list(range(20, 60))
TOLERANCE = 1e-3
"""In log-probability, token by token."""
NUM_SWAPS = int(os.environ.get("PENSTOCK_VLLM_SWAPS", "10"))
NUM_SESSIONS = int(os.environ.get("PENSTOCK_VLLM_SESSIONS", "8"))
NUM_SCHEMAS = int(os.environ.get("PENSTOCK_VLLM_SCHEMAS", "20"))
STARTED_AT = 19
"""Index of the start time in /proc/PID/stat, counted after the name."""
NUM_KILLS = int(os.environ.get("PENSTOCK_VLLM_KILLS", "2"))
START_S = 900.0

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (ENGINE / MARKER).exists(), reason=f"no vLLM in {CACHE}; run `make setup-engine`"
    ),
]


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


class Bench:
    """An engine on a real server, and two sets of weights: even and odd versions."""

    def __init__(self, root: Path) -> None:
        from tests.unit.rollout.engines.byte_qwen3 import write_snapshot

        self.root = root
        self.folders = [write_snapshot(root / "versions" / str(seed), seed=seed) for seed in (0, 1)]
        options = ["--dtype", "float32", "--max-num-seqs", "64", "--max-num-batched-tokens", "96"]
        self.server = ChildServer(ENGINE, options, state_dir=root / "state", start_s=START_S)
        self.engine = VllmEngine(self.server)
        self.number = -1

    async def swap(self) -> None:
        self.number += 1
        await self.engine.load(self.folders[self.number % 2], version(self.number))

    async def ask(self, spec: SamplingSpec, heard: list[TokenChunk] | None = None) -> Completion:
        on_chunk = None if heard is None else heard.append
        return await self.engine(
            GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=on_chunk)
        )

    def worst(self, answer: Completion, spec: SamplingSpec, number: int | None = None) -> float:
        """The largest difference between recorded log-probs and the trainer's, each token under
        the version of its span, or all under version `number`."""
        ids = list(view_ids(answer.sampled_ids))
        recorded = list(view_log_probs(answer.logprobs))
        differences: list[float] = []
        for span in answer.spans:
            folder = self.folders[(span.number if number is None else number) % 2]
            right = expected(folder, tuple(ids), spec)
            differences += [abs(recorded[at] - right[at]) for at in range(span.start, span.end)]
        assert len(differences) == len(ids)
        return max(differences)


@cache
def model_of(folder: Path) -> Any:
    from penstock.trainer.model_folders import load_model

    return load_model(folder).eval()


def expected(folder: Path, ids: Sequence[int], spec: SamplingSpec) -> list[float]:
    """The trainer's log-probs for these tokens of an answer."""
    torch: Any = importlib.import_module("torch")
    losses: Any = importlib.import_module("penstock.trainer.losses.logprobs")
    num = len(ids)
    targets = torch.tensor(list(ids))
    with torch.no_grad():
        logits = model_of(folder)(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1]
    if spec.temperature == 0:
        return torch.log_softmax(logits, -1)[range(num), targets].tolist()
    kept = losses.Truncation(
        top_k_K=torch.full((num,), spec.top_k),
        top_p_K=torch.full((num,), spec.top_p),
        min_p_K=torch.full((num,), spec.min_p),
    )
    logprobs = losses.sampling_log_softmax(
        logits, targets, torch.full((num,), spec.temperature), kept
    )
    return logprobs[range(num), targets].tolist()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    pytest.importorskip("transformers")
    bench = Bench(tmp_path_factory.mktemp("vllm"))
    try:
        await bench.swap()
        yield bench
    finally:
        await bench.engine.close()


async def test_a_grid_of_sampling_specs_agrees_with_the_trainer(bench: Bench) -> None:
    """Concurrently, so that greedy and random requests share batches."""
    grid = itertools.product((0.5, 1.0, 1.7), (1.0, 0.8), (0, 20), (0.0, 0.05))
    specs = [
        SamplingSpec(temperature=t, top_p=p, top_k=k, min_p=m, max_tokens=24, seed=at)
        for at, (t, p, k, m) in enumerate(grid)
    ]
    specs += [SamplingSpec(temperature=0.0, max_tokens=24)] * 2
    answers = await asyncio.gather(*map(bench.ask, specs))
    worst = [bench.worst(answer, spec) for answer, spec in zip(answers, specs, strict=True)]
    assert max(worst) < TOLERANCE, dict(zip(specs, worst, strict=True))
    plain = SamplingSpec()
    cut = [at for at, spec in enumerate(specs) if spec.top_p < 1 and spec.temperature > 0]
    assert min(bench.worst(answers[at], plain) for at in cut) > 20 * TOLERANCE


async def test_answers_over_swaps_have_every_token_under_its_own_version(bench: Bench) -> None:
    """Half of them streamed. The tied head must be updated too: with its old packed copy,
    log-probs are off by more than 1."""
    is_over = asyncio.Event()
    answers: list[tuple[Completion, SamplingSpec, list[TokenChunk] | None]] = []

    async def session(number: int) -> None:
        for seed in itertools.count(1000 * number):
            spec = SamplingSpec(max_tokens=300, seed=seed)
            heard: list[TokenChunk] | None = [] if number % 2 else None
            answers.append((await bench.ask(spec, heard), spec, heard))
            if is_over.is_set():
                return

    paused_s: list[float] = []
    async with asyncio.TaskGroup() as sessions:
        for number in range(NUM_SESSIONS):
            sessions.create_task(session(number))
        for _ in range(NUM_SWAPS):
            await asyncio.sleep(0.2)
            await bench.swap()
            paused_s.append(bench.engine.paused_s)
        is_over.set()
    worst = max(bench.worst(answer, spec) for answer, spec, _ in answers)
    print(
        f"{NUM_SWAPS} swaps, {len(answers)} answers of {NUM_SESSIONS} sessions, worst {worst:.1e}, "
        f"paused {sorted(paused_s)[NUM_SWAPS // 2]:.3f} s (median), {max(paused_s):.3f} s at most"
    )
    assert worst < TOLERANCE
    assert max(len(answer.spans) for answer, _, _ in answers) >= 3
    assert max(bench.worst(answer, spec, 0) for answer, spec, _ in answers) > 0.5
    for answer, _, pieces in answers:
        true = [span.number for span in answer.spans for _ in range(span.start, span.end)]
        told = [(chunk.version.number, i) for chunk in pieces or () for i in chunk.sampled_ids]
        right = list(zip(true, view_ids(answer.sampled_ids), strict=True))
        assert told == right or pieces is None


async def test_a_prefix_cached_by_old_weights_is_not_used_by_new_ones(bench: Bench) -> None:
    spec = SamplingSpec(temperature=0.0, max_tokens=8)
    for _ in range(3):
        first, again = await bench.ask(spec), await bench.ask(spec)
        assert max(bench.worst(first, spec), bench.worst(again, spec)) < TOLERANCE
        await bench.swap()


async def test_patches_and_full_files_in_turn_agree_with_the_trainer(bench: Bench) -> None:
    """A patch on loaded files, full files on a patch, a patch on those; then one with wrong bits,
    which costs a full load."""
    chain = [bench.folders[bench.number % 2]]
    spec = SamplingSpec(max_tokens=24, seed=5)
    for number, kind in enumerate(("patch", "full", "patch", "wrong")):
        chain.append(_change_a_little(chain[-1], bench.root / "versions" / f"next-{number}"))
        if kind != "full":
            patch = patch_between(chain[-2], chain[-1], bench.root / "scratch")
            if kind == "wrong":
                _spoil(patch)
                assert bench.engine.full_model is not None
                bench.engine.full_model.num_patches = FULL_CHECK_EVERY - 1  # all are verified
        bench.number += 1
        await bench.engine.load(chain[-1], version(bench.number))
        assert bench.engine.full_model is not None
        assert (bench.engine.full_model.num_patches > 0) == (kind == "patch")
        answer = await bench.ask(spec)
        right = expected(chain[-1], tuple(view_ids(answer.sampled_ids)), spec)
        recorded = view_log_probs(answer.logprobs)
        assert max(abs(a - b) for a, b in zip(recorded, right, strict=True)) < TOLERANCE, kind
    await bench.swap()


def _change_a_little(base: Path, folder: Path) -> Path:
    """One element in a hundred of each tensor."""
    files: Any = importlib.import_module("safetensors.torch")
    shutil.copytree(base, folder)
    tensors = files.load_file(base / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[::100] += 0.1
    (folder / "model.safetensors").unlink()
    files.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _spoil(patch: Path) -> None:
    """Change the new value of an element that is written in place."""
    at = layout_of(patch).byte_ranges[VALUES + "model.norm.weight"].start
    data = bytearray(patch.read_bytes())
    data[at] ^= 1
    patch.write_bytes(data)


async def test_no_port_of_the_server_is_open_to_an_agent(bench: Bench) -> None:
    """Its HTTP routes are on a private unix socket; the ports of its workers are in a network
    namespace of their own."""
    assert bench.engine.url is not None and bench.engine.url.startswith("unix:")
    assert bench.server.group is not None
    leader = psutil.Process(bench.server.group)
    ours = os.readlink("/proc/self/ns/net")
    open_ports = [
        (process.name(), found.laddr)
        for process in leader.children(recursive=True)
        if os.readlink(f"/proc/{process.pid}/ns/net") == ours
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    ]
    assert open_ports == []


async def test_part_of_a_fused_layer_is_refused_and_nothing_changes(bench: Bench) -> None:
    safetensors: Any = importlib.import_module("safetensors.torch")
    url = bench.engine.url
    assert url is not None
    control = Control(HttpClient(url))
    tensors = safetensors.load_file(bench.folders[0] / "model.safetensors")
    for name, names in {
        "half": ["model.layers.0.self_attn.q_proj.weight"],
        "gate": ["model.layers.1.mlp.gate_proj.weight"],
    }.items():
        folder = bench.root / "versions" / name
        folder.mkdir()
        safetensors.save_file({part: tensors[part] for part in names}, folder / "model.safetensors")
        for call in (control.check, control.load):
            with pytest.raises(EngineError, match="vLLM fuses them"):
                await call(folder)
    with pytest.raises(EngineError, match="not inside"):
        await control.check(bench.root)
    spec = SamplingSpec(max_tokens=16, seed=1)
    assert bench.worst(await bench.ask(spec), spec) < TOLERANCE


async def test_prompts_that_are_read_in_parts_kill_nobody(bench: Bench) -> None:
    """Ten prompts of 40 tokens share a step of 96."""
    specs = [SamplingSpec(max_tokens=8, seed=seed) for seed in range(10)]
    answers = await asyncio.gather(*map(bench.ask, specs))
    for answer, spec in zip(answers, specs, strict=True):
        assert bench.worst(answer, spec) < TOLERANCE
    assert len({answer.sampled_ids for answer in answers}) > 5


async def test_processes_that_wait_for_each_other_sleep(bench: Bench) -> None:
    """Without the patch, each process uses a full core for a second after every answer."""
    group = psutil.Process(bench.server.group)

    def spent_s() -> float:
        times = [process.cpu_times() for process in (group, *group.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    await bench.ask(SamplingSpec(max_tokens=2))
    began_at, before_s = time.monotonic(), spent_s()
    await asyncio.sleep(0.5)
    assert spent_s() - before_s < 0.5 * (time.monotonic() - began_at)


async def test_a_stop_string_ends_the_answer_and_its_tokens_stay(bench: Bench) -> None:
    spec = SamplingSpec(max_tokens=40, seed=11)
    free = list(view_ids((await bench.ask(spec)).sampled_ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bench.folders[0] / "tokenizer.json"))
    at = next(at for at in range(10, 40) if tokenizer.decode(free[at : at + 1]).isascii())
    stop = tokenizer.decode(free[at : at + 1])
    end = next(n for n in range(40) if stop in tokenizer.decode(free[: n + 1])) + 1
    answer = await bench.ask(SamplingSpec(max_tokens=40, seed=11, stop=(stop,)))
    assert list(view_ids(answer.sampled_ids)) == free[:end]
    assert answer.finish.value == "stop"


async def test_answers_under_a_json_schema_are_valid(bench: Bench) -> None:
    from tokenizers import Tokenizer

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["left", "right"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    tokenizer = Tokenizer.from_file(str(bench.folders[0] / "tokenizer.json"))
    specs = [
        SamplingSpec(max_tokens=200, seed=seed, json_schema=json.dumps(schema))
        for seed in range(NUM_SCHEMAS)
    ]
    answers = await asyncio.gather(*map(bench.ask, specs))
    texts = [tokenizer.decode(list(view_ids(answer.sampled_ids))) for answer in answers]
    for text in texts:
        validate(json.loads(text), schema)
    assert len(set(texts)) > 1


async def test_a_killed_server_comes_back_by_itself(bench: Bench) -> None:
    spec = SamplingSpec(max_tokens=400, seed=5)
    for at in range(NUM_KILLS):
        running = [asyncio.create_task(bench.ask(spec)) for _ in range(4)]
        await asyncio.sleep(0.5)
        victims = _processes(bench.server.group)
        began = time.monotonic()
        os.kill(victims[-1 if at % 2 == 0 else 0], signal.SIGKILL)  # a worker, the server
        for ending in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ending, EngineError), ending
        failed_s = time.monotonic() - began
        while bench.engine.live is None or set(_processes(bench.server.group)) & set(victims):
            assert time.monotonic() - began < START_S
            await asyncio.sleep(0.2)
        print(f"kill {at}: errors after {failed_s:.2f} s, back in {time.monotonic() - began:.1f} s")
        assert bench.engine.live == version(bench.number)
        answer = await bench.ask(spec)
        assert bench.worst(answer, spec) < TOLERANCE
        await bench.swap()
        assert bench.worst(await bench.ask(spec), spec) < TOLERANCE


def _processes(group: int | None) -> list[int]:
    """Processes of the group in start order: the server, its engine core, and so on, without the
    guardian. Pids do not give the order, because the system reuses them."""
    found: list[tuple[int, int]] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[2]) == group and int(path.parent.name) != group:
            found.append((int(words[STARTED_AT]), int(path.parent.name)))
    return [pid for _, pid in sorted(found)]
