# SPDX-License-Identifier: Apache-2.0
"""TransferQueue with its SimpleStorage, in its own virtual environment, driven by lines of JSON:
`put`, `get` and `clear` answer the seconds they took, `fetch` the rows a consumer got."""

import asyncio
import json
import sys
import time
from importlib import import_module
from typing import Any

ray: Any = import_module("ray")
torch: Any = import_module("torch")
tq: Any = import_module("transfer_queue")
TensorDict: Any = import_module("tensordict").TensorDict
SPACE, COLUMN = "eval", "tokens"


async def put(keys: list[str], size: int) -> None:
    values = torch.arange(len(keys) * size // 4, dtype=torch.int32).view(len(keys), -1)
    fields = TensorDict({COLUMN: values}, batch_size=len(keys))
    call, what = (tq.async_kv_put, keys[0]) if len(keys) == 1 else (tq.async_kv_batch_put, keys)
    await call(what, SPACE, fields)


async def get(keys: list[str], size: int) -> None:
    found = await tq.async_kv_batch_get(keys=keys, partition_id=SPACE)
    assert found[COLUMN].nbytes == size * len(keys), "every row came back whole"


async def clear(keys: list[str], size: int) -> None:
    await tq.async_kv_clear(keys, SPACE)


async def run(call: Any, keys: list[str], size: int, batch: int, connections: int) -> float:
    parts = iter([keys[i : i + batch] for i in range(0, len(keys), batch)])

    async def connection() -> None:
        for part in parts:
            await call(part, size)

    began_at = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return time.perf_counter() - began_at


def fetch(batch: int) -> int:
    meta = tq.get_client().get_meta([COLUMN], batch, SPACE, task_name="trainer")
    return len(tq.get_client().get_data(meta)) if meta.size else 0


if __name__ == "__main__":
    ray.init(**({"address": sys.argv[1]} if sys.argv[1:] else {"num_cpus": 8}), log_to_driver=False)
    tq.init({"controller": {"polling_mode": True}})
    print("ready", ray.get_runtime_context().gcs_address, flush=True)
    for line in sys.stdin:
        what, *order = json.loads(line)
        call = {"put": put, "get": get, "clear": clear}.get(what)
        print(asyncio.run(run(call, *order)) if call else fetch(*order), flush=True)
