# SPDX-License-Identifier: Apache-2.0
"""`penstock init`: a task, a reward and a config, ready to edit."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

FILES = ("run.yaml", "task.py", "README.md")
OUR_LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
"""Of the template; what the user makes of it is the user's."""


NAME = "{{name}}"
"""Stands in the template where the run's name goes."""


def init(directory: Path, /, *, template: Literal["reverse"] = "reverse") -> int:
    """Write a small run of your own into a folder; overwrites nothing.

    Parameters
    ----------
    directory
        The folder to write into; made if it does not exist.
    template
        What to start from: reverse (write three letters backwards).
    """
    from penstock.errors import ConfigError

    existing = [name for name in FILES if (directory / name).exists()]
    if existing:
        raise ConfigError(
            f"{directory} already has {', '.join(existing)}; nothing was written. "
            "Choose another folder, or remove them first"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run_name = _run_name(directory)
        source = resources.files("penstock.cli") / "templates" / template
        for name in FILES:
            text = (source / name).read_text(encoding="utf-8").replace(NAME, run_name)
            (directory / name).write_text(text.removeprefix(OUR_LICENCE), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write into {directory}: {error.strerror}") from None
    print(
        f"wrote {', '.join(FILES)} into {directory}\n\n"
        f"next:\n"
        f"  edit {directory / 'task.py'}\n"
        f"  penstock check {directory / 'run.yaml'}\n"
        f"  penstock run {directory / 'run.yaml'}"
    )
    return 0


def _run_name(directory: Path) -> str:
    """The folder's name in the signs that a run's name may have."""
    import re

    fitting = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.resolve().name)
    return fitting.strip("_-")[:64] or "my-run"
