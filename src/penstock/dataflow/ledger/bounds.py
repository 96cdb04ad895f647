# SPDX-License-Identifier: Apache-2.0
"""Limits on memory and disk, and what stops first when they are reached.

Above the high-water mark new leases stop, while leased work may still be delivered. Above the cap
deliveries are refused before they change anything. Acknowledged data is never evicted to make room.
Also owns the reserve: disk space kept free so that sealing, commits and deletes continue when the
disk is full.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.dataflow.ledger.segments import DISK_FULL_ERRNOS
from penstock.errors import Busy, StorageFull

RESERVE_BYTES = 64 << 20
DISK_RETRY_S = 5.0
"""Retry hint for a full disk, which usually needs an operator."""
STATVFS_INTERVAL_S = 0.05
MEMORY_RETRY_S = 0.5
"""Retry hint for full memory, which drains at disk speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Current use of memory and disk."""

    queued_bytes: int
    """Payload accepted and not yet durable; all of it is in memory."""
    free_bytes: int
    """Free bytes on the ledger's disk, excluding the reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLimits:
    """Decides what may happen at a given usage; pure."""

    max_queued_bytes: int = 256 << 20
    high_water_queued_bytes: int = 128 << 20
    """New leases stop here."""
    min_free_bytes: int = RESERVE_BYTES
    """Deliveries stop when less than this is free, not counting the reserve."""
    low_water_free_bytes: int = 8 * RESERVE_BYTES
    """New leases stop here, so that running work still has room for its results."""

    def __post_init__(self) -> None:
        if not 0 < self.high_water_queued_bytes <= self.max_queued_bytes:
            raise ValueError("the memory mark must be above 0 and at most the memory cap")
        if not 0 <= self.min_free_bytes <= self.low_water_free_bytes:
            raise ValueError("low_water_free_bytes must be at least min_free_bytes")

    def may_lease(self, usage: Usage) -> bool:
        """May new work start?"""
        return (
            self._refusal(usage, 0) is None
            and usage.queued_bytes < self.high_water_queued_bytes
            and usage.free_bytes >= self.low_water_free_bytes
        )

    def check_delivery(self, usage: Usage, payload_bytes: int) -> None:
        """Raise Busy (429) or StorageFull (507) when there is no room for this payload. Call it
        before changing anything, so that a refused call can simply be repeated."""
        refusal = self._refusal(usage, payload_bytes)
        if refusal is not None:
            raise refusal

    def _refusal(self, usage: Usage, payload_bytes: int) -> Busy | StorageFull | None:
        # Queued payload will soon be on disk, so it counts there too.
        left = usage.free_bytes - usage.queued_bytes - payload_bytes
        if left < self.min_free_bytes:
            return StorageFull(
                f"the ledger's disk has {usage.free_bytes >> 20} MB free besides its reserve; "
                f"deliveries stop below {self.min_free_bytes >> 20} MB; free space, then retry",
                retry_after_s=DISK_RETRY_S,
            )
        # A call above the cap is accepted when nothing is queued, or it could never succeed.
        if usage.queued_bytes and usage.queued_bytes + payload_bytes > self.max_queued_bytes:
            return Busy(
                f"{usage.queued_bytes >> 20} MB are waiting to be written, the limit is "
                f"{self.max_queued_bytes >> 20} MB; retry shortly",
                retry_after_s=MEMORY_RETRY_S,
            )
        return None


class DiskReserve:
    """A preallocated file in the ledger's folder: released when the disk is full, allocated again
    when there is room. Used only by the ledger's writer thread."""

    def __init__(self, folder: Path, num_bytes: int = RESERVE_BYTES) -> None:
        self._path = folder / "reserve"
        self._num_bytes = num_bytes
        self._folder = folder
        self.is_held = False
        self._seen = (float("-inf"), 0)

    @property
    def missing_bytes(self) -> int:
        return 0 if self.is_held else self._num_bytes

    def free_bytes(self) -> int:
        """Free bytes for non-root users, excluding the reserve."""
        found = os.statvfs(self._folder)
        self._seen = (time.monotonic(), found.f_bavail * found.f_frsize)
        return self._seen[1] - self.missing_bytes

    def cached_free_bytes(self) -> int:
        """As `free_bytes`, but cheap enough for every delivery; the disk fills by less than the
        reserve before the next refresh."""
        at, free = self._seen
        is_fresh = time.monotonic() < at + STATVFS_INTERVAL_S
        return free - self.missing_bytes if is_fresh else self.free_bytes()

    def allocate_if_room(self) -> None:
        """Allocate the reserve if the disk has room for it twice; never take the last free
        space."""
        if self.is_held or self.free_bytes() < self._num_bytes:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._num_bytes)
            self.is_held = True
        except OSError as error:
            self._path.unlink()
            if error.errno not in DISK_FULL_ERRNOS:
                raise
        finally:
            os.close(descriptor)

    def release(self) -> bool:
        """Free the reserved space; False when it was not allocated."""
        was_held, self.is_held = self.is_held, False
        self._path.unlink(missing_ok=True)
        return was_held
