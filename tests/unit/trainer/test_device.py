# SPDX-License-Identifier: Apache-2.0
"""Which device a rank trains on. There is no GPU here: what is chosen is seen, not what it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.doubles import POLICY, settings
from transformers import PreTrainedModel

from penstock.config.stages import ParallelConfig
from penstock.errors import ConfigError
from penstock.trainer import service
from penstock.trainer.device import CPU, select_device
from penstock.trainer.ranks.group import Ranks, SingleRank
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.ranks.supervisor import RankEnv


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As if the host had two; which ones were made a process's own."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def test_without_a_gpu_it_is_the_processor() -> None:
    assert select_device(3) == CPU


def test_each_rank_of_a_host_has_a_gpu_of_its_own(two_gpus: list[torch.device]) -> None:
    assert [select_device(rank) for rank in (0, 1)] == two_gpus
    assert two_gpus == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ConfigError, match="rank 2 of this host has no GPU"):
        select_device(2)


def test_a_model_of_one_rank_goes_to_its_device(new_model: Callable[[], PreTrainedModel]) -> None:
    model = new_model()
    there = shard(model, model, SingleRank(), torch.device("meta"))
    assert {parameter.device.type for parameter in there.parameters()} == {"meta"}


def test_ranks_with_gpus_meet_and_spread_over_them(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Watch:
        def close(self) -> None:
            pass

    def init_process_group(rank_env: RankEnv, *, device: str, **rest: object) -> Watch:
        asked.append(device)
        return Watch()

    def make_ranks(parallels: list[ParallelConfig], *, device: str) -> Ranks:
        asked.append(device)
        return SingleRank()

    monkeypatch.setattr(service, "init_process_group", init_process_group)
    monkeypatch.setattr(service, "make_ranks", make_ranks)
    rank_env = RankEnv(rank=1, num_ranks=2, local_rank=1, host="", port=0)
    device = torch.device("cuda", 1)
    with service.joined_ranks(settings(model_folder, "grpo"), POLICY, rank_env, device):
        pass
    assert asked == ["cuda", "cuda"]
