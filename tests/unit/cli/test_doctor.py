# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: environments of vLLM that are there, missing, and of another version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
