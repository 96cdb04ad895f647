# SPDX-License-Identifier: Apache-2.0
"""Broken configs are refused by `check` with key, file, line, reason and fix; none of these needs
the user's code."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.fake_gpus import fake_gpus
from tests.unit.runs.broken_cases import BASE, BROKEN_CONFIGS, PAGE, BrokenConfig, with_tables

from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.machine_limits import Machine, machine_problems, this_machine
from penstock.runs.preflight import check_run, find_problems
from penstock.runs.target import read_target

HUGE = {"w": {"dtype": "F32", "shape": [1_000_000, 1_000_000], "data_offsets": [0, 4]}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model that no machine holds."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "huge"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 16, "max_position_embeddings": 4096}')
    header = json.dumps(HUGE).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return tmp_path


def messages(path: Path, *overrides: str) -> list[str]:
    """What `penstock check` says before it calls the user's code."""
    try:
        return [str(problem) for problem in find_problems(read_target(path, overrides))]
    except ConfigError as error:
        return str(error).splitlines()


def test_there_are_sixty() -> None:
    assert len({case.problem for case in BROKEN_CONFIGS}) == len(BROKEN_CONFIGS) >= 60


def test_the_tables_of_the_docs_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tests.unit.runs.broken_cases"


def test_the_config_without_a_fault_passes(folder: Path) -> None:
    (folder / "run.yaml").write_text(BASE)
    assert messages(Path("run.yaml")) == []


@pytest.mark.parametrize("case", BROKEN_CONFIGS, ids=lambda case: case.problem)
def test_a_broken_config_is_refused(case: BrokenConfig, folder: Path) -> None:
    text = case.text()
    (folder / "run.yaml").write_text(text)
    first, *_ = messages(Path("run.yaml"))
    file, line, rest = first.split(":", 2)
    assert file == "run.yaml"
    assert rest.startswith(f" {case.key}: " if case.key else " ")
    assert case.says in rest
    assert case.fix in rest
    section = f"{case.lines.partition(':')[0]}:"
    starts = [n for n, one in enumerate(text.splitlines(), 1) if one.startswith(section)]
    start = starts[0] if starts else 1
    assert start <= int(line) <= start + case.lines.count("\n") + 1, "points at the section"


def test_an_override_is_named_instead_of_a_line(folder: Path) -> None:
    (folder / "run.yaml").write_text(BASE)
    found, *_ = messages(Path("run.yaml"), "training.parallel.dp=4096")
    assert found.startswith('override "training.parallel.dp=4096": training.parallel: the trainer')


# --- this machine ---------------------------------------------------------------------------------


def limits(folder: Path, machine: Machine, *overrides: str) -> list[str]:
    (folder / "run.yaml").write_text(BASE)
    config = read_target(Path("run.yaml"), overrides).config
    return [str(problem) for problem in machine_problems(config, folder, machine)]


LAPTOP = Machine(num_cores=2, memory_bytes=8 << 30, gpus=())
SERVER = Machine(num_cores=64, memory_bytes=64 << 30, gpus=(1 << 30, 1 << 30))


def test_a_cpu_takes_two_ranks_per_core(folder: Path) -> None:
    assert limits(folder, LAPTOP, "training.parallel={dp: 2, tp: 2}") == []
    [found] = limits(folder, LAPTOP, "training.parallel={dp: 8, tp: 2}")
    assert "has 16 ranks and this machine 2 cores and 0 GPUs, enough for at most 4" in found


def test_a_rank_needs_a_gpu_where_there_are_any(folder: Path) -> None:
    assert limits(folder, SERVER, "training.parallel.dp=2") == []
    [found] = limits(folder, SERVER, "training.parallel.dp=4")
    assert "needs 4 devices (4 ranks, one device each), and 2 of the 2 of this machine" in found
    assert "2 short; lower training.parallel" in found


def test_memory_is_compared_on_the_device_that_trains(folder: Path) -> None:
    small = Machine(num_cores=2, memory_bytes=1 << 20, gpus=())
    [found] = limits(folder, small)
    assert "this machine has 1.05 MB available" in found
    [found] = limits(folder, Machine(num_cores=2, memory_bytes=8 << 30, gpus=(1 << 20,)))
    assert "a GPU here has 1.05 MB" in found


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, tmp_path, free_mb=(1024, 2048))
    assert this_machine().gpus == (1 << 30, 2 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().gpus == (2 << 30,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().gpus == ()


# --- an earlier run -------------------------------------------------------------------------------


def test_check_says_what_run_would_refuse_to_resume(folder: Path) -> None:
    (folder / "run.yaml").write_text(BASE)
    first = read_target(Path("run.yaml"))
    first.folder.write_config(first.config)
    changed = read_target(Path("run.yaml"), ["training.epochs=2", "sampling.max_tokens=600"])
    found = [str(problem) for problem in check_run(changed).problems]
    assert len(found) == 3, found
    assert any("max_tokens: 600 tokens per answer leave no room" in text for text in found)
    resumed = [text for text in found if "--accept-changes" in text]
    assert resumed[1].startswith('override "training.epochs=2": training.epochs: 1 -> 2: changed')
    assert RunFolder(Path("outputs/broken")).finish() is None
