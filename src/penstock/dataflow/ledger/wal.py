# SPDX-License-Identifier: Apache-2.0
"""Detects damage in the middle of SQLite's write-ahead log, before the database is opened.

SQLite reads the log up to the first frame whose checksum fails and silently drops the rest, and its
last connection deletes the log. After a crash that is right for an unfinished write, but a bit flip
earlier in the log would drop acknowledged commits. With `synchronous=FULL` at most one transaction
is unfinished, so two commits after the bad frame prove damage. A bit flip in the very last
transaction cannot be distinguished from a torn write.

Never open the `-shm` or `.db` file of a database this process uses: closing it would drop SQLite's
own locks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.errors import StoreError

HEADER_BYTES = 32
FRAME_BYTES = 24
"""Size of a frame header: page number, size after a commit or 0, two salts, two checksums."""
MASK = 0xFFFFFFFF
MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""Gives the byte order of the checksums."""


def check_wal(database: Path) -> None:
    """Raise StoreError when acknowledged commits follow a damaged frame."""
    path = database.with_name(database.name + "-wal")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if (num := _commits_after_damage(data)) > 1:
        raise StoreError(
            f"{path} is damaged: {num} commits follow a frame with a bad checksum, and SQLite "
            "would drop them; restore it from a backup, or delete the log to accept the loss"
        )


def _commits_after_damage(data: bytes) -> int:
    if len(data) <= HEADER_BYTES:
        return 0
    size = int.from_bytes(data[8:12], "big")
    order = MAGIC.get(int.from_bytes(data[:4], "big"))
    head = np.frombuffer(data[:24], order or "<u4").reshape(1, -1)
    sums = _chain(0, 0, head)[-1]
    if order is None or sums != _words(data, 24) or size not in (512 << n for n in range(8)):
        return _commits(data, size or 4096, from_frame=0, salt=None)
    num = (len(data) - HEADER_BYTES) // (FRAME_BYTES + size)
    frames = np.frombuffer(data, np.uint8, num * (FRAME_BYTES + size), HEADER_BYTES)
    frames = frames.reshape(num, -1)
    summed = np.concatenate([frames[:, :8], frames[:, FRAME_BYTES:]], axis=1)
    words = np.ascontiguousarray(summed).view(order)
    salt = data[16:24]
    for index, found in enumerate(_chain(*sums, words)):
        at = HEADER_BYTES + index * (FRAME_BYTES + size)
        if data[at + 8 : at + 16] != salt or found != _words(data, at + 16):
            return _commits(data, size, from_frame=index, salt=salt)
    return 0


def _commits(data: bytes, size: int, *, from_frame: int, salt: bytes | None) -> int:
    """Commit frames of this log generation, starting at `from_frame`; all of them if the header is
    bad."""
    step = FRAME_BYTES + size
    starts = range(HEADER_BYTES + from_frame * step, len(data) - step + 1, step)
    return sum(
        data[at + 4 : at + 8] != bytes(4) and salt in (None, data[at + 8 : at + 16])
        for at in starts
    )


def _words(data: bytes, at: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")


def _chain(s1: int, s2: int, words: np.ndarray) -> list[tuple[int, int]]:
    """SQLite's running checksum after each row of words. For each pair (a, b): s1 += a + s2,
    s2 += b + s1, modulo 2**32. It is linear, so each row contributes one product."""
    num = words.shape[1]
    weights = np.zeros((num, 2), np.uint32)
    p1, p2, q1, q2 = 1, 0, 0, 1  # weight of one unit in s1, and in s2, at the end
    for index in range(num - 2, -1, -2):
        # b enters s2 alone; a enters s1, and through it s2
        weights[index + 1] = q1, q2
        weights[index] = (p1 + q1) & MASK, (p2 + q2) & MASK
        p1, p2, q1, q2 = p1 + q1, p2 + q2, p1 + 2 * q1, p2 + 2 * q2
        p1, p2, q1, q2 = p1 & MASK, p2 & MASK, q1 & MASK, q2 & MASK
    shares = words.astype(np.uint32) @ weights
    chain: list[tuple[int, int]] = []
    for share1, share2 in shares.tolist():
        s1, s2 = (p1 * s1 + q1 * s2 + share1) & MASK, (p2 * s1 + q2 * s2 + share2) & MASK
        chain.append((s1, s2))
    return chain
