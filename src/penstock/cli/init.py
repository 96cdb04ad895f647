# SPDX-License-Identifier: Apache-2.0
"""`penstock init`: create a task, a reward and a config to start from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

OUR_LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
"""Licence of the template; the user's copy has none."""
NAME = "{{name}}"
"""Placeholder for the run's name in the template."""
SKIPPED = "__pycache__"

Template = Literal["single-turn", "multi-turn-tool", "external-agent", "multi-policy", "harbor"]


def init(directory: Path, /, *, template: Template = "single-turn") -> int:
    """Create a task, a reward and a config in a folder, and a schema with which editors complete
    the config. Existing files are never overwritten.

    Args:
        directory: Folder to write to; created if it does not exist.
        template: Template to copy: single-turn (one prompt, one answer), multi-turn-tool (a
            workflow that calls a tool between two answers), external-agent (any program that calls
            the model over HTTP), multi-policy (two models with a reward each), harbor (tasks in the
            Harbor format, in sandboxes).
    """
    from penstock.config.schema import FILE_NAME, schema_text
    from penstock.errors import ConfigError

    files = dict(_files(resources.files("penstock.cli") / "templates" / template))
    existing = [name for name in (*files, FILE_NAME) if (directory / name).exists()]
    if existing:
        raise ConfigError(
            f"{directory} already has {', '.join(existing)}; no file was written. Choose another "
            "folder or delete them first"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, files)
        (directory / FILE_NAME).write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory}: {error.strerror}; choose another folder"
        ) from None
    tops = dict.fromkeys(name.split("/")[0] for name in (*files, FILE_NAME))
    edited = next(name for name in ("task.py", "agent.py") if name in files)
    print(
        f"wrote {', '.join(tops)} to {directory}\n\n"
        f"next:\n"
        f"  edit {directory / edited}\n"
        f"  {_command('check', directory, template)}\n"
        f"  {_command('run', directory, template)}"
    )
    return 0


def _command(verb: str, directory: Path, template: Template) -> str:
    """Templates with files beside the config are started where these are."""
    if template in ("external-agent", "harbor"):
        return f"cd {directory} && penstock {verb} run.yaml"
    return f"penstock {verb} {directory / 'run.yaml'}"


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Every file of a template by its path."""
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_file():
            yield above + entry.name, entry
        elif entry.name != SKIPPED:
            yield from _files(entry, f"{above}{entry.name}/")


def _write(directory: Path, files: dict[str, Traversable]) -> None:
    run_name = _run_name(directory)
    for name, source in files.items():
        text = source.read_text(encoding="utf-8").replace(NAME, run_name)
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.removeprefix(OUR_LICENCE), encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)


def _run_name(directory: Path) -> str:
    """The folder's name, reduced to characters that a run name may have."""
    allowed = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.resolve().name)
    return allowed.strip("_-")[:64] or "my-run"
