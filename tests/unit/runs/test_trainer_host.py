# SPDX-License-Identifier: Apache-2.0
"""The part of a trainer that one host starts."""

from __future__ import annotations

import pytest

from penstock.config import RunConfig, demo_config
from penstock.errors import ConfigError
from penstock.runs.trainer_host import ranks_here, visible_devices
from penstock.trainer.ranks.supervisor import HostRanks

LOCAL = "hosts={a: {memory_gb: 8, address: 127.0.0.1}, b: {memory_gb: 8, address: 192.0.2.1}}"
TWO = (LOCAL, "training.hosts=[a, b]", "training.external=true", "training.parallel.dp=4")


def config_of(*overrides: str) -> RunConfig:
    return demo_config(0, overrides)


def test_a_host_starts_its_own_ranks_and_all_meet_at_the_first() -> None:
    first = ranks_here(config_of(*TWO, "training.port=29501"), "policy", "a")
    assert first == HostRanks(num_ranks=4, num_local=2, first=0, address="127.0.0.1", port=29501)
    turned = config_of(*TWO, "training.hosts=[b, a]")
    second = ranks_here(turned, "policy", "a")
    assert (second.first, second.address, second.interface) == (2, "192.0.2.1", "lo")
    assert ranks_here(turned, "policy", None) == second, "by its address"


def test_a_trainer_on_one_host_needs_no_name() -> None:
    config = config_of("training.parallel.dp=2")
    assert ranks_here(config, "policy", None) == HostRanks.one_host(2)
    with pytest.raises(ConfigError, match="has one host"):
        ranks_here(config, "policy", "a")


def test_a_wrong_host_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"--host c is none of .* \(a, b\)"):
        ranks_here(config_of(*TWO), "policy", "c")
    with pytest.raises(ConfigError, match=r"no network interface .* 192\.0\.2\.1"):
        ranks_here(config_of(*TWO), "policy", "b")


def test_ranks_see_the_devices_that_the_file_names() -> None:
    gpus = LOCAL.replace("memory_gb: 8", "devices: 4, memory_gb: 8")
    named = config_of(gpus, *TWO[1:], "training.devices=[1, 3]", "models.policy.replicas=0")
    assert visible_devices(named, "policy") == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert visible_devices(config_of(*TWO), "policy") == {}
