# SPDX-License-Identifier: Apache-2.0
"""A reader that leases rows, says how many it got, and never uses them: somebody kills it."""

from __future__ import annotations

import asyncio
import sys
import time

from penstock.dataflow.client.rows import RowsClient

NAME, SPACE, COLUMN = "trainer", "eval", "tokens"
TTL_S = 1.0


async def lease_rows(url: str, token: str, num: int) -> int:
    async with RowsClient(url, token) as client:
        reader = await client.reader(NAME, reads=[COLUMN], space=SPACE, ttl_s=TTL_S)
        return len(await reader.lease(num))


if __name__ == "__main__":
    print(asyncio.run(lease_rows(sys.argv[1], sys.argv[2], int(sys.argv[3]))), flush=True)
    time.sleep(3600)
