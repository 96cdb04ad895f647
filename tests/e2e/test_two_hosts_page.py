# SPDX-License-Identifier: Apache-2.0
"""docs/how-to/two-hosts.md by its own words: its blocks in order, on two hosts that are network
namespaces."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.e2e.document_blocks import ROOT, blocks_of
from tests.e2e.network_hosts import HERE, LONG_S, NEEDS_NAMESPACES, Host, hosts
from tests.e2e.system import until

__all__ = ["hosts"]
pytestmark = [
    *NEEDS_NAMESPACES,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("iptables") is None, reason="the page uses iptables"),
]
PAGE = ROOT / "docs" / "how-to" / "two-hosts.md"
NAME = "trainer.example"
ENDLESS = ("run", "join")
"""Commands that go on until they are stopped."""


class Shell:
    """A person at one of the hosts, in one folder."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.folder, self._host = folder, host
        folder.mkdir()

    @contextmanager
    def typing(self, words: list[str]) -> Generator[str]:
        """What the command prints; an endless one runs until the block ends."""
        if words[:1] == ["penstock"] and words[1] in ENDLESS:
            # As in a shell of its own, which stays open.
            with (self.folder / f"{words[1]}.log").open("wb") as out:
                process = subprocess.Popen(
                    self._inside(words), stdout=out, stderr=out, cwd=self.folder, env=self._env()
                )
            try:
                yield ""
            finally:
                process.terminate()
                process.wait(LONG_S)
        else:
            done = subprocess.run(
                self._inside(words),
                capture_output=True,
                text=True,
                timeout=LONG_S,
                cwd=self.folder,
                env=self._env(),
            )
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
            yield done.stdout

    def _env(self) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        return {**own, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache")}

    def _inside(self, words: list[str]) -> list[str]:
        if words[0] == "penstock":
            words = [sys.executable, "-m", "penstock.cli.main", *words[1:]]
        return ["ip", "netns", "exec", self._host.name, *words]


@pytest.fixture
def shells(hosts: tuple[Host, Host], tmp_path: Path) -> Generator[dict[str, Shell]]:
    """Both hosts know the run's host by the name that the page uses."""
    with ExitStack() as stack:
        for host in hosts:
            folder = Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} {NAME}\n")
        yield {
            "on the host of the run": Shell(hosts[0], tmp_path / "here"),
            "on the other host": Shell(hosts[1], tmp_path / "there"),
        }


def test_the_page(shells: dict[str, Shell], hosts: tuple[Host, Host]) -> None:
    here, there = shells.values()
    outputs = here.folder / "outputs" / "two"
    shown: list[str] = []
    with ExitStack() as stack:
        for block in blocks_of(PAGE):
            if block.file is not None:
                (here.folder / block.file).write_text(block.text)
                continue
            for line in block.text.splitlines() if block.language == "bash" else ():
                words = shlex.split(line, comments=True)
                if words[:2] == ["penstock", "token"]:
                    metrics = outputs / "metrics.jsonl"
                    until(metrics.exists, timeout_s=LONG_S, what="the first step")
                if words[:2] == ["penstock", "join"]:  # scp
                    shutil.copy(here.folder / "laptop.token", there.folder)
                    shutil.copy(here.folder / "tls" / "ca.pem", there.folder)
                if words[:2] == ["penstock", "status"]:
                    until(lambda: _delivered(here), timeout_s=LONG_S, what="the other host works")
                assert block.reason is not None
                shown.append(stack.enter_context(shells[block.reason].typing(words)))
        status, report = (json.loads(text.splitlines()[-1]) for text in shown[-2:])
        for nodes in (status["status"]["nodes"], report["nodes"]):
            assert any(node["node_id"].startswith("laptop.") for node in nodes)
        assert _is_open(hosts[1], 18500) and _is_open(hosts[1], 18501)
        assert not _is_open(hosts[1], 22222), "the firewall drops the rest"


def _delivered(here: Shell) -> bool:
    words = ["penstock", "status", "outputs/two", "--json"]
    with here.typing(words) as text:
        status = json.loads(text.splitlines()[-1])["status"]
    nodes = [] if status is None else status["nodes"]
    return any(n["node_id"].startswith("laptop.") and n["delivered"] for n in nodes)


def _is_open(host: Host, port: int) -> bool:
    """A refused connection would mean that the packet got through to a port without a listener."""
    code = (
        "import socket, sys\n"
        f"s = socket.socket(); s.settimeout(3)\n"
        f"try: s.connect(({HERE!r}, {port})); print('open')\n"
        "except TimeoutError: print('dropped')\n"
        "except ConnectionRefusedError: print('refused')\n"
    )
    command = ["ip", "netns", "exec", host.name, sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("open", "dropped"), done.stdout + done.stderr
    return done.stdout.strip() == "open"
