# SPDX-License-Identifier: Apache-2.0
"""Tab in a real bash and a real zsh, after `penstock --install-completion`."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 120.0
COMPINIT = "autoload -Uz compinit; compinit -u -d ~/.zcompdump\n"


def press_tab(command: list[str], home: Path, typed: str, expected: str) -> str:
    """All that a terminal shows until it shows this, or until LIMIT_S."""
    pid, terminal = pty.fork()
    if pid == 0:
        env = {**os.environ, "HOME": str(home), "ZDOTDIR": str(home), "TERM": "dumb", "PS1": "$ "}
        os.execvpe(command[0], command, env)
    shown, is_typed, give_up_at = "", False, time.monotonic() + LIMIT_S
    try:
        while expected not in shown and time.monotonic() < give_up_at:
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
            if not is_typed and "READY" in shown:
                os.write(terminal, f"{typed}\t".encode())
                is_typed = True
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_commands_and_options(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    install = [sys.executable, "-m", "penstock.cli.main", "--install-completion", "--shell", shell]
    env = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(install, env=env, check=True, capture_output=True, timeout=LIMIT_S)
    rc = tmp_path / f".{shell}rc"
    rc.write_text(rc.read_text() + (COMPINIT if shell == "zsh" else "") + "echo RE''ADY\n")
    command = ["bash", "--rcfile", str(rc), "-i"] if shell == "bash" else ["zsh", "-i"]
    for typed, whole in (
        ("penstock dashb", "penstock dashboard"),
        ("penstock dashboard --tls-k", "penstock dashboard --tls-key"),
    ):
        shown = press_tab(command, tmp_path, typed, whole)
        assert whole in shown, shown
