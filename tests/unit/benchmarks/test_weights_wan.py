# SPDX-License-Identifier: Apache-2.0
"""The benchmark over a long thin link: its figures are those of the arrivals, and what it calls
missing is what a killed node lacks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks import weights_wan
from benchmarks.weights_messages import Arrival
from benchmarks.weights_wan import Measured, missing_bytes, percentile_ms, settings
from blake3 import blake3

from penstock.weights.manifest import FileEntry
from penstock.weights.pulling.partial import Partial, piece_bytes


def arrival(pull_s: float, num_bytes: int) -> Arrival:
    return Arrival(pull_s=pull_s, fetched_bytes=num_bytes, load_s=0.0, downtime_s=0.0)


def test_figures_of_a_setting() -> None:
    found = Measured(
        baseline_bytes_per_s=1e6,
        full=[arrival(20.0, 25_000_000), arrival(10.0, 25_000_000)],
        delta=[arrival(1.0, 9), arrival(3.0, 9), arrival(2.0, 9)],
    )
    assert found.utilisation == pytest.approx((0.5 + 1.0) / 2)
    assert found.full_s == 15.0 and found.delta_s == 2.0
    assert found.delta_speedup == 7.5
    assert percentile_ms([0.001 * n for n in range(100)], 0.99) == pytest.approx(99.0)


def test_quick_has_one_node_and_no_loss() -> None:
    [quick] = settings(is_quick=True)
    assert (quick.num_nodes, quick.loss) == (1, 0.0)
    full = settings(is_quick=False)
    assert {one.num_nodes for one in full} == {2}
    assert {one.loss for one in full} == {0.0, 0.01}


def test_missing_bytes_are_those_of_no_finished_piece(tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    file = FileEntry(name="x.json", blob=blake3(data).hexdigest(), bytes=len(data))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    assert missing_bytes(tmp_path, [file]) == len(data)
    path = blobs / f"{file.blob}.partial"
    path.touch()
    assert missing_bytes(tmp_path, [file]) == len(data)
    partial = Partial(path, blobs / file.blob, file, {})
    start, end = partial.missing()[0]
    partial.write(start, data[start:end])
    assert missing_bytes(tmp_path, [file]) == len(data) - piece_bytes(len(data))
    for start, end in partial.missing():
        partial.write(start, data[start:end])
    assert missing_bytes(tmp_path, [file]) == 0
    assert partial.finish() is not None
    assert missing_bytes(tmp_path, [file]) == 0


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="needs root rights and /dev/net/tun",
)
def test_a_small_model_goes_all_the_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a fast link, so that it is over soon."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(weights_wan, "DELAY_MS", 5.0)
    monkeypatch.setattr(weights_wan, "BURST", 4)
    weights_wan.run(tmp_path, "10", settings(is_quick=True))
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["refetched_bytes"] == 0
    assert 0 < found["link_utilisation_full"] < 1
    assert found["delta_speedup"] > 1
