# SPDX-License-Identifier: Apache-2.0
"""Which host starts which ranks."""

from __future__ import annotations

import pytest

from penstock.config import RunConfig, demo_config
from penstock.config.rank_hosts import host_of_each_rank
from penstock.errors import ConfigError

TWO = ("hosts={'h[0-1]': {memory_gb: 8}}", "training.hosts=['h[0-1]']", "training.external=true")
GPUS = ("hosts={'h[0-1]': {devices: 4, memory_gb: 8}}", *TWO[1:])


def config_of(*overrides: str) -> RunConfig:
    return demo_config(0, overrides)


def test_ranks_are_dealt_host_after_host() -> None:
    found = host_of_each_rank(config_of(*TWO, "training.parallel.dp=4"), "policy")
    assert found == ("h0", "h0", "h1", "h1")
    alone = config_of(TWO[0], "training.hosts=[h1]", "training.parallel.dp=4")
    assert host_of_each_rank(alone, "policy") == ()


def test_all_devices_or_named_ones() -> None:
    config_of(*GPUS, "training.parallel.dp=8", "models.policy.replicas=0")
    named = ("training.parallel.dp=4", "training.devices=[2, 3]", "models.policy.replicas=0")
    assert host_of_each_rank(config_of(*GPUS, *named), "policy") == ("h0", "h0", "h1", "h1")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*TWO[:2], "training.parallel.dp=2"), "set external: true"),
        ((*TWO, "training.parallel.dp=3"), "1 left over"),
        ((*GPUS, "training.parallel.dp=4"), "8 devices for 4 ranks"),
    ],
)
def test_what_cannot_be_dealt_is_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(*words)
