# SPDX-License-Identifier: Apache-2.0
"""Correct peers keep every rule of the protocol; each planted fault breaks exactly its rule."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.contract import faulty_node, faulty_trainer

from penstock.conformance import (
    conformance_rollout,
    conformance_trainer,
    examine_rollout,
    examine_trainer,
)
from penstock.conformance.dataflow_double import JoinInfo, open_double
from penstock.conformance.rollout import RULES as ROLLOUT_RULES
from penstock.conformance.rollout import RolloutExaminer
from penstock.conformance.simulated_peers import SimulatedNode, SimulatedTrainer
from penstock.conformance.trainer import RULES as TRAINER_RULES
from penstock.conformance.verdicts import RuleVerdict, Verdict
from penstock.wire.auth import PREFIX, Role

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "recipes" / "foreign"
NUM_AT_ONCE = 10
"""Scenarios mostly wait, but more at a time would delay heartbeats on a busy machine."""
SLOW = ("ignores-drain", "stays-on-first", "names-first-version", "one-live-beat", "never-fetches")
"""Faults that keep the double waiting until a timeout."""
TIMEOUT_S = 240.0
"""On a slow machine, ten peers that start at once take a minute."""
TIMED_RULES = {"heartbeat-in-time", "drain-obeyed"}
"""Rules with a limit in seconds. On a slow machine the other processes of this test may break one
of them too."""

Command = Callable[[JoinInfo], Sequence[str]]


@dataclass(slots=True)
class PeerProcess:
    """The process under test; started when the double is ready."""

    command: Command
    log: Path = Path(os.devnull)
    """What it says on stderr."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def on_ready(self, join_info: JoinInfo) -> None:
        words = [sys.executable, *self.command(join_info)]
        env = {**os.environ, "PENSTOCK_TOKEN_FILE": "/dev/stdin", "PYTHONPATH": str(ROOT / "src")}
        with self.log.open("wb") as said:
            process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=-1, stdout=-3, stderr=said)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(join_info.token.encode())
        self.processes.append(process)

    def end(self, timeout_s: float) -> int | None:
        """Its own exit code; None when it had to be killed."""
        for process in self.processes:
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return None


def node_command(fault: str) -> Command:
    return lambda got: ["-m", "tests.contract.faulty_node", fault, got.url, got.token]


def trainer_command(fault: str) -> Command:
    module = "tests.contract.faulty_trainer"
    return lambda got: ["-m", module, fault, got.url, got.token, str(got.store)]


async def examine(kind: str, peer: PeerProcess) -> tuple[RuleVerdict, ...]:
    run = examine_rollout if kind == "rollout" else examine_trainer
    return await run(host="127.0.0.1", port=0, on_ready=peer.on_ready, timeout_s=TIMEOUT_S)


async def keeps_every_rule(command: Command) -> bool:
    """Asked again if a rule with a limit in seconds broke: a machine that stands still breaks such
    rules too, but not three times in a row."""
    verdicts, code = tuple[RuleVerdict, ...](), None
    for _ in range(3):
        peer = PeerProcess(command)
        try:
            verdicts = await examine("rollout", peer)
        finally:
            code = await asyncio.to_thread(peer.end, 60.0)
        if not (broken := failed(verdicts)) or broken - TIMED_RULES:
            break
    assert verdicts and not_ok(verdicts) == []
    return code == 0


def failed(verdicts: Sequence[RuleVerdict]) -> set[str]:
    return {rule_verdict.rule for rule_verdict in verdicts if rule_verdict.verdict is Verdict.FAIL}


def not_ok(verdicts: Sequence[RuleVerdict]) -> list[str]:
    return [
        str(rule_verdict) for rule_verdict in verdicts if rule_verdict.verdict is not Verdict.OK
    ]


# --- correct peers -------------------------------------------------------------------------------


async def test_foreign_node_keeps_every_rule() -> None:
    assert await keeps_every_rule(lambda got: [str(FOREIGN / "rollout.py"), got.url])


async def test_real_node_keeps_every_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert await keeps_every_rule(lambda got: ["-m", "penstock.cli.main", "join", got.url])


async def test_foreign_trainer_keeps_every_rule_and_fails_when_fenced() -> None:
    peer = PeerProcess(
        lambda got: [str(FOREIGN / "trainer.py"), got.url, "--store", str(got.store)],
    )
    verdicts = await examine("trainer", peer)
    assert not_ok(verdicts) == []
    assert peer.end(60.0) == 1


# --- planted faults ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RuleVerdict, ...]]:
    """Verdicts by fault; a scenario mostly waits, so several run concurrently."""
    slots = asyncio.Semaphore(NUM_AT_ONCE)
    logs = tmp_path_factory.mktemp("peers")

    async def one(kind: str, fault: str, command: Command) -> tuple[RuleVerdict, ...]:
        """Once more if the peer never called: then nothing was examined."""
        verdicts = tuple[RuleVerdict, ...]()
        for _ in range(2):
            async with slots:
                peer = PeerProcess(command, log=logs / fault)
                try:
                    verdicts = await examine(kind, peer)
                finally:
                    code = await asyncio.to_thread(peer.end, 0.5)
            if any(verdict.verdict is not Verdict.UNTESTED for verdict in verdicts):
                break
            print(f"{fault} never called; exit code {code}:\n{(logs / fault).read_text()}")
        return verdicts

    async def all_of_them() -> dict[str, tuple[RuleVerdict, ...]]:
        slow_first = sorted(faulty_node.FAULTS, key=lambda fault: fault not in SLOW)
        named = {fault: one("rollout", fault, node_command(fault)) for fault in slow_first}
        named |= {f: one("trainer", f, trainer_command(f)) for f in faulty_trainer.FAULTS}
        return dict(zip(named, await asyncio.gather(*named.values()), strict=True))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("fault", faulty_node.FAULTS)
def test_faulty_node_fails_by_name(
    examined: dict[str, tuple[RuleVerdict, ...]], fault: str
) -> None:
    expected = faulty_node.FAULTS[fault][1]
    assert failed(examined[fault]) - TIMED_RULES == expected - TIMED_RULES, not_ok(examined[fault])
    assert failed(examined[fault]) >= expected, not_ok(examined[fault])


@pytest.mark.parametrize("fault", faulty_trainer.FAULTS)
def test_faulty_trainer_fails_by_name(
    examined: dict[str, tuple[RuleVerdict, ...]], fault: str
) -> None:
    assert failed(examined[fault]) == faulty_trainer.FAULTS[fault][1], not_ok(examined[fault])


def test_every_rule_has_a_fault_that_breaks_it() -> None:
    by_nodes = set[str]().union(*(rules for _, rules in faulty_node.FAULTS.values()))
    by_trainers = set[str]().union(*(rules for _, rules in faulty_trainer.FAULTS.values()))
    assert by_nodes == {rule.name for rule in ROLLOUT_RULES}
    assert by_trainers == {rule.name for rule in TRAINER_RULES}


# --- the command ---------------------------------------------------------------------------------


async def test_without_a_peer_nothing_passes() -> None:
    lines: list[str] = []
    is_kept = await conformance_rollout(
        host="127.0.0.1", port=0, out=lines.append, timeout_s=0.3, json=True
    )
    assert not is_kept
    assert lines[0].startswith("url    http://127.0.0.1:")
    assert lines[1].startswith(f"token  {PREFIX}.")
    assert [line for line in lines[3:-2] if not line.startswith("none ")] == []
    assert lines[-2] == f"0 ok, 0 failed, {len(ROLLOUT_RULES)} not tested, of 19 rules"
    assert json.loads(lines[-1])["untested"] == len(ROLLOUT_RULES)


async def test_the_store_is_printed_for_a_trainer() -> None:
    lines: list[str] = []
    is_kept = await conformance_trainer(host="127.0.0.1", port=0, out=lines.append, timeout_s=0.3)
    assert not is_kept
    assert any(line.startswith("store  /") for line in lines)


def test_command_passes_the_foreign_trainer() -> None:
    words = [sys.executable, "-m", "penstock.cli.main", "conformance", "trainer", "--json"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        told = dict(next(command.stdout).split() for _ in ("url", "token", "store"))
        script = [str(FOREIGN / "trainer.py"), told["url"], "--store", told["store"]]
        env = {**os.environ, "PENSTOCK_TOKEN_FILE": "/dev/stdin"}
        trainer = subprocess.run(
            [sys.executable, *script],
            env=env,
            input=told["token"],
            text=True,
            stderr=subprocess.DEVNULL,
            timeout=300,
        )
        last = json.loads(command.stdout.read().splitlines()[-1])
    assert (command.returncode, trainer.returncode) == (0, 1)
    assert (last["role"], last["passed"], last["failed"]) == ("trainer", len(TRAINER_RULES), 0)


# --- the foreign node alone ----------------------------------------------------------------------


async def test_foreign_node_releases_its_slots_and_leaves_on_sigterm() -> None:
    peer = PeerProcess(lambda got: [str(FOREIGN / "rollout.py"), got.url])
    async with open_double("127.0.0.1", 0) as double:
        examiner = RolloutExaminer(double)
        trainer = SimulatedTrainer(double.service, double.store, SimulatedNode(double.service))
        async with double.serve(examiner):
            incarnation = await trainer.claim_incarnation()
            stored = trainer.store_version()
            examiner.expect(incarnation, 0, stored)
            await trainer.publish(stored)
            peer.on_ready(double.join_info(Role.ROLLOUT))
            await eventually(lambda: examiner.num_stored > 0)
            peer.processes[0].send_signal(signal.SIGTERM)
            await eventually(lambda: examiner.left_at > 0)
            assert await asyncio.to_thread(peer.end, 60.0) == 0
    assert "every-lease-ends" not in failed(examiner.verdicts.all())
    assert not double.service.partition.nodes


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 the watch has no event to wait for
            await asyncio.sleep(0.02)
