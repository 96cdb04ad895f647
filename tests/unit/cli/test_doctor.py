# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: environments of vLLM that are there, missing, and of another version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fake_gpus import MB_80_GB, fake_gpus

from penstock import __version__
from penstock.cli.doctor import check_distribution, check_vllm, doctor


def write_environment(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "vllm").touch(0o755)
    info = folder / "lib" / "python3.11" / "site-packages" / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def write_distribution(folder: Path, name: str, command: str) -> str:
    info = folder / f"{name.replace('-', '_')}-7.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.1\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\npenstock = {command}\n")
    return str(folder)


def test_another_project_of_our_name_is_noticed(tmp_path: Path) -> None:
    found = check_distribution([write_distribution(tmp_path, "penstock", "penstock.app:main")])
    assert not found.is_present and "7.1" in found.detail
    assert any("pip install penstock-rl" in line for line in found.fix)


def test_our_own_distribution_is_no_other_project(tmp_path: Path) -> None:
    ours = write_distribution(tmp_path, "penstock-rl", "penstock.cli.main:main")
    found = check_distribution([ours])
    assert found.is_present and found.detail == __version__
    assert check_distribution().is_present, "this environment"


def test_an_environment_with_vllm_is_shown_with_its_version(tmp_path: Path) -> None:
    found = check_vllm(write_environment(tmp_path, "0.32.1"))
    assert found.is_present and "0.32.1" in found.detail and not found.fix


def test_another_version_is_shown_with_a_warning(tmp_path: Path) -> None:
    found = check_vllm(write_environment(tmp_path, "0.29.0"))
    assert found.is_present and "vLLM 0.32" in found.fix[0]


def test_what_is_missing_comes_with_the_steps_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(environment=tmp_path / "none") == 0
    text = capsys.readouterr().out
    assert f"- vllm         {tmp_path / 'none'}/bin/vllm not found" in text
    assert "make setup-engine" in text
    doctor(environment=tmp_path / "none", json=True)
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    by_name = {finding["name"]: finding for finding in findings}
    assert not by_name["vllm"]["is_present"] and by_name["vllm"]["fix"]
    assert by_name["python"]["is_present"]


def machine(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """What it prints, and its JSON."""
    doctor(environment=folder / "none")
    text = capsys.readouterr().out
    doctor(environment=folder / "none", json=True)
    return text, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_devices_links_memory_and_disk_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpus(monkeypatch, tmp_path)
    text, found = machine(capsys, tmp_path)
    assert "+ devices      8 × NVIDIA H100 80GB HBM3 with 85.5 GB, driver 570.86.15" in text
    assert "+ links        NV18 between 28 pairs" in text
    assert "+ memory " in text and f"free in {Path.cwd()}" in text
    assert [one["id"] for one in found["devices"]] == [str(index) for index in range(8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-00000002-aa,9,1")
    _, found = machine(capsys, tmp_path)
    assert [one["id"] for one in found["devices"]] == ["5", "2"], "CUDA stops at an unknown one"


def test_a_device_that_another_program_uses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpus(monkeypatch, tmp_path)
    listed = tmp_path / "devices.csv"
    listed.write_text(listed.read_text().replace(f"{MB_80_GB}, 570", "1000, 570", 1))
    text, _ = machine(capsys, tmp_path)
    assert "- devices      device 0 has 1.05 GB free" in text


def test_a_machine_without_devices_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpus(monkeypatch, tmp_path, free_mb=(), visible="")
    text, found = machine(capsys, tmp_path)
    assert "- devices      no GPU found" in text and found["devices"] == []
    assert "install NVIDIA's driver" in text and "links" not in text
