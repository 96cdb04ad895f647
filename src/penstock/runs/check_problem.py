# SPDX-License-Identifier: Apache-2.0
"""One problem that `penstock check` found, and where it stands: config key, file, line.

Owns the form of such a problem. Finds none; the checks do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.yaml_positions import locate_keys
from penstock.options import KeyPath

if TYPE_CHECKING:
    from penstock.runs.target import RunTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProblem:
    key: str
    """The config key concerned, like `sources[0].task`."""
    text: str
    """What is wrong, why, and how to fix it."""
    code: str = ""
    """FILE:LINE of the user's code; empty if none is involved."""
    where: str = ""
    """FILE:LINE of the key in the run file, or the override that set it."""
    detail: str = ""
    """The user's traceback, or where their code hangs."""

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.where, self.key, self.text) if part)
        code = f" ({self.code})" if self.code and self.code not in self.text else ""
        return f"{head}{code}" + (f"\n{self.detail}" if self.detail else "")


def located(problem: CheckProblem, target: RunTarget) -> CheckProblem:
    """With the place of its key: the override that wrote it, else a line of the file."""
    return replace(problem, where=locate(problem.key, target))


def locate(key: str, target: RunTarget) -> str:
    path = parse_key(key)
    if not path:
        return ""
    for override in reversed(target.overrides):
        written = parse_key(override.partition("=")[0].strip())
        shared = min(len(written), len(path))
        if shared and written[:shared] == path[:shared]:
            return f'override "{override}"'
    if target.config_file is None:
        return ""
    positions = locate_keys(target.config_file.read_bytes().decode("utf-8-sig"))
    return f"{target.config_file}:{positions.line_of(path)}"


def parse_key(key: str) -> KeyPath:
    """`sources[0].task` as a path."""
    parts = re.findall(r"\[([0-9]+)\]|([^.\[\]]+)", key)
    return tuple(int(index) if index else word for index, word in parts)
