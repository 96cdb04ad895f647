# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the README and of the docs, and how a reader would use them.

A block with a `title` is a file to write. Other `bash` and `python` blocks are commands to run, in
the order of the page, in one folder. A block that needs more than this machine has a comment in
front of it, `<!-- not run: the reason -->`. Blocks of `text` show output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTPUT = frozenset({"text"})
"""Languages of blocks that show what a command prints."""
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)(?P<options>[^\n`]*)\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: str
    """Path of the page, relative to the repository."""
    line: int
    language: str
    text: str
    file: str | None
    """File to write it to."""
    reason: str | None
    """Why it is not run."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: Path) -> Iterator[Block]:
    page = path.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(page):
        indent = found["indent"]
        lines = (line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
        title = _TITLE.search(found["options"])
        yield Block(
            page=str(path.relative_to(ROOT)),
            line=page.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text="".join(lines),
            file=title[1] if title else None,
            reason=found["reason"],
        )


def all_blocks() -> list[Block]:
    return [block for path in pages() for block in blocks_of(path)]


def not_run() -> list[Block]:
    """Blocks with a reason; the list is printed by a test."""
    return [block for block in all_blocks() if block.reason]


def shell_env(folder: Path) -> Mapping[str, str]:
    """An environment in which `penstock` and `python` are the ones under test."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, words in {"penstock": " -m penstock.cli.main", "python": ""}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def use(block: Block, folder: Path, env: Mapping[str, str], *, timeout_s: float) -> str:
    """Write the block's file or run it; return what it printed."""
    if block.reason:
        return ""
    if block.file:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        return ""
    if block.language not in ("bash", "python"):
        return ""
    bash = block.language == "bash"
    command = ["bash", "-euo", "pipefail", "-c"] if bash else ["python", "-c"]
    done = subprocess.run(
        [*command, block.text],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, f"{block.where}\n{block.text}\n{output}"
    return output
