# SPDX-License-Identifier: Apache-2.0
"""The folder of a Tinker server, and the keys of its clients.

    FOLDER/keys/            signs and checks the keys of this server's clients
    FOLDER/server.json      what it serves; the same at every start
    FOLDER/base/            the base model
    FOLDER/base-adapter/    an adapter of zeros: the base model itself, for all who sample it
    FOLDER/journal.sqlite   every request and result
    FOLDER/models/  states/  checkpoints/

The folder is the server: a copy of it, taken while it is down, goes on elsewhere. Imports neither
torch nor protobuf.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.durable import write_durably
from penstock.errors import ConfigError
from penstock.hub import TINY_QWEN3, parse_hub_model
from penstock.trainer.model_folders import init_model
from penstock.wire import keys
from penstock.wire.auth import Audience, Role, Signer, Verifier
from penstock.wire.codec import encode_json
from penstock.wire.denied import read_denied, write_denied

NAME = "tinker"
BASE_ADAPTER = "base-adapter"
KEY_PREFIX = "tml-"
"""The SDK takes only API keys that begin with this."""


class ServerFile(msgspec.Struct, frozen=True, kw_only=True):
    """`server.json`. Results are computed again from it after a crash, so it never changes."""

    model: str
    """Name of the base model, as clients call it."""
    init: str
    """What it was made from."""
    seed: int = 0
    threads: int = 1
    """Other numbers of threads give other bits."""
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerFolder:
    path: Path

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def base(self) -> Path:
        return self.path / "base"

    def read(self) -> ServerFile:
        """Raises ConfigError."""
        try:
            return msgspec.json.decode((self.path / "server.json").read_bytes(), type=ServerFile)
        except (OSError, msgspec.MsgspecError, RecursionError):
            raise ConfigError(
                f"{self.path} is not the folder of a Tinker server; `penstock tinker serve "
                f"{self.path} --model MODEL` makes it one"
            ) from None

    def prepare(self, wanted: ServerFile) -> ServerFile:
        """Make the folder, or check that it serves this already."""
        if (self.path / "server.json").exists():
            found = self.read()
            if found != wanted:
                raise ConfigError(
                    f"{self.path} serves {found.model} with other settings ({found}); serve "
                    "another model from another folder"
                )
            return found
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.base, ignore_errors=True)
        init_model(wanted.init, self.base, wanted.seed)
        Signer.create(self.keys, NAME)
        write_durably(self.path / "server.json", encode_json(wanted))  # last: it is complete
        return wanted

    @contextmanager
    def locked(self) -> Generator[None]:
        """One server at a time."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"another server serves {self.path}; stop it first") from None
            yield
        finally:
            os.close(descriptor)

    def issue_key(self, name: str, *, ttl_s: float) -> str:
        """A key for a client of this name; raises ConfigError for one that was revoked."""
        self.read()
        denied = read_denied(self.keys, keys.read_public(self.keys))
        if name in denied.subjects:
            raise ConfigError(f"--name {name}: this name was revoked, and stays so; choose another")
        signer = Signer.read(self.keys, NAME)
        return KEY_PREFIX + signer.mint(Role.TRAINER, [Audience.TINKER], ttl_s=ttl_s, subject=name)

    def revoke(self, name: str) -> None:
        """Refuse all keys of a name from now on."""
        self.read()
        denied = read_denied(self.keys, keys.read_public(self.keys))
        changes = {"subjects": denied.subjects | {name}, "serial": denied.serial + 1}
        write_denied(self.keys, msgspec.structs.replace(denied, **changes))

    def verifier(self) -> Verifier:
        return Signer.read(self.keys, NAME).verifier(Audience.TINKER)


def default_name(init: str) -> str:
    """How clients call a base model."""
    return init if parse_hub_model(init) or init == TINY_QWEN3 else Path(init).absolute().name
