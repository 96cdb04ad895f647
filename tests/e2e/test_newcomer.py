# SPDX-License-Identifier: Apache-2.0
"""A newcomer with nothing but the wheel and the README follows every block of it in an empty
directory, from the installation to the loaded model; prints what each command took."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from playwright.sync_api import expect
from scripts.release import build, make_builder
from tests.e2e.document_blocks import ROOT, Block, blocks_of, use
from tests.e2e.system import START_S, until
from tests.unit.dashboard.browsing import CHROMIUM, open_browser, open_page

LIMIT_S = 3000.0
NUM_STEPS = 40
KILLED_AT = 24
"""After the first checkpoint, so that it is not only started again."""
OF_A_CHECKOUT = "make setup"
RESUMED = "penstock run my-run/run.yaml --headless"
DASHBOARD = "penstock dashboard outputs/my-run"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium"),
]


@dataclass(slots=True)
class Newcomer:
    folder: Path
    env: Mapping[str, str]
    took: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def follow(self, block: Block) -> str:
        """Use a block by its words; what it printed."""
        began = time.monotonic()
        printed = use(replace(block, reason=None), self.folder, self.env, timeout_s=LIMIT_S)
        what = f"write {block.file}" if block.file else block.text.strip().splitlines()[0]
        self.took.append((what, time.monotonic() - began))
        return printed

    def kill_at(self, line: str, step: int) -> None:
        """Start a run, and kill what was started when so many steps are trained."""
        began = time.monotonic()
        started = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: len(self.rewards()) >= step, timeout_s=START_S, what=f"step {step}")
        started.kill()
        started.wait(timeout=60)
        self.took.append((f"{line}, until kill -9", time.monotonic() - began))

    def look(self, line: str) -> None:
        """Open the address that a dashboard prints, photograph it, and end it with Ctrl-C."""
        began = time.monotonic()
        with subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        ) as served:
            assert served.stdout is not None
            found = re.search(r"http://\S+", next(served.stdout))
            assert found is not None
            problems: list[str] = []
            with open_browser() as browser:
                page = open_page(
                    browser, found[0], problems, viewport={"width": 1280, "height": 800}
                )
                expect(page.locator("main")).to_contain_text("mean reward", timeout=60_000)
                page.screenshot(path=self.folder / "dashboard.png")
            served.send_signal(signal.SIGINT)
            assert served.wait(timeout=60) in (0, 130)
        assert problems == []
        self.took.append((line, time.monotonic() - began))

    def rewards(self, run: str = "outputs/my-run") -> list[float]:
        """Of each step; one that was trained again after a kill counts once."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [*{one["number"]: one["reward/mean"] for one in found}.values()]


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    """With the versions that we test: others are of other days."""
    wheels = build(make_builder(tmp_path / "builder"), tmp_path / "built")
    folder = tmp_path / "work"
    folder.mkdir()
    tmp_path.chmod(0o755)  # as root, a sandbox has a user of its own
    (wheel,) = (name for name in wheels if name.endswith(".whl"))
    shutil.copy(tmp_path / "built" / "dist" / wheel, folder)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own.pop("VIRTUAL_ENV", None)
    path = f"{folder / '.venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    constraints = str(ROOT / "constraints" / "dev.txt")
    made = Newcomer(folder, {**own, "PATH": path, "PIP_CONSTRAINT": constraints, "NO_COLOR": "1"})
    yield made
    for what, seconds in made.took:
        print(f"{seconds / 60:6.2f} min  {what}")
    print(f"{sum(seconds for _, seconds in made.took) / 60:6.2f} min  in all")


def single(block: Block) -> list[Block]:
    """Each command of a block, in the folder to which the block has changed."""
    if block.language != "bash" or block.file:
        return [block]
    moved, found = "", list[Block]()
    for line in block.text.splitlines():
        if line.startswith("cd "):
            moved = f"{line} && "
        else:
            found.append(replace(block, text=f"{moved}{line}\n"))
    return found


def test_the_readme_from_the_wheel_to_the_loaded_model(newcomer: Newcomer) -> None:
    blocks = [block for block in blocks_of(ROOT / "README.md") if OF_A_CHECKOUT not in block.text]
    end = next(n for n, block in enumerate(blocks) if "penstock.run(" in block.text)
    printed: dict[str, str] = {}
    for block in (one for whole in blocks[:end] for one in single(whole)):
        line = block.text.strip()
        if line == DASHBOARD:
            newcomer.look(line)
            continue
        if line == RESUMED:
            newcomer.kill_at(line, KILLED_AT)
            assert len(newcomer.rewards()) < NUM_STEPS, "it was killed in the middle"
        printed[line] = newcomer.follow(block)
    found = newcomer.rewards()
    assert len(found) == NUM_STEPS
    assert sum(found[-5:]) > 1.5 * sum(found[:5])
    assert "reward" in printed["penstock samples outputs/my-run -n 3"]
    assert "mean reward" in printed["penstock plot outputs/my-run"]
    (loaded,) = (text for block, text in printed.items() if "from_pretrained" in block)
    assert re.search(r"cab>[a-j]{1,3}", loaded), loaded
    assert newcomer.rewards("my-agent/outputs/my-agent")
    assert (newcomer.folder / "dashboard.png").stat().st_size > 10_000
