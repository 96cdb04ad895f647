# SPDX-License-Identifier: Apache-2.0
"""How much each credential has uploaded that no row refers to: unfinished uploads, and blobs whose
row never came.

Nodes only: other roles put rows as they like, within the quotas of their spaces. Unfinished uploads
count again after a restart of the service; finished ones are then forgotten here, and swept like
every blob without a row.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from penstock.dataflow.ledger.blobs import UNREFERENCED_TTL_S
from penstock.errors import Busy, Forbidden
from penstock.wire.auth import Credential, Role

MAX_UPLOADS = 1024
MAX_UPLOAD_BYTES = 4 << 30
RETRY_S = 10.0
_LIMITED = (Role.ROLLOUT, Role.GATEWAY)
_SUBJECT = re.compile(r"[A-Za-z0-9_-]{0,64}")


def owner_of(credential: Credential) -> str:
    """Part of a file name. A subject never begins with "~", so no node has the name of a role."""
    if credential.role not in _LIMITED:
        return f"~{credential.role}"
    if not _SUBJECT.fullmatch(credential.subject):
        raise Forbidden(
            f"this token is for {credential.subject[:80]!r}, which cannot be the name of a node; "
            "create one with `penstock token RUN --name NAME`"
        )
    return credential.subject


class UploadQuotas:
    def __init__(self, unfinished: Iterable[tuple[str, str, int]] = ()) -> None:
        """`unfinished`: owner, digest and bytes of uploads from before the start."""
        self._pending: dict[str, dict[str, tuple[int, float]]] = {}
        """By owner and digest: bytes, and when they were announced."""
        for owner, digest, size in unfinished:
            self._pending.setdefault(owner, {})[digest] = size, time.monotonic()

    def reserve(self, owner: str, digest: str, size: int) -> None:
        """Raise Busy when the owner has no room for an upload of this size. One that was announced
        larger before counts as that: its bytes may be here."""
        if owner.startswith("~"):
            return
        expired_at = time.monotonic() - UNREFERENCED_TTL_S
        kept = {d: k for d, k in self._pending.get(owner, {}).items() if k[1] > expired_at}
        others = {d: known for d, known in kept.items() if d != digest}
        size = max(size, kept.get(digest, (0, 0.0))[0])
        num_bytes = sum(known for known, _ in others.values())
        if len(others) >= MAX_UPLOADS or num_bytes + size > MAX_UPLOAD_BYTES:
            raise Busy(
                f"credential {owner!r} has {len(others)} uploads with {num_bytes} bytes that no "
                f"row refers to; the limit is {MAX_UPLOADS} and {MAX_UPLOAD_BYTES} bytes. Deliver "
                "their rows first",
                retry_after_s=RETRY_S,
            )
        self._pending[owner] = {**others, digest: (size, time.monotonic())}

    def release(self, owner: str, digest: str) -> None:
        """A row refers to the blob now, or its bytes are gone."""
        pending = self._pending.get(owner)
        if pending is not None and pending.pop(digest, None) and not pending:
            del self._pending[owner]
