# SPDX-License-Identifier: Apache-2.0
"""The exporter: every tracker gets each point once, whatever was dead, killed or trained again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runs.metrics_files import run_with_metrics

from penstock.config import demo_config
from penstock.dataflow.ledger.tables import Tables, open_tables
from penstock.dataflow.records import CommitRecord, EvaluationRecord, EvaluationState
from penstock.errors import TrackerError
from penstock.fleet.run_folder import RunFolder
from penstock.observe.tracking import Point, TrackedRun
from penstock.plugins import load_module
from penstock.runs import points as points_module
from penstock.runs.preflight import missing_trackers
from penstock.runs.tracking import Exporter, catch_up, follow
from penstock.types import PolicyName

POLICY = PolicyName("policy")
CONFIG = demo_config(0)
TRACKER = f"{__name__}:Memory"


class Memory:
    """A tracker of this process: it can be dead, and it can take points and die before it says
    so."""

    stored: list[tuple[str, Point]] = []  # noqa: RUF012 - one for all, as a server is
    is_dead = False
    dies_after_storing = False

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def send(self, points: Sequence[Point]) -> None:
        if Memory.is_dead:
            raise ConnectionError("nobody listens")
        known = {(run, point.id) for run, point in Memory.stored}
        Memory.stored += [(self._run.id, p) for p in points if (self._run.id, p.id) not in known]
        if Memory.dies_after_storing:
            Memory.dies_after_storing = False
            raise ConnectionError("cut before the answer")

    def close(self) -> None: ...


class Ledger:
    """The ledger of a run that is written as the test goes."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        (folder.path / "ledger").mkdir(parents=True)
        self.tables: Tables = open_tables(folder.path / "ledger")

    def commit(self, *seqs: int, incarnation: int = 1, skipped: str = "", shift: int = 0) -> None:
        self.tables.commit(
            [
                CommitRecord(
                    consumer=POLICY,
                    seq=seq,
                    incarnation=incarnation,
                    number=seq - shift,
                    skipped=skipped,
                    stats=json.dumps({"reward/mean": seq / 8, "loss": None, "value": incarnation}),
                    at=1000.0 + seq + 100 * (incarnation - 1),
                )
                for seq in seqs
            ]
        )

    def evaluate(self, number: int, at: float, incarnation: int = 1) -> None:
        done = EvaluationRecord(
            policy=POLICY,
            incarnation=incarnation,
            number=number,
            pins={},
            suites={"test": ""},
            num_groups=1,
            samples=1,
            temperature=0.0,
            state=EvaluationState.DONE,
            scores={"test": number / 4},
            started_at=at,
            ended_at=at,
        )
        self.tables.commit([done])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    Memory.stored, Memory.is_dead, Memory.dies_after_storing = [], False, False
    folder = RunFolder(tmp_path / "run")
    folder.write_config(CONFIG)
    made = Ledger(folder)
    yield made
    made.tables.close()


def steps() -> list[int]:
    return [point.step for _, point in Memory.stored]


def test_a_dead_tracker_gets_everything_later_and_only_once(ledger: Ledger) -> None:
    ledger.commit(1, 2, 3)
    assert catch_up(ledger.folder, CONFIG, TRACKER) == 3
    Memory.is_dead = True
    ledger.commit(4, 5)
    with pytest.raises(TrackerError, match=r"did not take 2 points: ConnectionError: nobody"):
        catch_up(ledger.folder, CONFIG, TRACKER)
    Memory.is_dead = False
    ledger.commit(6)
    assert catch_up(ledger.folder, CONFIG, TRACKER) == 3
    assert catch_up(ledger.folder, CONFIG, TRACKER) == 0
    assert steps() == [1, 2, 3, 4, 5, 6]
    assert len({run for run, _ in Memory.stored}) == 1
    assert [point.index for _, point in Memory.stored] == list(range(6))


def test_a_tracker_that_dies_before_it_answers_is_sent_the_same_points(ledger: Ledger) -> None:
    ledger.commit(1, 2)
    Memory.dies_after_storing = True
    with pytest.raises(TrackerError, match="cut before the answer"):
        catch_up(ledger.folder, CONFIG, TRACKER)
    ledger.commit(3)
    assert catch_up(ledger.folder, CONFIG, TRACKER) == 3
    assert [point.id for _, point in Memory.stored] == ["batch-1", "batch-2", "batch-3"]


def test_batches_that_are_trained_again_add_no_points(ledger: Ledger) -> None:
    ledger.commit(1, 2, 3, 4)
    catch_up(ledger.folder, CONFIG, TRACKER)
    ledger.commit(3, 4, 5, incarnation=2)
    catch_up(ledger.folder, CONFIG, TRACKER)
    late = f"{__name__}:late"
    catch_up(ledger.folder, CONFIG, late)
    runs = list(dict.fromkeys(run for run, _ in Memory.stored))
    curves = [[(p.step, p.values) for run, p in Memory.stored if run == one] for one in runs]
    assert len(runs) == 2 and curves[0] == curves[1], "whenever a tracker looks, it sees the same"
    assert [step for step, _ in curves[0]] == [1, 2, 3, 4, 5]


def late(run: TrackedRun) -> Memory:
    """Another tracker."""
    return Memory(run)


def test_skipped_batches_and_missing_figures_are_no_points(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points_module, "PAGE", 2)
    ledger.commit(1)
    ledger.commit(2, 3, 4, 5, skipped="zero_advantage", shift=1)
    ledger.commit(6, shift=4)
    exporter = Exporter(ledger.folder, CONFIG, TRACKER)
    for _ in range(4):
        exporter.send_page()
    exporter.close()
    assert [(p.step, dict(p.values)) for _, p in Memory.stored] == [
        (1, {"reward/mean": 1 / 8, "value": 1.0}),
        (2, {"reward/mean": 6 / 8, "value": 1.0}),
    ]


def test_evaluations_come_late_and_are_sent_once(ledger: Ledger) -> None:
    ledger.evaluate(0, at=1000.0)
    ledger.commit(1, 2, 3)
    catch_up(ledger.folder, CONFIG, TRACKER)
    ledger.evaluate(2, at=1003.5)
    ledger.evaluate(2, at=1100.0, incarnation=2)
    catch_up(ledger.folder, CONFIG, TRACKER)
    assert [point.id for _, point in Memory.stored] == [
        *("eval-0", "batch-1", "batch-2", "batch-3"),
        "eval-2",
    ]
    assert dict(Memory.stored[-1][1].values) == {"eval/test/avg": 0.5}


def test_without_a_ledger_file_the_metrics_file_has_the_points(tmp_path: Path) -> None:
    Memory.stored = []
    batches = [(1, 1, 0.1), (2, 2, 0.2), (3, 2, 0.2), (2, 2, 0.25), (4, 3, 0.4)]
    folder = run_with_metrics(tmp_path / "run", batches)
    assert catch_up(folder, CONFIG, TRACKER) == 3
    assert catch_up(folder, CONFIG, TRACKER) == 0
    assert [(p.step, p.values["reward/mean"]) for _, p in Memory.stored] == [
        *((1, 0.1), (2, 0.2)),
        (3, 0.4),
    ]


def test_two_exporters_never_send_to_one_tracker_at_a_time(ledger: Ledger) -> None:
    ledger.commit(1)
    first = Exporter(ledger.folder, CONFIG, TRACKER)
    with pytest.raises(TrackerError, match="another process sends to"):
        catch_up(ledger.folder, CONFIG, TRACKER)
    first.close()
    assert catch_up(ledger.folder, CONFIG, TRACKER) == 1


def test_at_the_end_of_a_run_the_last_points_are_sent(ledger: Ledger) -> None:
    stop = threading.Event()
    done = threading.Thread(target=follow, args=(ledger.folder, CONFIG, [TRACKER], stop))
    ledger.commit(*range(1, 700))
    stop.set()
    done.start()
    done.join(60.0)
    assert steps() == list(range(1, 700))


def test_trackers_see_no_secrets(ledger: Ledger) -> None:
    planted = "hf_" + "aB3" * 12
    config = CONFIG.model_copy(update={"output_dir": f"x-{planted}"})
    ledger.commit(1)
    seen: list[TrackedRun] = []
    exporter = Exporter(ledger.folder, config, TRACKER)
    seen.append(exporter._tracked_run(POLICY))  # pyright: ignore[reportPrivateUsage] - what a tracker gets
    exporter.close()
    assert planted not in json.dumps(seen[0].config)
    assert seen[0].config["training"]["steps"] == config.training.steps


def test_check_names_the_library_that_a_tracker_lacks() -> None:
    config = CONFIG.model_copy(update={"report_to": ("tensorboard", "wandb", TRACKER)})
    (problem,) = missing_trackers(config)
    assert (problem.key, "pip install wandb" in problem.text) == ("report_to", True)


# --- TensorBoard --------------------------------------------------------------------------------


def tensorboard_curve(folder: RunFolder, name: str) -> list[tuple[int, float]]:
    accumulators: Any = load_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder.path / "tensorboard" / POLICY))
    found.Reload()
    return [(event.step, round(event.value, 6)) for event in found.Scalars(name)]


def test_tensorboard_files_have_each_point_once_even_if_the_cursor_is_lost(ledger: Ledger) -> None:
    ledger.commit(1, 2, 3)
    catch_up(ledger.folder, CONFIG, "tensorboard")
    (file,) = (ledger.folder.path / "tensorboard" / POLICY).iterdir()
    file.write_bytes(file.read_bytes()[:-5])  # killed in the middle of step 3
    (ledger.folder.path / "trackers" / "tensorboard.json").unlink()
    ledger.commit(4)
    ledger.evaluate(2, at=2000.0)
    catch_up(ledger.folder, CONFIG, "tensorboard")
    expected = [(step, step / 8) for step in (1, 2, 3, 4)]
    assert tensorboard_curve(ledger.folder, "reward/mean") == expected
    assert tensorboard_curve(ledger.folder, "eval/test/avg") == [(2, 0.5)]


def test_a_disk_that_was_gone_leaves_no_gap_in_tensorboard(ledger: Ledger) -> None:
    ledger.commit(1, 2)
    blocked = ledger.folder.path / "tensorboard"
    blocked.write_text("in the way")
    with pytest.raises(TrackerError, match="tensorboard did not take 2 points"):
        catch_up(ledger.folder, CONFIG, "tensorboard")
    blocked.unlink()
    catch_up(ledger.folder, CONFIG, "tensorboard")
    assert tensorboard_curve(ledger.folder, "reward/mean") == [(1, 1 / 8), (2, 2 / 8)]
