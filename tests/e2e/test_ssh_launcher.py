# SPDX-License-Identifier: Apache-2.0
"""A run over two hosts by ssh: network namespaces, Debian's sshd, a trainer with a rank on each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.e2e.network_hosts import HERE, LONG_S, NEEDS_NAMESPACES, THERE, Host, hosts
from tests.e2e.system import penstock, until

from penstock.fleet.run_folder import RunFolder
from penstock.wire.certificates import Authority

__all__ = ["hosts"]
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
pytestmark = [
    *NEEDS_NAMESPACES,
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None, reason="needs an ssh server"),
]
STEPS = 8
COMMON = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.checkpoint_every=3",
    "training.lr_scheduler_type=constant",
    "training.parallel.dp=2",
    "algorithm.num_generations=4",
    "deterministic=true",
)


def make_key(path: Path) -> str:
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    subprocess.run(words, check=True)
    return path.with_suffix(".pub").read_text()


@contextmanager
def ssh_server(host: Host, folder: Path) -> Generator[Path]:
    """An ssh server in the namespace; yields the client's config file."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    host_key = make_key(folder / "host_key")
    (folder / "authorized").write_text(make_key(folder / "user_key"))
    (folder / "known").write_text(f"{THERE} {host_key}")
    (folder / "client").write_text(
        f"IdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known\nUser root\n"
        "StrictHostKeyChecking yes\nIdentitiesOnly yes\n"
    )
    (folder / "server").write_text(
        f"ListenAddress {THERE}\nHostKey {folder}/host_key\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPermitRootLogin yes\nPidFile none\n"
    )
    assert SSHD is not None
    words = ("ip", "netns", "exec", host.name, SSHD, "-D", "-e", "-f", str(folder / "server"))
    with host.log.open("ab") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield folder / "client"
    finally:
        server.terminate()
        server.wait(timeout=60)


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

    folder, authority = RunFolder(tmp_path / "run"), Authority.create(tmp_path / "tls")
    issued = authority.issue("server", [HERE], days=1)
    tls = f"{{cert: {issued.certificate}, key: {issued.key}, ca: {authority.certificate}}}"
    with ssh_server(there, tmp_path) as client:
        run = (
            *("demo", "--dir", str(folder.path), "--headless", *COMMON),
            *("launcher=ssh", f"ssh.config={client}", "training.hosts=[a, b]"),
            "training.rank_timeout_s=20",
            f"network={{host: 0.0.0.0, advertise: {HERE}, tls: {tls}}}",
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
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder.path) in str(p.info)]
    assert not left, left
