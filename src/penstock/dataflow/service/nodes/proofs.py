# SPDX-License-Identifier: Apache-2.0
"""What a caller must prove before it acts as a node: its token is for that node, it is the process
that registered, it holds the lease.

Secrets are keyed hashes, so a partition stores none of them and knows them after a restart. Owns
the key; knows nothing of leases and of HTTP.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.dataflow.core.leasing import Grant
from penstock.errors import BadRequest, Forbidden, NotFound
from penstock.types import GroupId, NodeId, RowId, subject_of_node
from penstock.wire.auth import Credential

KEY_FILE = "node-secrets.key"
KEY_BYTES = 32
SECRET_BYTES = 16
_NODE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]+)*", re.ASCII)
MAX_NODE_ID_CHARS = 128


def check_node_id(node_id: NodeId) -> None:
    if len(node_id) > MAX_NODE_ID_CHARS or not _NODE_ID.fullmatch(node_id):
        raise BadRequest(
            f"invalid node_id {node_id[:80]!r}; expected the name in your token, or that name and "
            f'".SUFFIX": letters, digits, "_", "-" and single ".", {MAX_NODE_ID_CHARS} characters'
        )


def require_node(credential: Credential, node_id: NodeId) -> None:
    """Raise Forbidden unless the token is for this node."""
    if not credential.subject:
        raise Forbidden(
            "this token has no subject, so it cannot act as a node; create one with "
            "`penstock token RUN --name NAME`"
        )
    if subject_of_node(node_id) != credential.subject:
        raise Forbidden(
            f"this token is for {credential.subject!r} and cannot act as node {node_id[:80]!r}; "
            f"use node_id {credential.subject!r} or {credential.subject + '.SUFFIX'!r}"
        )


class NodeSecrets:
    """Boot secrets and lease secrets of one partition of one run."""

    def __init__(self, key: bytes, *, run: str, partition: int) -> None:
        """A copy of the key in another run or partition makes other secrets."""
        own_key = blake3(f"{partition} {run}".encode(), key=key).digest()
        self._mac = blake2b(key=own_key, digest_size=SECRET_BYTES)  # cheaper to copy than BLAKE3
        self._hash = lru_cache(maxsize=4096)(self._mac_of)  # all slots of a group have the same

    @classmethod
    def open(cls, folder: Path, *, run: str, partition: int) -> NodeSecrets:
        """Read the key of this ledger folder; make it the first time."""
        path = folder / KEY_FILE
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            key = b""
        if len(key) != KEY_BYTES:  # none yet, or a crash cut its first write short
            key = secrets.token_bytes(KEY_BYTES)
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(key)
                out.flush()
                os.fsync(descriptor)
            partial.rename(path)
        return cls(key, run=run, partition=partition)

    def of_boot(self, node_id: NodeId, boot_id: str) -> str:
        return self._hash(f"boot {node_id} {boot_id}")

    def of_lease(self, node_id: NodeId, group_id: GroupId, epoch: int) -> str:
        """One for all slots of a group that the node got in one epoch: which of them it holds, the
        lease says."""
        return self._hash(f"lease {node_id} {group_id} {epoch}")

    def require_boot(self, node_id: NodeId, boot_id: str, secret: str) -> None:
        """Raise NotFound unless this is the secret of the process: a holder of the token registers
        again, as does a node whose partition lost its key."""
        if not _is_same(secret, self.of_boot(node_id, boot_id)):
            raise NotFound(
                f"node {node_id[:80]} is not registered with this secret; POST /v1/nodes, then "
                "send the `secret` of the answer"
            )

    def is_of_lease(self, node_id: NodeId, row_id: RowId, secret: str) -> bool:
        group_id, _, rest = row_id.partition(".")
        epoch = rest.rpartition(".")[2]
        return _is_same(secret, self._hash(f"lease {node_id} {group_id} {epoch}"))

    def with_secrets(self, node_id: NodeId, grants: Sequence[Grant]) -> tuple[Grant, ...]:
        made: dict[tuple[GroupId, int], str] = {}
        for grant in grants:
            group = grant.group_id, grant.epoch
            if group not in made:
                made[group] = self.of_lease(node_id, *group)
        replace = msgspec.structs.replace
        return tuple([replace(g, secret=made[g.group_id, g.epoch]) for g in grants])

    def _mac_of(self, text: str) -> str:
        # "surrogatepass": a malformed id gets a secret too, which no caller ever sees.
        mac = self._mac.copy()
        mac.update(text.encode("utf-8", "surrogatepass"))
        return mac.hexdigest()


def _is_same(secret: str, expected: str) -> bool:
    return compare_digest(secret.encode("utf-8", "replace"), expected.encode())
