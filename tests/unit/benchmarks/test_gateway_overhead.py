# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the gateway: its bare side is bare, and its figures see a slow gateway."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from benchmarks import gateway_upstream
from benchmarks.gateway_load import TimedAnswer, Window
from benchmarks.gateway_overhead import Load, Pairs, checked, paced_load
from benchmarks.harness import process
from tests.unit.gateway.chatml import write_snapshot

SLEEP_MS = 20.0
LETTERS = ("0", "25")


def test_the_bare_server_is_short_and_knows_nothing_of_penstock() -> None:
    text = Path(gateway_upstream.__file__).read_text()
    assert len(text.splitlines()) <= 100
    imported = [
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    ]
    assert not [name for name in imported if name.split(".")[0] in ("penstock", "benchmarks")]


@pytest.mark.parametrize("is_packed", [True, False])
def test_tokens_are_counted_as_each_side_writes_them(is_packed: bool) -> None:
    ours = TimedAnswer(0.1, 0.2, b'{"usage":{"prompt_tokens":7,"completion_tokens":12}}')
    body = gateway_upstream.choice(12, False, 0, 0, 12, "v", is_packed)
    engines = TimedAnswer(0.1, 0.2, body)
    assert ours.num_tokens == engines.num_tokens == 12
    window = Window(seconds=2.0, cpu_s=0.0, calls=[ours, engines])
    assert (window.calls_per_s, window.tokens_per_s) == (1.0, 12.0)


def test_an_answer_cut_short_spoils_the_figure() -> None:
    of = Load(num_calls=1, num_clients=1, num_tokens=13)
    window = Window(
        seconds=1.0, cpu_s=0.0, calls=[TimedAnswer(0.1, 0.2, b'"completion_tokens":12')]
    )
    with pytest.raises(RuntimeError, match="12"):
        checked([(window, window)], of)


def test_clients_think_as_long_as_the_rate_asks() -> None:
    of = paced_load(100.0, 3.0)
    assert of.num_calls == 300
    mean_delay_s = sum(of.delay_ms) / 2e3
    assert of.num_clients / (of.think_s + mean_delay_s) == pytest.approx(100.0)


@pytest.mark.slow
async def test_added_latency_rises_when_the_gateway_sleeps(tmp_path: Path) -> None:
    """Nothing else differs, and both gateways are asked in turns."""
    folder = str(write_snapshot(tmp_path))
    loads = [
        Load(num_calls=16, num_clients=2, num_tokens=100, delay_ms=(0, 9)),
        Load(num_calls=4, num_clients=2, num_tokens=5, is_streamed=True),
    ]
    with (
        process("benchmarks.gateway_upstream", *LETTERS) as engine,
        process("benchmarks.gateway_service", engine.url, folder) as fast,
        process(
            "benchmarks.gateway_service", engine.url, folder, "--slow-ms", str(SLEEP_MS)
        ) as slow,
    ):
        sides = [Pairs(engine, gateway, tmp_path) for gateway in (fast, slow)]
        for of in loads:
            [fast_ms, slow_ms] = [
                min(
                    ours.first_ms(0.1) - direct.first_ms(0.1)
                    for direct, ours in checked(await pairs.run(2, of), of)
                )
                for pairs in sides
            ]
            assert slow_ms - fast_ms > SLEEP_MS / 2, (of, fast_ms, slow_ms)
