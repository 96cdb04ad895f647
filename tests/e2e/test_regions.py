# SPDX-License-Identifier: Apache-2.0
"""One run in three regions: a local pool and two behind long, thin, lossy links that are cut for a
while, as fast as 100, 60 and 30. Real `hf` engines with a delay per token; TLS between regions."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from benchmarks.wan_link import Link
from tests.e2e.network_hosts import ended
from tests.e2e.system import PENSTOCK, is_gone, penstock, until

from penstock.fleet.run_folder import RunFolder

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="makes network namespaces"
    ),
]
HOME = "10.78.0.1"
PORT = 18500
SPEEDS = {"node-0": 1.0, "mid": 0.6, "far": 0.3}
CAPACITY = 192
TOKEN_S = 2.0
"""The delay of a token of the fastest pool: long beside what two cores compute for it, and beside
the way to a pool and back."""
WARM_UP_S = 1.5 * 3 * TOKEN_S / SPEEDS["far"]
"""Until every slot of the slowest pool had its turn."""
WINDOW_S = float(os.environ.get("PENSTOCK_WINDOW_S", "60"))
STEPS = int(os.environ.get("PENSTOCK_REGION_STEPS", "90"))
GROUPS = 64
"""Of a batch: four of them take the pools longer than the slowest needs for its longest answer, or
that pool would work for nothing."""
LONG_S = 1500.0
RUN = f"""
name: regions
models:
  policy: {{init: "builtin:tiny-qwen3", engine: "pools:build_engine", replicas: 1,
    capacity: {CAPACITY}}}
sources: [{{name: train, task: penstock.tasks.reverse}}]
reward: penstock.tasks.reverse:reward
sampling: {{max_tokens: 3}}
algorithm: {{num_generations: 8, epsilon: 0.2, delta: 3.0, entropy_coef: 0.1}}
training: {{learning_rate: 2.0e-3, lr_scheduler_type: warmup_stable_decay,
  groups_per_batch: {GROUPS}, steps: {STEPS}, max_staleness: 4, checkpoint_every: 50}}
dataflow: {{lease: {{ttl_s: 6}}, rules: [{{admit: all}}, {{select: edf}}]}}
"""
NETWORK = f"""
network: {{host: 0.0.0.0, advertise: "{HOME}", port: {PORT},
  tls: {{ca: tls/ca.pem, cert: tls/server.pem, key: tls/server.key}}}}
"""
POOLS = f"""
import asyncio
import os
import random

TOKEN_S = {TOKEN_S} / float(os.environ.get("POOL_SPEED", "1"))

def build_engine(settings):
    from penstock.rollout.engines.hf import HfEngine
    from penstock.types import view_ids

    class Engine(HfEngine):
        async def __call__(self, request):
            answer = await super().__call__(request)
            if request.session != "probe":  # not all at once, or a window would count waves
                delay_s = TOKEN_S * len(view_ids(answer.sampled_ids))
                await asyncio.sleep(random.uniform(0.5, 1.5) * delay_s)
            return answer

    return Engine(torch_threads=settings.torch_threads)
"""


class Window(NamedTuple):
    """A part of a run, by the wall clock."""

    cut: str
    begin: float
    end: float


class Regions:
    """What the run did, read from its folder; nothing of it is asked over the network."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def held_s(self, window: Window) -> dict[str, list[float]]:
        """Of each pool and each trajectory that it delivered: how long it had worked on it."""
        query = (
            "SELECT r.node_id, r.delivered_at - max(g.granted_at) FROM rows r JOIN grants g ON "
            "g.group_id = r.group_id AND g.epoch = r.epoch AND g.node_id = r.node_id AND "
            "r.slot BETWEEN g.slot AND g.slot + g.num_slots - 1 "
            "WHERE r.space = 'train' AND r.delivered_at BETWEEN ? AND ? GROUP BY r.row_id"
        )
        with closing(sqlite3.connect(self.folder.path / "ledger" / "ledger.db")) as ledger:
            rows = ledger.execute(query, (window.begin, window.end)).fetchall()
        found: dict[str, list[float]] = {name: [] for name in SPEEDS}
        for node, seconds in rows:
            found[node.partition(".")[0]].append(seconds)
        return found

    def steps(self) -> list[dict[str, Any]]:
        if not self.folder.metrics.exists():
            return []
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    def rewards(self) -> list[float]:
        return [step["reward/mean"] for step in self.steps()]

    def num_steps(self) -> int:
        return len(self.steps())

    def until_first_step(self, launcher: subprocess.Popen[bytes], log: Path) -> None:
        def reached() -> bool:
            assert launcher.poll() is None, log.read_text()[-2000:]
            return self.num_steps() > 0

        until(reached, timeout_s=LONG_S, what="the first step")


def write_files(folder: Path, *, network: str) -> None:
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN + network)
    (folder / "pools.py").write_text(POOLS)


def env(speed: float) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    return {**own, "OMP_NUM_THREADS": "1", "POOL_SPEED": str(speed)}


def join(name: str, url: str, here: Path, *more: str) -> list[str]:
    words = ("--token-file", str(here / f"{name}.token"), "--name", name)
    return [*PENSTOCK, "join", url, *words, "--capacity", str(CAPACITY), *more]


def token(run: RunFolder, here: Path, name: str) -> None:
    words = ("--role", "rollout", "--name", name, "--out", str(here / f"{name}.token"))
    done = penstock("token", str(run.path), *words)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_per_s(steps: Sequence[dict[str, Any]], begin_s: float, end_s: float) -> float:
    """Share of the time in which the trainer waited for data."""
    return sum(one["seconds/wait"] for one in steps) / (end_s - begin_s)


def observe(regions: Regions, cut: str, seconds: float) -> tuple[Window, int, float]:
    """From now on: the window, steps in it, and the share of it that the trainer waited."""
    begin, before = time.time(), regions.num_steps()
    time.sleep(seconds)
    end, steps = time.time(), regions.steps()[before:]
    return Window(cut, begin, end), len(steps), wait_per_s(steps, begin, end)


def test_three_regions_train_as_one(tmp_path: Path) -> None:
    local = run_here(tmp_path / "local")
    far = tmp_path / "regions"
    write_files(far, network=NETWORK)
    assert penstock("tls", "init", "--host", HOME, cwd=far).returncode == 0
    run = RunFolder(far / "outputs" / "regions")
    regions = Regions(run)
    with ExitStack() as stack:
        mid = stack.enter_context(Link(delay_ms=150.0, rate_mbit=20.0, loss=0.01))
        slow = stack.enter_context(Link(delay_ms=150.0, rate_mbit=20.0, loss=0.01, beside=mid))
        links = {"mid": mid, "far": slow}
        inside = ("nsenter", f"--net={mid.namespace('a')}")
        subprocess.run([*inside, "ip", "address", "add", f"{HOME}/32", "dev", "lo"], check=True)
        for link in links.values():
            route = ("ip", "route", "add", HOME, "via", link.addresses["a"])
            subprocess.run(["nsenter", f"--net={link.namespace('b')}", *route], check=True)
        log = stack.enter_context((far / "run.log").open("wb"))
        command = [*PENSTOCK, "run", "run.yaml", "--headless"]
        launcher = mid.popen("a", command, cwd=far, env=env(1.0), stdout=log, stderr=log)
        stack.enter_context(ended(launcher))
        regions.until_first_step(launcher, far / "run.log")
        for name, link in links.items():
            token(run, far, name)
            node_log = stack.enter_context((far / f"{name}.log").open("wb"))
            words = join(name, f"https://{HOME}:{PORT}", far, "--ca", "tls/ca.pem")
            outputs = {"stdout": node_log, "stderr": node_log}
            node = link.popen("b", words, cwd=far, env=env(SPEEDS[name]), **outputs)
            stack.enter_context(ended(node))
        began = time.time()
        until(
            lambda: all(regions.held_s(Window("", began, time.time())).values()),
            timeout_s=LONG_S,
            what="all three deliver",
        )
        time.sleep(WARM_UP_S)
        assert launcher.poll() is None, (far / "run.log").read_text()[-2000:]
        whole, num_whole, wait_whole = observe(regions, "", WINDOW_S)
        seen = [(whole, num_whole, wait_whole)]
        for name in SPEEDS:
            with cut(name, links, run):
                seen.append(observe(regions, name, WINDOW_S))
            until(lambda name=name: _works(regions, name), timeout_s=LONG_S, what=f"{name} is back")
            time.sleep(WARM_UP_S)
        seen.append(observe(regions, "", WINDOW_S))
        assert launcher.poll() is None, "STEPS is too small: it ended before the last window"
        assert launcher.wait(LONG_S) == 0, (far / "run.log").read_text()[-2000:]
    assert penstock("audit", str(run.path)).returncode == 0
    judge(regions, seen)
    compare(local, regions)


def _works(regions: Regions, name: str) -> bool:
    now = time.time()
    return bool(regions.held_s(Window("", now - 5.0, now))[name])


@contextmanager
def cut(name: str, links: dict[str, Link], run: RunFolder) -> Generator[None]:
    """A remote pool loses its link, the local one its processor."""
    if name in links:
        links[name].cut()
        yield
        links[name].restore()
        return
    pids = json.loads((run.path / "run" / "launcher.json").read_bytes())["services"]
    node = psutil.Process(pids[name])
    node.send_signal(signal.SIGSTOP)
    yield
    assert not is_gone(node.pid)
    node.send_signal(signal.SIGCONT)


def judge(regions: Regions, seen: Sequence[tuple[Window, int, float]]) -> None:
    """Shares against speeds as measured, since the machine may slow some pools more than others."""
    wait, lost = seen[0][2], measured_shares(regions.held_s(seen[0][0]))
    for window, num_steps, waited in seen:
        held_s = regions.held_s(window)
        num = {name: len(found) for name, found in held_s.items()}
        busy = {n: sum(s) / CAPACITY / (window.end - window.begin) for n, s in held_s.items()}
        speeds = measured_shares(held_s)
        shares = {name: num[name] / sum(num.values()) for name in num}
        text = ", ".join(
            f"{n} {shares[n]:.1%} by speed {speeds[n]:.1%} busy {busy[n]:.0%}" for n in num
        )
        print(
            f"cut {window.cut or 'nothing'}: {num_steps} steps in "
            f"{window.end - window.begin:.0f} s, trainer waits {waited:.1%}; {text}"
        )
    for window, _, waited in seen:
        held_s = regions.held_s(window)
        total = sum(map(len, held_s.values()))
        if not window.cut:
            for name, speed in measured_shares(held_s).items():
                assert len(held_s[name]) / total == pytest.approx(speed, rel=0.1), name
            continue
        assert waited <= wait + lost[window.cut], (window.cut, wait, waited)
        for name in SPEEDS.keys() - {window.cut}:
            busy_s = sum(held_s[name]) / (window.end - window.begin)
            assert busy_s >= 0.8 * CAPACITY, f"{name} has no work while {window.cut} is cut"


def measured_shares(held_s: dict[str, list[float]]) -> dict[str, float]:
    """What pools of the same capacity deliver if all of them are busy all the time."""
    speeds = {name: 1 / statistics.fmean(s) if s else 0.0 for name, s in held_s.items()}
    return {name: speed / sum(speeds.values()) for name, speed in speeds.items()}


def run_here(folder: Path) -> Regions:
    """The same run on one host, by an engine without delays."""
    write_files(folder, network="")
    run = RunFolder(folder / "outputs" / "regions")
    command = [*PENSTOCK, "run", "run.yaml", "models.policy.engine=hf", "--headless"]
    with (folder / "run.log").open("wb") as log:
        launcher = subprocess.Popen(command, cwd=folder, env=env(1.0), stdout=log, stderr=log)
    with ended(launcher):
        assert launcher.wait(LONG_S) == 0, (folder / "run.log").read_text()[-2000:]
    return Regions(run)


def compare(local: Regions, regions: Regions) -> None:
    """The mean reward of the last steps, and what it varies by from step to step."""
    num = STEPS // 5
    here, there = local.rewards()[-num:], regions.rewards()[-num:]
    spread = max(statistics.stdev(here), statistics.stdev(there))
    difference = abs(statistics.fmean(here) - statistics.fmean(there))
    print(
        f"reward of the last {num} steps: {statistics.fmean(here):.3f} local, "
        f"{statistics.fmean(there):.3f} in regions, {spread:.3f} from step to step"
    )
    assert difference <= 2 * spread, (here, there)
