# SPDX-License-Identifier: Apache-2.0
"""Publishing beside the training: never in its way, never out of order, never quietly dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.doubles import POLICY
from torch import Tensor

from penstock.errors import Fenced, WeightsError
from penstock.trainer import background_worker
from penstock.trainer import publisher as module
from penstock.trainer.model_folders import WEIGHTS
from penstock.trainer.publisher import Publisher
from penstock.trainer.snapshots import Snapshots
from penstock.weights import retention
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import StoredVersion
from penstock.weights.store import DirectoryStore

Announced = list[tuple[int, StoredVersion]]


class Ledger:
    """Hears of versions; may be slow to answer."""

    def __init__(self) -> None:
        self.announced: Announced = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()

    def announce(self, number: int, stored: StoredVersion) -> None:
        self.asked.set()
        assert self.may_answer.wait(60)
        self.announced.append((number, stored))

    def in_use(self) -> tuple[list[str], list[str]]:
        digests = [stored.manifest_digest for _, stored in self.announced]
        return digests[-3:], digests[-1:]

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.announced]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def snapshots(tmp_path: Path, model_folder: Path) -> Iterator[Snapshots]:
    snapshots = Snapshots(tmp_path / "weights", POLICY, model_folder)
    yield snapshots
    snapshots.close()


@pytest.fixture
def publisher(snapshots: Snapshots, ledger: Ledger) -> Iterator[Publisher]:
    publisher = Publisher(snapshots, ledger.announce, ledger.in_use)
    yield publisher
    ledger.may_answer.set()
    publisher.close()


def weights(value: float) -> dict[str, Tensor]:
    return {"model.weight": torch.full((64, 64), value)}


def stored_value(tmp_path: Path, stored: StoredVersion) -> float:
    store = DirectoryStore(tmp_path / "weights")
    manifest = parse_manifest(store.read_manifest(stored.manifest_digest))
    blob = next(file.blob for file in manifest.files if file.name == WEIGHTS)
    return float(load_file(store.blob_path(blob))["model.weight"][0, 0])


def test_what_is_handed_over_is_a_copy(
    publisher: Publisher, ledger: Ledger, tmp_path: Path
) -> None:
    ledger.may_answer.clear()
    publisher.submit(weights(0.0), 0)
    ledger.asked.wait(60)
    live = weights(1.0)
    publisher.submit(live, 1)
    live["model.weight"].fill_(9.0)  # the next step changes the parameters in place
    ledger.may_answer.set()
    publisher.flush()
    assert ledger.numbers == [0, 1]
    assert stored_value(tmp_path, ledger.announced[1][1]) == 1.0


def test_the_newest_takes_the_place_of_what_waits(publisher: Publisher, ledger: Ledger) -> None:
    ledger.may_answer.clear()
    publisher.submit(weights(0.0), 0)
    ledger.asked.wait(60)
    for number in range(1, 6):
        publisher.submit(weights(number), number)
    ledger.may_answer.set()
    publisher.flush()
    assert ledger.numbers == [0, 5]


def test_a_ledger_that_does_not_answer_holds_nobody_up(
    publisher: Publisher, ledger: Ledger
) -> None:
    ledger.may_answer.clear()
    took_s: list[float] = []
    for number in range(50):
        started = time.perf_counter()
        publisher.submit(weights(number), number)
        took_s.append(time.perf_counter() - started)
    assert sorted(took_s)[-2] < 10.0, "a copy of a few kilobytes"
    ledger.may_answer.set()
    publisher.flush()
    assert ledger.numbers[-1] == 49


@pytest.mark.parametrize("ending", ["hand_over", "finish"])
def test_an_error_ends_the_trainer(snapshots: Snapshots, ending: str) -> None:
    def fenced(number: int, stored: StoredVersion) -> None:
        raise Fenced("replaced by 2")

    publisher = Publisher(snapshots, fenced, lambda: ([], []))
    publisher.submit(weights(0.0), 0)
    with pytest.raises(Fenced, match="replaced by 2"):
        if ending == "finish":
            publisher.flush()
        while True:
            publisher.submit(weights(1.0), 1)
    publisher.close()


def test_a_store_that_cannot_be_written_ends_the_trainer(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> StoredVersion:
        raise WeightsError("no space left on device")

    monkeypatch.setattr(snapshots, "put", full)
    publisher = Publisher(snapshots, lambda *_: None, lambda: ([], []))
    publisher.submit(weights(0.0), 0)
    with pytest.raises(WeightsError, match="no space left"):
        publisher.flush()
    publisher.close()


def test_a_store_that_cannot_be_tidied_is_no_reason_to_stop(
    snapshots: Snapshots, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise WeightsError("a manifest cannot be read")

    monkeypatch.setattr(module, "GC_INTERVAL_S", 0.0)
    monkeypatch.setattr(snapshots, "collect_garbage", unreadable)
    publisher = Publisher(snapshots, ledger.announce, ledger.in_use)
    for number in range(3):
        publisher.submit(weights(float(number)), number)
    publisher.flush()
    assert ledger.numbers[-1] == 2


def test_closing_waits_for_nobody(
    snapshots: Snapshots, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_worker, "CLOSE_TIMEOUT_S", 0.05)
    ledger.may_answer.clear()
    publisher = Publisher(snapshots, ledger.announce, ledger.in_use)
    publisher.submit(weights(0.0), 0)
    ledger.asked.wait(60)
    publisher.close()
    ledger.may_answer.set()


def test_a_long_run_takes_little_of_the_disk(
    snapshots: Snapshots,
    ledger: Ledger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole: the newest, the anchors of what is in use, and what came since the last look."""
    monkeypatch.setattr(module, "GC_INTERVAL_S", 0.0)
    monkeypatch.setattr(retention, "GRACE_S", -1.0)
    publisher = Publisher(snapshots, ledger.announce, ledger.in_use)
    sizes: list[int] = []
    for number in range(120):
        publisher.submit(changing(number), number)
        publisher.flush()
    publisher.close()
    for path in (tmp_path / "weights" / "blobs").iterdir():
        sizes.append(path.stat().st_size)
    whole = max(sizes)
    assert sum(sizes) < 4 * whole, sizes


def changing(number: int) -> dict[str, Tensor]:
    """A model of which each step changes one weight in a hundred."""
    base = torch.arange(1 << 16, dtype=torch.float32)
    base[number % 100 :: 100] += 1.0
    return {"model.weight": base}
