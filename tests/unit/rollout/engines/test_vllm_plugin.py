# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM's processes, as far as it can be tested without vLLM."""

from __future__ import annotations

import sys
import time
from importlib.metadata import distributions
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.rollout.engines.vllm.server import PLUGIN_DIR

WAITING = "vllm.distributed.device_communicators.shm_broadcast"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub of the patched vLLM module; undoes the patches of torch."""
    module = ModuleType(WAITING)
    monkeypatch.setitem(sys.modules, WAITING, module)
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    monkeypatch.syspath_prepend(PLUGIN_DIR)
    return module


def apply_cpu_patches() -> None:
    """Find and call the plugin as vLLM does."""
    (found,) = distributions(path=[str(PLUGIN_DIR)])
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    plugin.load()()


def test_on_a_cpu_waiting_takes_no_processor_time(waiting: Any) -> None:
    apply_cpu_patches()
    began_at, spent_s = time.monotonic(), time.process_time()
    for _ in range(200):
        waiting.sched_yield()
    passed_s = time.monotonic() - began_at
    assert passed_s >= 0.02
    assert time.process_time() - spent_s < 0.5 * passed_s


def test_on_a_cpu_a_draw_can_be_taken_back_without_an_offset(waiting: Any) -> None:
    apply_cpu_patches()
    generator: Any = torch.Generator()
    generator.manual_seed(1)
    generator.set_offset(generator.get_offset() - 4)


def test_a_gpu_keeps_vllms_own_ways(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Generator
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    apply_cpu_patches()
    assert not hasattr(waiting, "sched_yield")
    assert torch.Generator is before
