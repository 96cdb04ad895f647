# SPDX-License-Identifier: Apache-2.0
"""The deny list of a run: revoked tokens, revoked names, replaced keys.

The root key signs it, with a serial number. Services beside the run folder read the file there;
others keep a copy, which they fetch from a service of the run. A list with another signature or an
older serial number is never used.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from penstock.errors import ConfigError
from penstock.wire.keys import check_signed, parse_public_key, read_root, sign, write_secret

FILE = "denied"
ROUTE = "/v1/denied"
CHECK_S = 1.0
"""How often to look for a new list."""
_KIND = "penstock-denied1"
_log = structlog.get_logger(__name__)


class Denied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    serial: int = 0
    """One more with each change."""
    tokens: dict[str, str] = {}
    """Ids of revoked tokens, each with the name that it was for, where known."""
    subjects: frozenset[str] = frozenset()
    """Names whose tokens are all revoked."""
    keys: dict[str, float] = {}
    """Ids of replaced keys, each with the time from which its tokens are refused."""


class DenyList:
    """The newest list, by this file; reads the file again when it changes."""

    def __init__(self, root: Ed25519PublicKey, path: Path | None) -> None:
        self._root = root
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._next_check_at = 0.0
        self._current = Denied()
        self.text = ""
        """The signed list, for services elsewhere; empty if nothing was ever denied."""
        self._read(is_start=True)

    def current(self) -> Denied:
        if time.monotonic() >= self._next_check_at:
            self._read()
        return self._current

    def install(self, text: str) -> None:
        """Use a list that a service of the run sent, and keep it. ValueError for one that the root
        key did not sign; an older one is ignored."""
        if text and self._use(text) and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_secret(self._path, text)

    def _use(self, text: str) -> bool:
        found = msgspec.json.decode(check_signed(self._root, _KIND, text), type=Denied)
        if found.serial <= self._current.serial:
            return False
        self._current, self.text = found, text
        return True

    def _read(self, *, is_start: bool = False) -> None:
        self._next_check_at = time.monotonic() + CHECK_S
        if self._path is None:
            return
        try:
            found = self._path.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp != self._stamp:
                content = self._path.read_bytes()  # which may fail now, and not later
                self._stamp = stamp
                self._use(content.decode().strip())
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            message = (
                f"{self._path} is not a deny list of this run ({error}); restore it, or write it "
                "again with `penstock token revoke RUN`"
            )
            if is_start:
                raise ConfigError(message) from None
            _log.error("deny list not read; the last one stays in use", why=message)


def deny_list(public_key: str, path: Path) -> DenyList:
    return DenyList(parse_public_key(public_key.strip()), path)


def read_denied(folder: Path, root: Ed25519PublicKey) -> Denied:
    return DenyList(root, folder / FILE).current()


def write_denied(folder: Path, denied: Denied) -> None:
    """Needs the root key."""
    write_secret(folder / FILE, sign(read_root(folder), _KIND, msgspec.json.encode(denied)))
