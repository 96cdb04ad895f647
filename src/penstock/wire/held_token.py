# SPDX-License-Identifier: Apache-2.0
"""The token that a process holds, from a file or newly made, and replaced while the process runs.

Never shows the token in its repr, and never passes it to a child process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.errors import ConfigError
from penstock.wire.auth import expires_at
from penstock.wire.keys import write_secret

_log = structlog.get_logger(__name__)
RELOAD_S = 1.0
"""How often to look for a new token once the held one is old."""
MAX_FILE_BYTES = 1 << 16


class HeldToken:
    """`load` returns the newest token that there is."""

    def __init__(self, load: Callable[[], str], store: Callable[[str], None] | None = None) -> None:
        self._load = load
        self._store = store
        self._reload_at = 0.0
        self._token = ""
        self._hold(load())

    @classmethod
    def from_file(cls, path: Path) -> HeldToken:
        """A regular file is read again later, and gets renewed tokens; a pipe is read once."""
        if path.is_file():
            return cls(lambda: _read(path), lambda token: write_secret(path, token))
        token = _read(path)
        return cls(lambda: token)

    def __repr__(self) -> str:
        return "HeldToken(…)"

    def value(self) -> str:
        if time.time() >= self._reload_at:
            self.reload()
        return self._token

    def reload(self) -> str:
        """The newest token; the held one if there is no other."""
        try:
            token = self._load()
        except (ConfigError, OSError):  # the file is being replaced, or gone: the service decides
            token = self._token
        self._hold(token)
        return token

    def replace(self, token: str) -> None:
        """Hold a renewed token, also for the next start of this process."""
        self._hold(token)
        try:
            if self._store is not None:
                self._store(token)
                return
        except OSError as error:
            _log.warning("renewed token not written to its file", error=str(error))
        self._load = lambda: token

    def _hold(self, token: str) -> None:
        now, end = time.time(), expires_at(token)
        self._token = token
        half_life_s = 0.0 if end is None else (end - now) / 2
        self._reload_at = float("inf") if end is None else now + max(RELOAD_S, half_life_s)


Token = str | HeldToken
"""A token for one call, or the one that a process holds for long."""


def held(token: Token) -> HeldToken:
    return token if isinstance(token, HeldToken) else HeldToken(lambda: token)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(MAX_FILE_BYTES).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise ConfigError(
            f"cannot read the token file {path}: {error.strerror}; write a token to it with "
            f"`penstock token RUN --out {path}`"
        ) from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{path} does not contain one token; write one to it with "
            f"`penstock token RUN --out {path}`"
        )
    return token
