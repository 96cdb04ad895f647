# SPDX-License-Identifier: Apache-2.0
"""Reads task.toml of a Harbor task: time limits, sizes and environment.

Refuses by name what a sandbox of ours cannot give: steps, other systems, accelerators, services,
separate verifiers. Metadata is not looked at."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.durable import read_regular
from penstock.errors import ConfigError

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_REFUSED = {
    ("steps",): "tasks of several steps",
    ("environment", "gpus"): "accelerators",
    ("environment", "tpu"): "accelerators",
    ("environment", "mcp_servers"): "tool servers of a task",
    ("environment", "healthcheck"): "health checks",
    ("environment", "skills_dir"): "skills",
    ("verifier", "environment"): "a verifier with its own image",
    ("verifier", "collect"): "collecting from services",
}
"""Keys that change what a task is, and what they ask for."""
MAX_BYTES = 1 << 16
"""Of task.toml."""
MAX_KEY_PARTS = 32
"""Of a dotted key: Python's parser takes the square of their number, of memory too."""
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.){0,64}+"|'[^'\n]{0,64}+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}")
"""Longer quoted parts are few, in a file of this size."""
MAX_SIZE_MB = 1 << 30
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    docker_image: str
    """An image made beforehand; empty if the Dockerfile says all."""
    workdir: str
    """Overrides the WORKDIR of the Dockerfile, unless empty."""
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    agent_timeout_s: float | None
    verifier_timeout_s: float
    memory_mb: int | None
    storage_mb: int | None


def read_settings(path: Path) -> Settings:
    """Raises ConfigError."""
    try:
        text = read_regular(path, MAX_BYTES).decode()
        if long := _LONG_KEY.search(text):
            raise ValueError(f"{long[0][:60]!r} begins a key of more than {MAX_KEY_PARTS} parts")
        found = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; correct it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct it") from None
    for keys, what in _REFUSED.items():
        if _at(found, keys):
            raise ConfigError(f"{path}: {'.'.join(keys)}: {what} are not supported; remove it")
    environment, verifier = _section(found, "environment"), _section(found, "verifier")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ConfigError(f"{path}: environment.os: only linux is supported")
    for name, section in (("agent", _section(found, "agent")), ("verifier", verifier)):
        if section.get("user") not in (None, "root", 0):
            text = f"{path}: {name}.user: programs have one user, who owns the task's folders; "
            raise ConfigError(f"{text}remove it")
    return Settings(
        docker_image=str(environment.get("docker_image") or ""),
        workdir=str(environment.get("workdir") or ""),
        env=_env(path, "environment", environment),
        verifier_env=_env(path, "verifier", verifier),
        agent_timeout_s=_seconds(path, "agent", _section(found, "agent"), None),
        verifier_timeout_s=_seconds(path, "verifier", verifier, 600.0) or 600.0,
        memory_mb=_size(path, environment, "memory"),
        storage_mb=_size(path, environment, "storage"),
    )


def _at(found: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = found
    for key in keys:
        value = cast(Mapping[str, Any], value).get(key) if isinstance(value, Mapping) else None
    return value


def _section(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = found.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}


def _seconds(
    path: Path, name: str, section: Mapping[str, Any], default: float | None
) -> float | None:
    value: Any = section.get("timeout_sec", default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e8:
        raise ConfigError(f"{path}: {name}.timeout_sec: {value!r} is not a time; write seconds")
    return float(value)


def _size(path: Path, environment: Mapping[str, Any], name: str) -> int | None:
    """Mebibytes: `memory_mb = 2048`, or `memory = "2G"` as older tasks have it."""
    given: Any = environment.get(f"{name}_mb", environment.get(name))
    if given is None:
        return None
    value = given
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[KMG]", value.strip().upper()):
        text = value.strip().upper()
        value = int(min(float(text[:-1]) * _SIZES[text[-1]], MAX_SIZE_MB + 1))
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE_MB:
        raise ConfigError(
            f"{path}: environment.{name}_mb: {str(given)[:100]!r} is not a size; write mebibytes, "
            f"at most {MAX_SIZE_MB:,}"
        )
    return value


def _env(path: Path, name: str, section: Mapping[str, Any]) -> dict[str, str]:
    values = _section(section, "env")
    resolved = {key: str(value) for key, value in values.items()}
    for key, value in resolved.items():
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            continue
        if match[2] is None:
            raise ConfigError(
                f"{path}: {name}.env.{key}: {value} reads a variable of this machine, which tasks "
                "may not; write the value, or a default as ${NAME:-value}"
            )
        resolved[key] = match[2]
    return resolved
