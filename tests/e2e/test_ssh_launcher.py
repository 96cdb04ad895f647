# SPDX-License-Identifier: Apache-2.0
"""Runs over hosts by ssh: network namespaces, Debian's sshd, a trainer with a rank on each of two,
and a trainer whose host dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.e2e.network_hosts import (
    HERE,
    LONG_S,
    NEEDS_NAMESPACES,
    THERE,
    THIRD,
    Host,
    hosts,
    third,
)
from tests.e2e.system import penstock, until

from penstock.fleet.run_folder import RunFolder
from penstock.wire.certificates import Authority

__all__ = ["hosts", "third"]
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
pytestmark = [
    *NEEDS_NAMESPACES,
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None, reason="needs an ssh server"),
]
STEPS = 8
SETTINGS = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.checkpoint_every=3",
    "training.lr_scheduler_type=constant",
    "algorithm.num_generations=4",
)
COMMON = (*SETTINGS, "training.parallel.dp=2", "deterministic=true")


def make_key(path: Path) -> str:
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    subprocess.run(words, check=True)
    return path.with_suffix(".pub").read_text()


@contextmanager
def ssh_servers(hosts: Mapping[str, Host], folder: Path) -> Generator[Path]:
    """An ssh server at each address, in its namespace; yields the client's config file."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key = make_key(folder / "host_key")
    (folder / "authorized").write_text(make_key(folder / "user_key"))
    (folder / "known").write_text(f"{','.join(hosts)} {host_key}")
    (folder / "client").write_text(
        f"IdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known\nUser root\n"
        "StrictHostKeyChecking yes\nIdentitiesOnly yes\n"
    )
    with ExitStack() as stack:
        for address, host in hosts.items():
            stack.enter_context(_ssh_server(address, host, folder))
        yield folder / "client"


@contextmanager
def _ssh_server(address: str, host: Host, folder: Path) -> Generator[None]:
    settings = folder / f"server-{address}"
    settings.write_text(
        f"ListenAddress {address}\nHostKey {folder}/host_key\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPermitRootLogin yes\nPidFile none\n"
    )
    assert SSHD is not None
    words = ("ip", "netns", "exec", host.name, SSHD, "-D", "-e", "-f", str(settings))
    with host.log.open("ab") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        server.wait(timeout=60)


def network(folder: Path) -> str:
    authority = Authority.create(folder / "tls")
    issued = authority.issue("server", [HERE], days=1)
    tls = f"{{cert: {issued.certificate}, key: {issued.key}, ca: {authority.certificate}}}"
    return f"network={{host: 0.0.0.0, advertise: {HERE}, tls: {tls}}}"


def left_of(folder: RunFolder) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder.path) in str(p.info)]


def num_steps(folder: RunFolder) -> int:
    return len(folder.metrics.read_text().splitlines()) if folder.metrics.exists() else 0


def final_weights(folder: RunFolder) -> bytes:
    return (folder.path / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()


def connections(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    every = psutil.Process(launcher.pid).children(recursive=True)
    return [process for process in every if process.name() == "ssh"]


def test_the_same_run_on_two_hosts_by_ssh(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """One connection is cut in the middle; the weights are those of a run on one host."""
    here, there = hosts
    straight = RunFolder(tmp_path / "straight")
    done = penstock("demo", "--dir", str(straight.path), "--headless", *COMMON)
    assert done.returncode == 0, done.stderr[-2000:]

    folder = RunFolder(tmp_path / "run")
    with ssh_servers({THERE: there}, tmp_path) as client:
        run = (
            *("demo", "--dir", str(folder.path), "--headless", *COMMON),
            *("launcher=ssh", f"ssh.config={client}", "training.hosts=[a, b]"),
            "training.rank_timeout_s=20",
            network(tmp_path),
            f"hosts.a={{memory_gb: 4, address: {HERE}}}",
            f"hosts.b={{memory_gb: 4, address: {THERE}}}",
        )
        with here.running(*run) as launcher:
            until(lambda: num_steps(folder) >= 2, timeout_s=LONG_S, what="two steps")
            found = connections(launcher)
            assert len(found) == 2, "a rank and a node are there"
            found[0].kill()
            assert launcher.wait(LONG_S) == 0, here.log.read_text()[-3000:]
    assert "lost its host" in here.log.read_text()
    assert final_weights(folder) == final_weights(straight)
    assert penstock("audit", str(folder.path)).returncode == 0
    assert not left_of(folder)


def test_a_trainer_whose_host_dies_goes_to_the_best_of_those_that_roll_out(
    hosts: tuple[Host, Host], third: Host, tmp_path: Path
) -> None:
    """Of three hosts with both tags the planner takes the best trainer, and when that is dead the
    next; the node there hands back its work, and takes turns with it from then on."""
    here, best = hosts
    folder = RunFolder(tmp_path / "run")
    both = "memory_gb: 4, memory_gb_per_s: 1000, tags: [rollout, train]"
    with ssh_servers({THERE: best, THIRD: third}, tmp_path) as client:
        run = (
            *("demo", "--dir", str(folder.path), "--headless", *SETTINGS),
            *("launcher=ssh", f"ssh.config={client}", network(tmp_path)),
            *("models.policy.replicas=2", "training.max_staleness=2"),
            f"hosts.a={{{both}, tflops: 30, address: {HERE}}}",
            f"hosts.b={{{both}, tflops: 1000, address: {THERE}}}",
            f"hosts.c={{{both}, tflops: 200, address: {THIRD}}}",
        )
        with here.running(*run) as launcher:
            until(lambda: num_steps(folder) >= 2, timeout_s=LONG_S, what="two steps")
            died_at, steps = time.monotonic(), num_steps(folder)
            best.die()
            until(lambda: num_steps(folder) > steps + 1, timeout_s=LONG_S, what="it goes on")
            print(f"a step {time.monotonic() - died_at:.1f} s after the trainer's host had died")
            assert launcher.wait(LONG_S) == 0, here.log.read_text()[-3000:]
    said = here.log.read_text()
    assert "trainer-policy goes to b: needed" in said, said
    assert "trainer-policy lost its host" in said, said
    assert "trainer-policy goes to c: replaces_dead" in said, said
    assert penstock("audit", str(folder.path)).returncode == 0
    events = (folder.path / "events.jsonl").read_text().splitlines()
    turns = [json.loads(line)["trigger"] for line in events]
    assert {"samples", "timeout"} & {*turns}, turns
    assert not left_of(folder)
