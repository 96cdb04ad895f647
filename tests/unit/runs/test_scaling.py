# SPDX-License-Identifier: Apache-2.0
"""The loop of the autoscaler, over reports and hands of the test."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.report.report_factories import figures, node_figures

from penstock.config import RunConfig, demo_config
from penstock.dataflow.report.build import make_report
from penstock.dataflow.report.figures import BalanceSettings, NodeActivity
from penstock.dataflow.report.shape import BalanceReport, ScalingBranch
from penstock.errors import ConfigError, LaunchError
from penstock.fleet.autoscaler import NodeType, ScaleMode
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.scaling_records import ScalingRecord
from penstock.runs import scaling
from penstock.runs.scaling import Scaler, request_scale

SPOT = NodeType(name="spot", spot=True, cost_per_hour=1.0)
STEADY = NodeType(name="steady", cost_per_hour=3.0)


@dataclass
class FakeHands:
    """Says yes, or what the test wants."""

    prefix: str
    started: list[str] = field(default_factory=list[str])
    retired: list[str] = field(default_factory=list[str])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    refuses: bool = False
    is_closed: bool = False

    def start(self, number: int) -> str:
        if self.refuses:
            raise LaunchError("no quota")
        self.started.append(f"{self.prefix}-{number}")
        return self.started[-1]

    def retire(self, name: str) -> None:
        if name not in self.retired:
            self.retired.append(name)

    def failed(self) -> Mapping[str, str]:
        found, self.failures = self.failures, {}
        return found

    def close(self) -> None:
        self.is_closed = True


class World:
    """A run folder, its hands and its report, and a clock that a poll always finds due."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "act") -> None:
        monkeypatch.setattr(scaling, "POLL_S", 0.0)
        self.folder = RunFolder(path)
        self.folder.write_config(demo_config(0))
        self.hands = {"spot": FakeHands("spot"), "steady": FakeHands("steady")}
        self.local = FakeHands("node")
        self.launched: dict[str, float] = {}
        self.report: BalanceReport | None = None
        self.notes: list[str] = []
        self.revoked: list[str] = []
        self.mode = mode
        self.scaler = self.restarted()

    def restarted(self, *, launched_type: str | None = None, **changes: Any) -> Scaler:
        stored = self.folder.scaling() or ScalingRecord(mode=self.mode)
        types = {"spot": SPOT, "steady": STEADY}
        hands: dict[str, FakeHands] = {**self.hands}
        if launched_type:
            types, hands = (
                {launched_type: NodeType(name=launched_type)},
                {launched_type: self.local},
            )
        self.scaler = Scaler(
            folder=self.folder,
            node_types=types,
            hands=hands,
            launched=lambda: self.launched,
            launched_type=launched_type,
            not_scaled=frozenset({"eval-node-0"}),
            start_timeout_s=600.0,
            read_report=lambda: self.report,
            notify=self.notes.append,
            record=replace(stored, mode=self.mode, **changes),
            revoke=self.revoked.append,
        )
        return self.scaler

    def see(self, *names: str, decide: int | None = None, at: float = 0.0, **left: str) -> None:
        """A report with these nodes; `decide`: the rule wants this size."""
        nodes = [node_figures(name) for name in names]
        nodes += [
            node_figures(name.replace("_", "-"), activity=NodeActivity(activity))
            for name, activity in left.items()
        ]
        report = make_report(figures(nodes=tuple(nodes)), BalanceSettings(), at or time.time())
        decision = replace(
            report.decision,
            branch=ScalingBranch.HOLD if decide is None else ScalingBranch.SCALE_UP,
            target_gpus=decide or 0,
            reason="the test wants it",
        )
        self.report = replace(report, decision=decision)
        self.scaler.poll()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "run", monkeypatch)


def test_it_follows_each_decision_once_and_records_what_it_did(world: World) -> None:
    world.see("guest", decide=3)
    assert world.hands["spot"].started == ["spot-0", "spot-1"]
    world.scaler.poll()
    world.see("guest", "spot-0")
    assert world.hands["spot"].started == ["spot-0", "spot-1"]
    stored = world.folder.scaling()
    assert (
        stored is not None and stored.wanted_gpus == 3 and {*stored.nodes} == {"spot-0", "spot-1"}
    )
    assert "autoscaler: scaling to 3 GPUs: the test wants it" in world.notes
    log = (world.folder.path / "admin.jsonl").read_text()
    assert log.count("node_started") == 2 and '"who":"autoscaler"' in log


def test_recommend_says_it_and_an_operator_does_it(world: World) -> None:
    world.mode = "recommend"
    world.restarted()
    world.see("guest", decide=2)
    assert world.hands["spot"].started == []
    assert "`penstock scale" in world.notes[-1] and "--to 2" in world.notes[-1]
    with world.folder.locked():
        request_scale(world.folder, gpus=2, why="trainers wait")
    world.scaler.poll()
    assert world.hands["spot"].started == ["spot-0"]
    assert "trainers wait" in (world.folder.path / "admin.jsonl").read_text()
    world.see("guest", "spot-0", decide=9)
    assert world.hands["spot"].started == ["spot-0"]


def test_a_node_that_is_gone_is_ended_and_replaced_before_the_rule_speaks(world: World) -> None:
    world.see("guest", decide=2)
    world.see("guest", "spot-0")
    world.see("guest", spot_0="silent")
    assert world.hands["spot"].retired == ["spot-0"]
    assert world.hands["spot"].started == ["spot-0", "spot-1"]
    assert world.revoked == [], "it may still return its work"
    world.see("guest", "spot-1")
    assert {*world.scaler.record.nodes} == {"spot-1"}
    assert world.revoked == ["spot-0"]


def test_a_type_that_cannot_start_is_replaced_by_the_next(world: World) -> None:
    world.hands["spot"].refuses = True
    world.see("guest", decide=2)
    world.scaler.poll()
    assert world.hands["steady"].started == ["steady-1"]
    assert any("no quota; no more nodes of type spot for 10 minutes" in n for n in world.notes)


def test_a_start_command_that_fails_or_a_node_that_never_joins_blocks_its_type(
    world: World,
) -> None:
    world.see("guest", decide=2)
    world.hands["spot"].failures = {"spot-0": "exited with 1"}
    world.see("guest")
    assert world.hands["steady"].started == ["steady-1"]
    started_at = world.scaler.record.nodes["steady-1"].started_at
    world.see("guest", at=started_at + 599.0)
    assert world.hands["steady"].retired == []
    world.see("guest", at=started_at + 601.0)
    assert world.hands["steady"].retired == ["steady-1"]
    assert world.hands["steady"].started == ["steady-1"], "its type rests at once"
    assert world.scaler.record.missing_gpus == 1 and "no type has room" in world.notes[-1]


def test_an_old_report_does_not_retire_twice(world: World) -> None:
    """The process is gone before the report knows; the node must not count meanwhile."""
    world.restarted(launched_type="local", wanted_gpus=2)
    world.launched = {"node-0": 900.0, "node-1": 900.0, "node-2": 900.0, "eval-node-0": 900.0}
    world.see("node-0", "node-1", "node-2")
    [gone] = world.local.retired
    del world.launched[gone]
    for _ in range(3):
        world.see("node-0", "node-1", "node-2")
    assert world.local.retired == [gone]
    world.see(*(name for name in ("node-0", "node-1", "node-2") if name != gone))
    assert world.local.retired == [gone] and world.local.started == []


def test_a_frozen_node_of_the_launcher_is_replaced_one_that_restarts_is_not(world: World) -> None:
    world.restarted(launched_type="local", wanted_gpus=2)
    world.launched = {"node-0": 900.0, "node-1": 5.0}
    world.see("node-0", node_1="silent")
    assert (world.local.retired, world.local.started) == ([], [])
    world.launched["node-1"] = 900.0
    world.see("node-0", node_1="silent")
    assert (world.local.retired, world.local.started) == (["node-1"], ["node-0"])


def test_the_end_of_a_run_ends_the_nodes_of_commands(world: World) -> None:
    world.see("guest", decide=3)
    world.scaler.close()
    assert world.hands["spot"].retired == ["spot-0", "spot-1"] and world.hands["spot"].is_closed
    stored = world.folder.scaling()
    assert stored is not None and not stored.nodes


def test_a_request_is_refused_with_its_reason(world: World) -> None:
    with pytest.raises(ConfigError, match="nothing to change"):
        request_scale(world.folder)
    with pytest.raises(ConfigError, match="--to -1"):
        request_scale(world.folder, gpus=-1)
    with pytest.raises(ConfigError, match=r"dataflow\.report\.max_gpus"):
        request_scale(world.folder, mode=ScaleMode.ACT)
    with pytest.raises(LaunchError, match="has no launcher"):
        request_scale(world.folder, gpus=1)
    bounded = RunConfig.model_validate(
        {**demo_config(0).model_dump(), "dataflow": {"report": {"max_gpus": 4}}}
    )
    world.folder.write_config(bounded)
    with pytest.raises(ConfigError, match=r"--to 5 is above dataflow\.report\.max_gpus 4"):
        request_scale(world.folder, gpus=5)
