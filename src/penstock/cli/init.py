# SPDX-License-Identifier: Apache-2.0
"""`penstock init`: create a task, a reward and a config to start from."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Literal

FILES = ("run.yaml", "task.py", "README.md")
OUR_LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
"""Licence of the template; the user's copy has none."""
NAME = "{{name}}"
"""Placeholder for the run's name in the template."""


def init(directory: Path, /, *, template: Literal["reverse"] = "reverse") -> int:
    """Create a task, a reward and a config in a folder, and a schema with which editors complete
    the config. Existing files are never overwritten.

    Args:
        directory: Folder to write to; created if it does not exist.
        template: Template to copy: reverse (write three letters backwards).
    """
    from penstock.config.schema import FILE_NAME, schema_text
    from penstock.errors import ConfigError

    names = (*FILES, FILE_NAME)
    existing = [name for name in names if (directory / name).exists()]
    if existing:
        raise ConfigError(
            f"{directory} already has {', '.join(existing)}; no file was written. Choose another "
            "folder or delete them first"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        run_name = _run_name(directory)
        source = resources.files("penstock.cli") / "templates" / template
        for name in FILES:
            text = (source / name).read_text(encoding="utf-8").replace(NAME, run_name)
            (directory / name).write_text(text.removeprefix(OUR_LICENCE), encoding="utf-8")
        (directory / FILE_NAME).write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory}: {error.strerror}; choose another folder"
        ) from None
    print(
        f"wrote {', '.join(names)} to {directory}\n\n"
        f"next:\n"
        f"  edit {directory / 'task.py'}\n"
        f"  penstock check {directory / 'run.yaml'}\n"
        f"  penstock run {directory / 'run.yaml'}"
    )
    return 0


def _run_name(directory: Path) -> str:
    """The folder's name, reduced to characters that a run name may have."""
    allowed = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.resolve().name)
    return allowed.strip("_-")[:64] or "my-run"
