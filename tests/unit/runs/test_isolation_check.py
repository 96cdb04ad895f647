# SPDX-License-Identifier: Apache-2.0
"""What `penstock check` says of the isolation that a run gets here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.config import demo_config
from penstock.rollout.sandbox.container import ContainerBackend
from penstock.runs import isolation_check
from penstock.runs.isolation_check import isolation_notes


@pytest.mark.parametrize(("uid", "num_notes"), [(0, 1), (1000, 2)])
def test_a_limit_that_containers_do_not_hold_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int, num_notes: int
) -> None:
    backend = ContainerBackend("an-image", "podman")
    monkeypatch.setattr(isolation_check, "_backend", lambda *_: backend)  # pyright: ignore
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    notes = list(isolation_notes(demo_config(0), tmp_path))
    assert len(notes) == num_notes
    assert ("disk_mb holds for each file" in notes[-1]) == (uid != 0)
