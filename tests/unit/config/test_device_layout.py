# SPDX-License-Identifier: Apache-2.0
"""Devices by process: dealt in order, and refused with the figure where they do not suffice."""

from __future__ import annotations

import pytest

from penstock.config import HostConfig, RunConfig, demo_config
from penstock.config.device_layout import DeviceLayout, lay_out
from penstock.config.hosts import Place, expand, expanded
from penstock.errors import ConfigError

EIGHT = "hosts={gpu0: {devices: 8, memory_gb: 80}}"
FOUR_RANKS = "training.parallel.dp=4"
VLLM = "models.policy={init: builtin:tiny-qwen3, engine: vllm, replicas: %d, engines: %d, vllm: %s}"


def vllm(section: str = "{}", *, replicas: int = 1, engines: int = 1) -> str:
    return VLLM % (replicas, engines, section)


def layout(*overrides: str, host: str | None = "gpu0", num_devices: int = 0) -> DeviceLayout:
    return lay_out(demo_config(0, overrides), host=host, num_devices=num_devices)


def ranks(found: DeviceLayout, policy: str = "policy") -> list[str]:
    return [str(place) for place in found.ranks[policy]]


def refusal(*overrides: str, host: str | None = "gpu0", num_devices: int = 0) -> tuple[str, str]:
    [problem] = layout(*overrides, host=host, num_devices=num_devices).problems
    return problem.key, problem.text


@pytest.mark.parametrize("other", ["tp", "cp", "replicas"])
def test_experts_are_spread_over_ranks_of_data_parallelism_alone(other: str) -> None:
    text = f"ep 2 with {other} 2 is not supported: tokens travel between .* set {other}: 1"
    with pytest.raises(ConfigError, match=text):
        demo_config(0, (f"training.parallel={{dp: 4, ep: 2, {other}: 2}}",))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu0", ["gpu0"]),
        ("gpu[0-2]", ["gpu0", "gpu1", "gpu2"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("r[1,3-4]x", ["r1x", "r3x", "r4x"]),
    ],
)
def test_a_range_means_what_it_means_to_slurm(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["gpu[", "gpu[a]", "gpu[1-]", "a[0-1]b[0-1]", "gpu[0-9999]"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        expand(text)


def test_every_host_of_a_range_has_its_own_address() -> None:
    hosts = {
        "g[0-1]": HostConfig(memory_gb=1, address="10.0.0.[8-9]"),
        "cpu": HostConfig(memory_gb=1),
    }
    found = expanded(hosts)
    assert {name: host.address for name, host in found.items()} == {
        "g0": "10.0.0.8",
        "g1": "10.0.0.9",
        "cpu": "cpu",
    }


# --- dealing --------------------------------------------------------------------------------------


def test_named_devices_are_dealt_in_order_one_slice_per_engine() -> None:
    found = layout(
        EIGHT,
        FOUR_RANKS,
        "training.devices=[3, 2, 1, 0]",
        vllm("{devices: [4, 5, 6, 7], tensor_parallel: 2}", replicas=2),
    )
    assert not found.problems
    assert ranks(found) == ["gpu0:3", "gpu0:2", "gpu0:1", "gpu0:0"]
    assert found.engines == {"node-0": (4, 5), "node-1": (6, 7)}


def test_processes_without_names_take_what_is_free() -> None:
    found = layout(EIGHT, "training.parallel.dp=2", vllm("{tensor_parallel: 2}", engines=3))
    assert not found.problems
    assert ranks(found) == ["gpu0:0", "gpu0:1"]
    assert found.engines == {"node-0": (2, 3, 4, 5, 6, 7)}
    behind = layout(EIGHT, "training.parallel.dp=2", vllm("{devices: [0, 1]}", engines=2))
    assert ranks(behind) == ["gpu0:2", "gpu0:3"], "named ones go first"


def test_a_file_without_hosts_has_the_devices_of_this_machine() -> None:
    assert layout(host=None) == DeviceLayout(ranks={}, engines={}, engine_shares={}, problems=())
    found = layout(vllm(), host=None, num_devices=2)
    assert ranks(found) == ["this machine:0"] and found.engines == {"node-0": (1,)}
    assert not layout(host=None, num_devices=1).engines, "hf computes on the CPU"


def test_ranks_fill_one_host_after_another() -> None:
    found = layout(
        "hosts={'gpu[0-3]': {devices: 8, memory_gb: 80}, head: {memory_gb: 8, tags: [head]}}",
        "training.parallel={dp: 4, tp: 4}",
        "training.hosts=['gpu[1-2]']",
        "training.external=true",
        "models.policy.replicas=0",
    )
    assert not found.problems
    assert found.ranks["policy"] == tuple(Place(f"gpu{h}", d) for h in (1, 2) for d in range(8))
    by_tag = layout(
        "hosts={a: {devices: 1, memory_gb: 8, tags: [x]}, b: {devices: 1, memory_gb: 8}}"
    )
    assert ranks(by_tag) == ["b:0"]


def test_adapters_of_one_model_share_engines_and_devices() -> None:
    one = "{init: builtin:tiny-qwen3, lora: {rank: 4}, engine: vllm, replicas: %d, engines: 2}"
    found = layout(EIGHT, f"models={{a: {one % 1}, b: {one % 0}}}")
    assert not found.problems and found.engines == {"a-node-0": (2, 3)}


def test_nodes_of_evaluations_have_devices_too() -> None:
    suite = (
        "{name: s, task: penstock.tasks.reverse, reward: 'penstock.tasks.reverse:reward', limit: 4}"
    )
    found = layout(
        EIGHT, vllm("{tensor_parallel: 2}"), f"eval={{every: 10, nodes: 1, suites: [{suite}]}}"
    )
    assert not found.problems
    assert found.engines == {"node-0": (1, 2), "eval-node-0": (3, 4)}


def test_engines_share_the_memory_of_a_trainers_device_by_plan() -> None:
    found = layout(
        EIGHT,
        "training.parallel.dp=2",
        "training.devices=[0, 1]",
        vllm("{devices: [0, 1], memory_share: 0.4}", engines=2),
    )
    assert not found.problems and found.engine_shares == {0: 0.4, 1: 0.4}


# --- refusals -------------------------------------------------------------------------------------


def test_too_few_and_too_many_devices_are_refused() -> None:
    key, text = refusal(EIGHT, FOUR_RANKS, "training.devices=[0, 1]")
    assert key == "training.devices"
    assert "needs 4 devices (4 ranks, one device each), and 2 are named: 2 short" in text
    key, text = refusal(EIGHT, vllm("{devices: [1, 2, 3], tensor_parallel: 2}"))
    assert key == "models.policy.vllm.devices"
    assert "(1 engine × tensor_parallel 2), and 3 are named: 1 would be idle" in text
    _, text = refusal(EIGHT, FOUR_RANKS, vllm("{tensor_parallel: 8}"))
    assert "and 4 of the 8 of gpu0 are free: 4 short; lower engines or replicas" in text


def test_devices_that_do_not_exist_or_come_twice_are_refused() -> None:
    _, text = refusal(EIGHT, "training.devices=[8]")
    assert "device 8 of gpu0 does not exist: it has 8 devices, counted from 0" in text
    _, text = refusal(EIGHT, "training.parallel.dp=2", "training.devices=[1, 1]")
    assert "device 1 of gpu0 is named twice" in text
    _, text = refusal("training.devices=[0]", host=None)
    assert "device 0 of this machine does not exist: it has 0 devices" in text
    hosts = "hosts={'gpu[0-1]': {devices: 8, memory_gb: 80}}"
    _, text = refusal(hosts, vllm("{devices: [0]}"), host=None)
    assert "this machine is not one of hosts" in text and "replicas: 0" in text


def test_double_use_is_refused_unless_memory_is_shared() -> None:
    both = (EIGHT, "training.devices=[0]")
    _, text = refusal(*both, vllm("{devices: [0]}"))
    assert "the trainer of policy and the engines of policy both use device 0 of gpu0" in text
    assert "models.policy.vllm.memory_share: 0.4" in text
    two = "{init: builtin:tiny-qwen3, engine: hf}"
    _, text = refusal(*both, f"models={{a: {two}, b: {two}}}")
    assert "the trainer of a and the trainer of b both use device 0" in text
    assert "give each policy its own training.devices" in text


def test_shares_of_one_device_stay_below_its_memory() -> None:
    model = "{init: builtin:tiny-qwen3, engine: vllm, replicas: %d, vllm: %s}"
    share = "{devices: [1], memory_share: 0.6}"
    models = f"models={{a: {model % (1, share)}, b: {model % (0, share)}}}"
    _, text = refusal(EIGHT, models)
    assert "with shares of 1.2 of its memory; lower memory_share to a sum below 1" in text


def test_servers_of_the_user_need_no_devices() -> None:
    urls = ["http://h:1", "http://h:2"]
    config = demo_config(0, [vllm(f"{{url: {urls}}}").replace("engines: 1, ", "")])
    assert config.models["policy"].engines == 2, "one for each server"
    assert not lay_out(config, host=None, num_devices=1).engines
    assert RunConfig.model_validate(config.model_dump()) == config
