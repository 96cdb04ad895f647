# SPDX-License-Identifier: Apache-2.0
"""The config examples of the docs on machines with faked GPUs: `check` accepts them, and stub
engines record the devices that they were dealt."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pytest
from tests.contract.fake_vllm_server import write_environment
from tests.contract.test_engines_vllm import version, write_folder
from tests.e2e.document_blocks import ROOT, blocks_of
from tests.fake_gpus import fake_gpus

from penstock.cli.plan import plan
from penstock.config import RunConfig
from penstock.config.loader import parse
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.devices import visible_devices
from penstock.errors import ConfigError
from penstock.fleet.device_plan import deal_devices, this_host
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import local_services
from penstock.rollout.engine import Engine
from penstock.rollout.engine_seats import EngineSeat
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.node import NodeDeps, NodeOptions, connect
from penstock.rollout.weight_loader import WeightFetcher
from penstock.runs.device_check import device_notes
from penstock.runs.join import local_node_options
from penstock.runs.preflight import find_problems
from penstock.runs.target import read_target
from penstock.types import NodeId, PolicyName
from penstock.wire.auth import Signer

PAGE = ROOT / "docs" / "how-to" / "large-models.md"
POLICY = PolicyName("policy")
NUM_PARAMETERS = {"eight-devices.yaml": 8_190_735_360, "eight-hosts.yaml": 32_762_123_264}
"""Of Qwen3 8B and 32B."""


class Example:
    """One example in a folder, with a model of its size that has no bytes."""

    def __init__(self, name: str, folder: Path) -> None:
        text = next(block.text for block in blocks_of(PAGE) if block.file == name)
        self.model = write_model(folder / "model", NUM_PARAMETERS[name])
        self.pids = folder / "pids"
        environment = write_environment(folder / "vllm", self.pids)
        self.file = folder / name
        self.file.write_text(text)
        self.overrides = (
            f"models.policy.init={self.model}",
            f"models.policy.vllm.environment={environment}",
            "models.policy.vllm.options=[--dtype, float32]",
        )
        self.config = parse(text, origin=name, overrides=self.overrides)
        self.folder = RunFolder(folder / "run")

    def problems(self) -> list[str]:
        """What `check` says about this machine, apart from the size of the disk under the tests."""
        target = read_target(self.file, self.overrides)
        return [str(one) for one in find_problems(target) if one.key != "output_dir"]

    def seen(self) -> list[dict[str, Any]]:
        """What each stub engine recorded."""
        return [json.loads(path.read_text()) for path in self.pids.parent.glob("pids.*.json")]


def write_model(folder: Path, num_parameters: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"vocab_size": 16, "max_position_embeddings": 40960, "dtype": "bfloat16"}'
    )
    entry = {"dtype": "BF16", "shape": [num_parameters], "data_offsets": [0, 2 * num_parameters]}
    header = json.dumps({"w": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def environments(config: RunConfig, folder: RunFolder) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of every service that the launcher would start."""
    Signer.create(folder.keys, config.name)
    services = local_services(config, folder, deal_devices(config, len(visible_devices())))
    return {one.name: one.build_env()["CUDA_VISIBLE_DEVICES"] for one in services}


@asynccontextmanager
async def node(**options: Unpack[NodeOptions]) -> AsyncGenerator[NodeDeps]:
    """A node that calls nobody: it only builds its engines."""

    def fetch(info: RunInfo) -> WeightFetcher:
        raise AssertionError("weights come from the test")

    async with connect("http://127.0.0.1:1", "t", fetch, node_id=NodeId("n"), **options) as deps:
        yield deps


async def seats_of(deps: NodeDeps, config: RunConfig) -> list[EngineSeat]:
    seats: list[EngineSeat] = []

    def make(info: RunInfo, policy: PolicyName, seat: EngineSeat) -> Engine:
        seats.append(seat)
        return ScriptedEngine()

    await replace(deps, make_engine=make).engines(run_info(config)).close()
    return seats


async def start_engines(config: RunConfig, folder: Path, options: NodeOptions) -> None:
    async with node(**options) as deps:
        engines = deps.engines(run_info(config))
        try:
            await engines.load(folder, version(0))
        finally:
            await engines.close()


def devices(seats: Sequence[EngineSeat]) -> list[str]:
    return [",".join(seat.devices) for seat in seats]


def test_an_8b_on_one_host_of_eight_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin")
    example = Example("eight-devices.yaml", tmp_path)
    config = example.config
    assert example.problems() == []
    assert [*device_notes(config, 8)] == []
    dealt = environments(config, example.folder)
    assert dealt.pop("trainer-policy") == "0,1,2,3"
    assert dealt.pop("node-0") == "4,5,6,7"
    assert set(dealt.values()) == {""}, "the others use none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    options = local_node_options(example.folder, config, "policy", "node-0")
    first = write_folder(tmp_path / "versions" / "0", 0)
    asyncio.run(start_engines(config, first, options))
    seen = example.seen()
    assert sorted(one["devices"] for one in seen) == ["4,5", "6,7"]
    for one in seen:
        words = one["words"]
        assert words[words.index("--tensor-parallel-size") + 1] == "2"
        assert "--enable-prefix-caching" in words and "--enforce-eager" not in words


def test_a_32b_on_eight_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin")
    example = Example("eight-hosts.yaml", tmp_path)
    config = example.config
    assert this_host(config.all_hosts) is None
    for own in ("gpu0.cluster.example", "gpu5"):
        monkeypatch.setattr(socket, "gethostname", lambda own=own: own)
        assert this_host(config.all_hosts) == own.partition(".")[0]
        assert example.problems() == []
    [note] = device_notes(config, 8)
    assert "of policy on gpu0, gpu1" in note and "file system that these hosts share" in note
    assert deal_devices(config, 8) == {}, "its trainer is started on each host"

    async def join() -> None:
        async with node(state_dir=tmp_path) as deps:
            assert devices(await seats_of(deps, config)) == ["0,1,2,3", "4,5,6,7"]
            with pytest.raises(ConfigError, match="need 16 GPUs, and it sees 8: 8 short"):
                await seats_of(replace(deps, num_engines=4), config)

    asyncio.run(join())


def test_a_machine_with_fewer_devices_than_the_file_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin", free_mb=(81_559,) * 4)
    [found] = Example("eight-devices.yaml", tmp_path).problems()
    assert "gpu0 has 8 devices, and this machine has 4 GPUs" in found and "4 short" in found


def test_memory_that_is_short_on_a_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin", free_mb=(8_000,) * 8)
    trainer, engine = Example("eight-devices.yaml", tmp_path).problems()
    assert "and a GPU here has 8.39 GB" in trainer
    assert "needs 8.19 GB on each device for weights alone" in engine and "7.55 GB" in engine


def test_the_job_of_a_scheduler_counts_its_own_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin", visible="7,6,5,4,3,2,1,0")
    dealt = environments(Example("eight-devices.yaml", tmp_path).config, RunFolder(tmp_path / "r"))
    assert (dealt["trainer-policy"], dealt["node-0"]) == ("7,6,5,4", "3,2,1,0")


async def test_every_engine_has_a_server_of_the_list(tmp_path: Path) -> None:
    text = next(block.text for block in blocks_of(PAGE) if "url:" in block.text)
    base = next(block.text for block in blocks_of(PAGE) if block.file == "eight-devices.yaml")
    head, _, rest = base.partition("models:")
    _, _, tail = rest.partition("sources:")
    config = parse(
        f"{head}{text}sources:{tail}", origin="run.yaml", overrides=["training.parallel.dp=4"]
    )
    options = local_node_options(RunFolder(tmp_path), config, "policy", "node-0")
    async with node(**options) as deps:
        seats = await seats_of(deps, config)
    assert [seat.url for seat in seats] == ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]


def test_training_on_gpus_is_in_bfloat16_unless_the_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    text = next(block.text for block in blocks_of(PAGE) if block.file == "eight-devices.yaml")
    file.write_text(text.replace("  precision: bfloat16\n", ""))
    own = "models.policy.training={epochs: 2}"

    def precisions(*overrides: str) -> tuple[str, str]:
        config = read_target(file, overrides).config
        return config.training.precision, config.for_policy("policy").training.precision

    cpu = ("hosts={}", "training.devices=null", "models.policy.vllm={tensor_parallel: 2}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert precisions(*cpu) == ("float32", "float32")
    fake_gpus(monkeypatch, tmp_path / "bin")
    assert precisions() == precisions(*cpu) == ("bfloat16", "bfloat16")
    assert precisions(own)[1] == "bfloat16"
    assert precisions("training.precision=float32", own) == ("float32", "float32")
    alike = ("models.policy.engine=hf", "models.policy.vllm={}", "deterministic=true")
    assert precisions(*alike) == ("float32", "float32")


def test_the_plan_shows_the_devices_of_ranks_and_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpus(monkeypatch, tmp_path / "bin")
    example = Example("eight-devices.yaml", tmp_path)
    assert plan(example.file, *example.overrides) == 0
    text = capsys.readouterr().out
    assert "4 ranks, on gpu0:0, 1, 2, 3" in text and "node-0: 4, 5, 6, 7" in text
    assert plan(example.file, *example.overrides, json=True) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["engine_devices"] == {"node-0": [4, 5, 6, 7]}
