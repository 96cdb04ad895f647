# SPDX-License-Identifier: Apache-2.0
"""Code of others reaches no secret: not of the node, the run, the cloud or another attempt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attacks.thief import NAMES

ROOT = Path(__file__).parents[2]
EVIL = """
import os
from thief import NAMES, steal

def reward(completions, **_):
    found = steal(os.path.dirname(__file__))
    return [float(sum(1 << NAMES.index(name) for name in found))] * len(completions)
"""
NETWORK = 'ip link set lo up && ip addr add 169.254.169.254/32 dev lo && exec "$@"'
"""A network in which the metadata address answers."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a network namespace with root")


@pytest.fixture
def project() -> Iterator[Path]:
    """Not in tmp_path, which only its owner can read."""
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as name:
        folder = Path(name) / "project"
        folder.mkdir(mode=0o755)
        Path(name).chmod(0o711)
        (Path(name) / "private").mkdir(mode=0o700)
        (folder / "thief.py").write_bytes((ROOT / "tests" / "attacks" / "thief.py").read_bytes())
        (folder / "evil.py").write_text(EVIL)
        yield folder


def rob(use: str, backend: str, project: Path) -> list[str]:
    """What the thief found, in a node that was started with secrets in its environment."""
    node = [sys.executable, "-m", "tests.attacks.robbed_node", use, backend]
    secrets = {
        "PENSTOCK_TOKEN": "CANARY-token-00000000",
        "AWS_SECRET_ACCESS_KEY": "CANARY-cloud-00000000",
        "HF_TOKEN": "CANARY-cloud-00000000",
        "OF_THE_PARENT": "CANARY-parent-00000000",
    }
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", NETWORK, "sh", *node, project, project.parent / "private"],
        cwd=ROOT,
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_root
@pytest.mark.finding(3)
@pytest.mark.parametrize("use", ["reward", "workflow", "tool"])
def test_user_code_finds_none_of_seven_secrets(use: str, project: Path) -> None:
    """A reward, a command and a tool of a node that runs as root find 0 of 7 secrets: token,
    signing key, cloud variables, other attempts' keys, /proc of parents, engine, metadata."""
    assert rob(use, "auto", project) == []


@needs_root
def test_the_same_thief_finds_all_seven_without_walls(project: Path) -> None:
    """The attack is real: as an ordinary process of the same user it finds everything."""
    assert rob("workflow", "none", project) == sorted(NAMES)
