# SPDX-License-Identifier: Apache-2.0
"""The tokens of the services that a launcher starts: one file each, in `keys/tokens`.

Each is valid for an hour and replaced well before that; its service reads the file again. Owns
these files; a token is in no command line, environment or log.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Role, read_unverified
from penstock.wire.keys import make_private_folder, write_secret

TOKEN_FILE_ENV = "PENSTOCK_TOKEN_FILE"
TOKEN_TTL_S = 3600.0
RENEW_S = TOKEN_TTL_S / 4


@contextmanager
def changing_keys(folder: RunFolder) -> Generator[None]:
    """One change of keys and tokens at a time, over all processes."""
    try:
        lock = os.open(folder.keys, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"no keys in {folder.keys}: {error.strerror}; create, revoke and rotate tokens on the "
            "machine where the run was started, as the user who started it"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_token(folder: RunFolder, path: Path, run: str, role: Role, *, subject: str) -> None:
    with changing_keys(folder):
        _write(folder, path, run, role, subject)


def _write(folder: RunFolder, path: Path, run: str, role: Role, subject: str) -> None:
    make_private_folder(folder.service_tokens)
    write_secret(path, folder.token(run, role, ttl_s=TOKEN_TTL_S, subject=subject))


def rewrite_tokens(folder: RunFolder, run: str) -> None:
    """Replace every token, with the newest signing key; inside `changing_keys`."""
    if not folder.service_tokens.is_dir():
        return
    for path in sorted(folder.service_tokens.iterdir()):
        credential = read_unverified(path.read_text().strip())
        if credential is not None:
            _write(folder, path, run, credential.role, credential.subject)
