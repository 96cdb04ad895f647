# SPDX-License-Identifier: Apache-2.0
"""How full memory and disk may become, and what stops first.

Above the mark new leases stop; what is leased may still be delivered; above the cap deliveries are
refused at the door, before anything changed. Acknowledged data is never evicted to make room. Also
owns the reserve: space set aside so that sealing, commits and deletes go on when the disk is full.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.dataflow.ledger.segments import DISK_FULL_ERRNOS
from penstock.errors import Busy, StorageFull

RESERVE_BYTES = 64 << 20
DISK_RETRY_S = 5.0
"""Space comes back when somebody makes some."""
STATVFS_INTERVAL_S = 0.05
MEMORY_RETRY_S = 0.5
"""The queue drains as fast as the disk writes."""


class AdmissionLevel(StrEnum):
    OPEN = "open"
    NO_LEASES = "no_leases"
    """Above the mark: held work may be delivered, new work does not start."""
    REFUSE = "refuse"
    """Nothing more is taken in; reading, sealing, commits and deletes go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How full it is at this moment."""

    queued_bytes: int
    """Payload taken in and not yet durable; all of it is in memory."""
    free_bytes: int
    """On the ledger's disk, with the reserve set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLimits:
    """Levels as a pure function of the usage."""

    max_queued_bytes: int = 256 << 20
    high_water_queued_bytes: int = 128 << 20
    """New leases stop here."""
    min_free_bytes: int = RESERVE_BYTES
    """Deliveries stop when less than this is left beside the reserve."""
    low_water_free_bytes: int = 8 * RESERVE_BYTES
    """New leases stop here, so that what runs already finds room when it is done."""

    def __post_init__(self) -> None:
        if not 0 < self.high_water_queued_bytes <= self.max_queued_bytes:
            raise ValueError("the memory mark lies above 0 and at most at the memory cap")
        if not 0 <= self.min_free_bytes <= self.low_water_free_bytes:
            raise ValueError("the disk mark leaves at least as much free as deliveries need")

    def level(self, usage: Usage) -> AdmissionLevel:
        if self._refusal(usage, 0) is not None:
            return AdmissionLevel.REFUSE
        if (
            usage.queued_bytes >= self.high_water_queued_bytes
            or usage.free_bytes < self.low_water_free_bytes
        ):
            return AdmissionLevel.NO_LEASES
        return AdmissionLevel.OPEN

    def may_lease(self, usage: Usage) -> bool:
        """May new work start?"""
        return self.level(usage) is AdmissionLevel.OPEN

    def check_delivery(self, usage: Usage, payload_bytes: int) -> None:
        """Raise Busy (429) or StorageFull (507) when this much more payload has no room. To be
        asked before anything changes, so that a refused call can simply be made again."""
        refusal = self._refusal(usage, payload_bytes)
        if refusal is not None:
            raise refusal

    def _refusal(self, usage: Usage, payload_bytes: int) -> Busy | StorageFull | None:
        # What is queued will be on the disk soon, so it counts there too.
        left = usage.free_bytes - usage.queued_bytes - payload_bytes
        if left < self.min_free_bytes:
            return StorageFull(
                f"the ledger's disk has {usage.free_bytes >> 20} MB left beside its reserve, and "
                f"deliveries stop at {self.min_free_bytes >> 20} MB; make space and call again",
                retry_after_s=DISK_RETRY_S,
            )
        # A call larger than the whole cap is let in alone, or it could never be made.
        if usage.queued_bytes and usage.queued_bytes + payload_bytes > self.max_queued_bytes:
            return Busy(
                f"{usage.queued_bytes >> 20} MB wait to be written, at most "
                f"{self.max_queued_bytes >> 20} MB may; call again shortly",
                retry_after_s=MEMORY_RETRY_S,
            )
        return None


class DiskReserve:
    """A file of allocated space beside the ledger: given up when the disk is full, taken back when
    there is room. Lives in the ledger's writer thread."""

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
        """On this disk, for others than root, with the reserve set aside."""
        found = os.statvfs(self._folder)
        self._seen = (time.monotonic(), found.f_bavail * found.f_frsize)
        return self._seen[1] - self.missing_bytes

    def cached_free_bytes(self) -> int:
        """As above, but cheap enough for every delivery; a disk fills less than the reserve in the
        meantime."""
        at, free = self._seen
        is_fresh = time.monotonic() < at + STATVFS_INTERVAL_S
        return free - self.missing_bytes if is_fresh else self.free_bytes()

    def take(self) -> None:
        """Hold the reserve, if there is room for it twice: never the last space there is."""
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
        """Give the space back to the disk; False when it was not held."""
        was_held, self.is_held = self.is_held, False
        self._path.unlink(missing_ok=True)
        return was_held
