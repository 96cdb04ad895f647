# SPDX-License-Identifier: Apache-2.0
"""The map between a model's tensors and those of its files, and what one rank reads through it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.fake_ranks import fake_process_group
from benchmarks.real_shapes import QWEN3_30B_A3B, meta_model
from safetensors.torch import load_file
from tests.unit.trainer.test_packing_check import SMALL
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter

from penstock.config.stages import ParallelConfig
from penstock.trainer.file_tensors import file_tensors
from penstock.trainer.model_folders import load_model
from penstock.trainer.ranks.group import make_rank_group
from penstock.trainer.ranks.regions import is_owner, local, region_of
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.ranks.weight_loading import load_meta_model, load_weight_slices
from penstock.trainer.snapshots import weights_of

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PEAK = """
import json, resource, sys, threading
from pathlib import Path
from benchmarks.fake_ranks import fake_process_group
from penstock.config.stages import ParallelConfig
from penstock.trainer.ranks.group import make_rank_group
from penstock.trainer.ranks.regions import local
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.ranks.weight_loading import load_meta_model, load_weight_slices

folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError

def load(rank):
    with fake_process_group(num_ranks, rank):
        ranks = make_rank_group(ParallelConfig(dp=num_ranks))
        model = load_meta_model(folder)
        assert all(parameter.is_meta for parameter in model.parameters())
        shard(model, model, ranks)
        load_weight_slices(model, model, folder, ranks)
        return sum(local(one).nbytes for one in model.parameters())

peak, is_done = 0, threading.Event()

def watch():
    global peak
    while not is_done.wait(0.001):
        peak = max(peak, anonymous())

share = load(1)  # imports and pools
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
share = load(1)
is_done.set()
watcher.join()
print(json.dumps({"share": share, "rise": max(peak, anonymous()) - before}))
"""
SLACK_BYTES = 16 << 20
"""Outlines, headers, and the one matrix that is being read."""


def small_moe(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = cast(Any, CONFIG_MAPPING["qwen3_moe"])(**{**SMALL, **MOE, **more})
    return cast(Any, AutoModelForCausalLM).from_config(config).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    small_moe().save_pretrained(path)
    return path


def test_every_tensor_of_the_files_is_found_in_the_model(folder: Path) -> None:
    model, stored = load_model(folder), load_file(folder / "model.safetensors")
    found = file_tensors(model)
    assert found is not None and found.keys() == stored.keys()
    state = model.state_dict(keep_vars=True)
    for name, one in found.items():
        part = one.part_of(state[one.source])
        assert isinstance(part, torch.Tensor) and part.equal(stored[name]), name
    assert weights_of(model).keys() == stored.keys()


def test_the_map_at_real_size_covers_every_element_once() -> None:
    model = meta_model(QWEN3_30B_A3B, 2)
    found = file_tensors(model)
    assert found is not None
    assert len([name for name in found if ".experts." in name]) == 2 * 128 * 3
    size = {name: parameter.numel() for name, parameter in model.named_parameters()}
    covered = dict.fromkeys(size, 0)
    for one in found.values():
        covered[one.source] += torch.Size(one.shape).numel()
    assert covered == size


def test_a_conversion_that_computes_has_no_map() -> None:
    """A transposed matrix is not a region of the model's, though it is square here."""
    model = small_moe()
    cast(Any, model)._weight_conversions = [
        WeightConverter(
            source_patterns="self_attn.q_proj.weight",
            target_patterns="self_attn.q_proj.weight",
            operations=[Transpose(0, 1)],
        )
    ]
    assert file_tensors(model) is None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_read_and_hold_the_regions_that_they_write(folder: Path, num_ranks: int) -> None:
    """Without the full model: what each of them reads is what is in the files, and all of them
    together write every element once."""
    stored = load_file(folder / "model.safetensors")
    written = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in stored.items()}
    for rank in range(1, num_ranks):
        with fake_process_group(num_ranks, rank):
            ranks = make_rank_group(ParallelConfig(dp=num_ranks))
            assert ranks is not None
            model = load_meta_model(folder)
            assert all(parameter.is_meta for parameter in model.parameters())
            shard(model, model, ranks)
            load_weight_slices(model, model, folder, ranks)
            state, found = model.state_dict(keep_vars=True), file_tensors(model)
            assert found is not None
            for name, one in found.items():
                part = one.part_of(state[one.source])
                if is_owner(part):
                    region = region_of(part)
                    assert region is not None
                    at = tuple(
                        slice(start, start + size)
                        for start, size in zip(region.offset, region.shape, strict=True)
                    )
                    assert local(part).equal(stored[name][at]), name
                    written[name][at] += 1
    for name, times in written.items():
        assert int(times.max()) <= 1, name
    experts = [name for name in written if ".experts.5." in name]
    assert experts and all(bool((written[name] == 1).all()) for name in experts)


@pytest.mark.slow
def test_a_rank_takes_its_share_and_a_little_more(tmp_path: Path) -> None:
    """About 200 MB of experts on 8 ranks."""
    sizes = {"num_experts": 16, "moe_intermediate_size": 256, "hidden_size": 1024}
    small_moe(**sizes, num_hidden_layers=4).save_pretrained(tmp_path)
    command = [sys.executable, "-c", PEAK, str(tmp_path), "8"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert found["share"] <= size / 8 * 1.02
    assert found["rise"] <= found["share"] + SLACK_BYTES < size / 4, found
