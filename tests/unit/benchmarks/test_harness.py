# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import os

import pytest
from benchmarks.harness import Round, Server, load, result


def test_percentiles_are_of_the_calls_themselves() -> None:
    timed = Round(calls=200, seconds=2.0, cpu_s=0.1, latencies_s=[n / 1000 for n in range(200)])
    assert timed.calls_per_s == 100
    assert timed.percentile_ms(0.99) == pytest.approx(198)
    assert timed.percentile_ms(0.5) == pytest.approx(100)


async def test_a_load_keeps_so_many_calls_open() -> None:
    running, most, made = 0, 0, 0

    async def call() -> None:
        nonlocal running, most, made
        running, made = running + 1, made + 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    timed = await load(Server(url="", pid=os.getpid()), [call] * 50, connections=7)
    assert (made, most, timed.calls, len(timed.latencies_s)) == (50, 7, 50, 50)
    assert min(timed.latencies_s) >= 0.0005  # clocks of loops are coarser than those of callers


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    result(throughput_per_s=2500.123456, ratio=0.8, pairs=10)
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"throughput_per_s": 2500.1235, "ratio": 0.8, "pairs": 10}
