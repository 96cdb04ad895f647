# SPDX-License-Identifier: Apache-2.0
"""Adapters on a vLLM engine, against a fake server: names, uses, recovery, rejections.

Tests that need a real vLLM are in test_vllm_lora.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.contract.dataflow_server import serving
from tests.contract.fake_vllm_server import VOCAB, VllmDouble, token, weights_of
from tests.contract.test_engines_vllm import until

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines.vllm import ChildServer, RemoteServer, VllmEngine
from penstock.types import PolicyName, SamplingSpec, Version, view_ids

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
PROMPT = [1, 2, 3]


def version(number: int, policy: PolicyName = SOLVER) -> Version:
    return Version(policy=policy, incarnation=1, number=number)


def write_tensors(path: Path, shapes: dict[str, list[int]], content: int) -> None:
    header: dict[str, Any] = {}
    size = 0
    for name, shape in shapes.items():
        end = size + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    body = struct.pack("<i", content) * (size // 4)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_base(folder: Path, content: int) -> Path:
    folder.mkdir(parents=True)
    config = {"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", {"layer.q_proj.weight": [3, 2]}, content)
    return folder


def write_version(base: Path, folder: Path, content: int, rank: int = 1) -> Path:
    folder.mkdir(parents=True)
    for path in base.iterdir():
        os.link(path, folder / path.name)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = [f"base_model.model.layer.q_proj.lora_{letter}.weight" for letter in "AB"]
    shapes = {names[0]: [rank, 2], names[1]: [3, rank]}
    write_tensors(folder / "adapter_model.safetensors", shapes, content)
    return folder


class Site:
    """A fake server, new at each start, and engines of two policies on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = write_base(root / "base", 100)
        self.folders = [write_version(self.base, root / "versions" / str(n), n) for n in range(5)]
        self.doubles: list[VllmDouble] = []
        self.answers: dict[str, tuple[int, str]] = {}
        """Faults of the next fake servers."""
        self.is_running = False
        self._stack = AsyncExitStack()
        self.solver = VllmEngine(self)
        self.judge = self.solver.share()

    @property
    def double(self) -> VllmDouble:
        return self.doubles[-1]

    async def start(self, folder: Path) -> tuple[str, bool]:
        self.doubles.append(VllmDouble(self.base, root=self.root))
        self.double.answers |= self.answers
        self.is_running = True
        return self._stack.enter_context(serving(self.double.app())), True

    async def stop(self) -> None:
        self.is_running = False

    async def close(self) -> None:
        await self.judge.close()
        await self.solver.close()
        await self._stack.aclose()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    await site.close()


async def ask(
    engine: VllmEngine,
    policy: PolicyName = SOLVER,
    num_tokens: int = 5,
    heard: list[TokenChunk] | None = None,
) -> Completion:
    on_chunk = None if heard is None else heard.append
    spec = SamplingSpec(max_tokens=num_tokens)
    return await engine(
        GenerationRequest(PROMPT, spec, policy=policy, session="s", on_chunk=on_chunk)
    )


def check(answer: Completion, folder: Path, number: int) -> None:
    """Check that all tokens come from this folder's adapter, under this version."""
    ids = list(view_ids(answer.sampled_ids))
    assert ids == [token(weights_of(folder), PROMPT, at) for at in range(len(ids))]
    assert [(span.start, span.end, span.number) for span in answer.spans] == [(0, len(ids), number)]


async def test_two_policies_on_one_server_have_versions_of_their_own(site: Site) -> None:
    assert site.solver.live is None and site.judge.live is None
    loads = (
        site.solver.load(site.folders[0], version(0)),
        site.judge.load(site.folders[3], version(7, JUDGE)),
    )
    await asyncio.gather(*loads)
    assert len(site.doubles) == 1, "one process"
    assert (site.solver.live, site.judge.live) == (version(0), version(7, JUDGE))
    solved, judged = await asyncio.gather(ask(site.solver), ask(site.judge, JUDGE))
    check(solved, site.folders[0], 0)
    check(judged, site.folders[3], 7)
    await site.solver.load(site.folders[1], version(1))
    check(await ask(site.solver), site.folders[1], 1)
    check(await ask(site.judge, JUDGE), site.folders[3], 7)
    with pytest.raises(RequestRejected, match="serves 'judge', not 'solver'"):
        await ask(site.judge, SOLVER)
    assert "pause" not in site.double.log and "load" not in site.double.log


async def test_an_answer_keeps_its_adapter_which_goes_with_the_last_answer(site: Site) -> None:
    await site.solver.load(site.folders[0], version(0))
    await site.judge.load(site.folders[3], version(7, JUDGE))
    heard: list[TokenChunk] = []
    site.double.token_s = 0.005
    running = asyncio.create_task(ask(site.solver, num_tokens=60, heard=heard))
    judged = asyncio.create_task(ask(site.judge, JUDGE, num_tokens=60))
    await until(lambda: len(heard) > 2)
    for number in (1, 2):
        await site.solver.load(site.folders[number], version(number))
    assert not running.done() and len(site.double.adapters) == 3, "0 is used, 1 by nobody"
    check(await ask(site.solver), site.folders[2], 2)
    check(await running, site.folders[0], 0)
    check(await judged, site.folders[3], 7)
    assert {chunk.version for chunk in heard} == {version(0)}
    await until(lambda: len(site.double.adapters) == 2)
    assert site.double.num_lost_adapters == 0


async def test_a_server_that_died_comes_back_with_all_adapters(site: Site) -> None:
    await site.solver.load(site.folders[0], version(0))
    await site.judge.load(site.folders[3], version(7, JUDGE))
    site.double.token_s = 0.1  # the answer outlasts the second until the engine looks
    running = asyncio.create_task(ask(site.judge, JUDGE, num_tokens=400))
    await asyncio.sleep(0.05)
    site.is_running = False
    assert site.solver.live is None and site.judge.live is None
    with pytest.raises(EngineError, match="connection to vLLM lost"):
        await running
    await until(lambda: site.solver.live == version(0) and site.judge.live == version(7, JUDGE))
    assert len(site.doubles) == 2
    check(await ask(site.solver), site.folders[0], 0)
    check(await ask(site.judge, JUDGE), site.folders[3], 7)


async def test_what_does_not_fit_is_refused_and_the_old_version_serves(site: Site) -> None:
    await site.solver.load(site.folders[0], version(0))
    stranger = write_base(site.root / "stranger", 101)
    refusals = {
        "different base model": write_version(stranger, site.root / "versions" / "other", 9),
        "rank 2 for 1 layers": write_version(site.base, site.root / "versions" / "rank", 9, rank=2),
        "policies share this vLLM": site.base,
    }
    for says, folder in refusals.items():
        with pytest.raises(EngineError, match=says):
            await site.solver.load(folder, version(1))
    with pytest.raises(EngineError, match="different base model"):
        await site.judge.load(refusals["different base model"], version(0, JUDGE))
    site.double.answers["/v1/load_lora_adapter"] = (500, "LoRA rank 64 is greater than 16")
    with pytest.raises(EngineError, match="LoRA rank 64"):
        await site.solver.load(site.folders[1], version(1))
    assert (site.solver.live, site.judge.live) == (version(0), None)
    check(await ask(site.solver), site.folders[0], 0)


async def test_a_server_knows_its_base_also_when_no_adapter_came_on_it(site: Site) -> None:
    stranger = write_base(site.root / "stranger", 101)
    other = write_version(stranger, site.root / "versions" / "other", 9)
    site.answers["/v1/load_lora_adapter"] = (500, "LoRA rank 64 is greater than 16")
    with pytest.raises(EngineError, match="LoRA rank 64"):
        await site.solver.load(site.folders[0], version(0))
    site.double.answers.clear()
    with pytest.raises(EngineError, match="different base model"):
        await site.judge.load(other, version(0, JUDGE))
    assert (site.solver.live, site.judge.live) == (None, None)
    await site.solver.load(site.folders[0], version(0))
    check(await ask(site.solver), site.folders[0], 0)
    assert len(site.doubles) == 1


async def test_adapters_with_answers_under_way_fill_the_server(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.rollout.engines.vllm import adapters

    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    await site.solver.load(site.folders[0], version(0))
    heard: list[TokenChunk] = []
    running = asyncio.create_task(ask(site.solver, num_tokens=300, heard=heard))
    await until(lambda: bool(heard))
    await site.solver.load(site.folders[1], version(1))
    with pytest.raises(EngineError, match="the load is retried"):
        await site.solver.load(site.folders[2], version(2))
    assert site.solver.live == version(1)
    await running
    await site.solver.load(site.folders[2], version(2))
    check(await ask(site.solver), site.folders[2], 2)


async def test_one_policy_that_leaves_takes_its_adapter_only(site: Site) -> None:
    await site.solver.load(site.folders[0], version(0))
    await site.judge.load(site.folders[3], version(7, JUDGE))
    await site.judge.close()
    assert site.judge.live is None
    await until(lambda: len(site.double.adapters) == 1)
    check(await ask(site.solver), site.folders[0], 0)


async def test_a_whole_model_and_an_adapter_do_not_follow_each_other(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.judge.close()
    await site.solver.load(site.base, version(0))
    with pytest.raises(EngineError, match="has an adapter, unlike"):
        await site.solver.load(site.folders[0], version(1))
    assert site.solver.live == version(0)
    await site.close()


async def test_a_server_of_somebody_else_gets_no_adapters(site: Site) -> None:
    with serving(VllmDouble(site.base, root=site.root).app()) as url:
        engine = VllmEngine(RemoteServer(url, start_s=60))
        with pytest.raises(EngineError, match=r"remove models\.NAME\.vllm\.url"):
            await engine.load(site.folders[0], version(0))
        assert engine.live is None
        await engine.close()


PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[2])
said = dict(words=sys.argv[1:], files=sorted(path.name for path in folder.iterdir()))
said["may_load"] = os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
Path({said!r}).write_text(json.dumps(said))
sys.exit(1)
"""


async def test_a_child_is_started_on_the_base_with_room_for_adapters(
    site: Site, tmp_path: Path
) -> None:
    """vLLM would read the adapter's file as part of the model."""
    program = tmp_path / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    said = tmp_path / "said.json"
    program.write_text(PROGRAM.format(python=sys.executable, said=str(said)))
    program.chmod(0o755)
    options = ["--dtype", "float32"]
    engine = VllmEngine(
        ChildServer(program.parent.parent, options, num_policies=3, adapter_rank=20)
    )
    with pytest.raises(EngineError, match="exited during startup"):
        await engine.load(site.folders[0], version(0))
    await engine.close()
    heard = json.loads(said.read_text())
    assert heard["files"] == ["config.json", "model.safetensors"]
    assert heard["may_load"] == "1"
    words = " ".join(heard["words"])
    assert "--enable-lora --max-lora-rank 32 --max-loras 6 --max-cpu-loras 16" in words
    assert "--dtype float32 --uds /" in words, "the user's words win, except for the socket"
