# SPDX-License-Identifier: Apache-2.0
"""What others add from outside: one file that imports only `penstock`, named in a run file by its
path or by an entry point of an installed package, and executed by the code that executes ours."""

from __future__ import annotations

import asyncio
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.rules.rule_inputs import POLICY, judged
from tests.unit.gateway.gateway_harness import running_gateway
from tests.unit.rollout.fake_dataflow import facts, task
from tests.unit.rollout.snapshot_files import write_snapshot
from tests.unit.rollout.test_attempt import GRANT, NoTurns, loaded_engine

import penstock
from penstock.dataflow.core.rule_runner import RuleRunner
from penstock.dataflow.records import CommandJournal
from penstock.dataflow.service.build import core_spec, run_info
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Generate
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engine_pool import EnginePool
from penstock.rollout.engine_seats import EngineSeat
from penstock.rollout.node import engine_maker
from penstock.rollout.recorder import Recorder
from penstock.rollout.rewards.scorer import RewardScorer, Scorer
from penstock.types import DropReason, NodeId, SamplingSpec, Trajectory, view_ids


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody else's file, and how a run file names what is in it."""

    _folder: Path
    _module: str
    _is_installed: bool

    def add(self, kind: str, attribute: str, source: str) -> str:
        """Write the file; returns the name for the run file."""
        text = textwrap.dedent(source)
        (self._folder / f"{self._module}.py").write_text(text)
        assert "penstock." not in text.replace("@penstock.", ""), "it needs no other module of ours"
        importlib.invalidate_caches()
        if not self._is_installed:
            return f"{self._module}:{attribute}"
        name = f"own-{attribute.lower()}"
        install(self._folder, self._module, {kind: {name: f"{self._module}:{attribute}"}})
        return name


def install(folder: Path, package: str, offers: dict[str, dict[str, str]]) -> None:
    """What pip leaves of a package: its metadata, with its entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = (
        "\n".join([f"[penstock.{group}]", *(f"{name} = {target}" for name, target in ones.items())])
        for group, ones in offers.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of imports, here and in child processes."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


@pytest.fixture(params=["path", "entry point"])
def newcomer(request: pytest.FixtureRequest, folder: Path) -> Iterator[Newcomer]:
    module = f"own_{abs(hash(request.node.nodeid))}"
    yield Newcomer(folder, module, request.param == "entry point")
    sys.modules.pop(module, None)


def config_with(**changes: Any) -> penstock.RunConfig:
    values: dict[str, Any] = {
        "name": "newcomer",
        "models": {"policy": {"init": "builtin:tiny-qwen3"}},
        "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
        "training": {"steps": 1, "groups_per_batch": 4},
    }
    return penstock.load_config(values | changes)


async def attempt(
    snapshot: Path, workflow: str, *, scorer: RewardScorer | None, generate: Generate | None = None
) -> Trajectory:
    """One attempt as a node makes it."""
    gateway = Gateway(generate or await loaded_engine(snapshot))
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    endpoint = Endpoint(gateway)
    serving = asyncio.create_task(endpoint.run())
    run_info = facts(workflow=workflow, sampling=SamplingSpec(max_tokens=3))
    recorder = Recorder(NoTurns(), NodeId("n"))
    try:
        runner = AttemptRunner(gateway, endpoint, recorder, scorer, run_info, NodeId("n"))
        return await asyncio.wait_for(runner.run(GRANT, task()), 60)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_a_data_rule(newcomer: Newcomer) -> None:
    rule = newcomer.add(
        "rules",
        "FewPerSource",
        """
        from penstock import Admit, DropReason

        class FewPerSource(Admit):
            def __init__(self, state, *, most=20):
                self.state, self.most = state, most

            def judge(self, group):
                full = self.state.get(group.source, 0) >= self.most
                return DropReason.RULE if full else None

            def learn(self, group, verdict):
                if verdict is None:
                    self.state[group.source] = self.state.get(group.source, 0) + 1
        """,
    )
    config = config_with(dataflow={"rules": [{"admit": rule, "most": 2}]})
    runner = RuleRunner(core_spec(config).rules, CommandJournal(), seed=0)
    verdicts: list[tuple[str, DropReason | None]] = []
    for number in range(3):
        group = judged(f"p0-{number}", [0.0, 1.0])
        verdicts.append(runner.judge(group, 0.0))
        runner.learn(group, verdicts[-1][1], 0.0)
    assert verdicts == [(rule, None), (rule, None), (rule, DropReason.RULE)]
    assert not runner.errors


def test_a_rule_with_declared_options(newcomer: Newcomer) -> None:
    rule = newcomer.add(
        "rules",
        "RewardLimit",
        """
        from penstock import DropReason, Rule

        class RewardLimit(Rule):
            limit: float = 0.5

            def judge(self, group):
                return DropReason.RULE if max(group.rewards) > self.limit else None
        """,
    )
    config = config_with(dataflow={"rules": [{"admit": rule, "limit": 0.75}]})
    runner = RuleRunner(core_spec(config).rules, CommandJournal(), seed=0)
    assert runner.judge(judged("p0-1", [0.0, 0.75]), 0.0) == (rule, None)
    assert runner.judge(judged("p0-2", [0.0, 1.0]), 0.0) == (rule, DropReason.RULE)
    wrong = config_with(dataflow={"rules": [{"admit": rule, "limits": 1.0}]})
    with pytest.raises(penstock.ConfigError, match='"limits" of RewardLimit; did you mean "limit"'):
        RuleRunner(core_spec(wrong).rules, CommandJournal(), seed=0)


def graph(stage: dict[str, Any], loss: dict[str, Any]) -> dict[str, Any]:
    credit = {"id": "credit", "type": "compute", "role": "advantage", "reads": ["reward"]}
    learn = {"id": "learn", "type": "train", "role": "actor", "reads": ["turns", "advantage"]}
    return {"stages": [{**credit, "writes": ["advantage"], **stage}, {**learn, **loss}]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny"
    penstock.init_model("builtin:tiny-qwen3", made, seed=0)
    return made


def train_a_step(config: penstock.RunConfig, model_folder: Path) -> dict[str, float]:
    from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, random_batch

    from penstock.trainer.batches import assemble
    from penstock.trainer.build import build_models

    sealed = random_batch(1, seq=1)
    models = build_models(config, POLICY, model_folder)
    stats = models.step(assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE))
    assert stats.skipped is None
    return dict(stats.values)


def test_a_loss(newcomer: Newcomer, model_folder: Path) -> None:
    loss = newcomer.add(
        "losses",
        "half",
        """
        from penstock import TokenLoss, Tokens

        def half(tokens: Tokens, *, factor: float) -> TokenLoss:
            loss_K = -factor * tokens.logprobs_K * tokens.advantages_K
            return TokenLoss(loss_K=loss_K, metrics={"own/advantage": tokens.advantages_K ** 2})
        """,
    )
    pipeline = graph({}, {"fn": loss, "options": {"factor": 0.5}})
    values = train_a_step(config_with(pipeline=pipeline), model_folder)
    assert values["own/advantage"] > 0


def test_a_stage(newcomer: Newcomer, model_folder: Path) -> None:
    stage = newcomer.add(
        "stages",
        "plain",
        """
        from collections.abc import Mapping
        import numpy as np
        from penstock import Layout

        CALLS = []

        def plain(layout: Layout, *, reward: np.ndarray, scale: float = 1.0) -> Mapping:
            CALLS.append(scale)
            return {"advantage": layout.by_token(scale * (reward - reward.mean()))}
        """,
    )
    pipeline = graph({"fn": stage, "role": "own", "options": {"scale": 3.0}}, {})
    values = train_a_step(config_with(pipeline=pipeline), model_folder)
    own = [module for name, module in sys.modules.items() if name.startswith("own_")]
    assert vars(own[0])["CALLS"] == [3.0] and values["seconds/stage/credit"] >= 0


async def test_an_engine(newcomer: Newcomer, tmp_path: Path) -> None:
    engine = newcomer.add(
        "engines",
        "Parrot",
        """
        from penstock import Completion, EngineSettings, GenerationRequest

        class Parrot:
            def __init__(self, settings: EngineSettings) -> None:
                self.live = None

            async def load(self, folder, version) -> None:
                self.live = version

            async def __call__(self, request: GenerationRequest) -> Completion:
                ids = request.prompt_ids[: request.sampling.max_tokens]
                return Completion.of(ids, [-0.5] * len(ids), self.live, is_cut=True)

            async def close(self) -> None:
                self.live = None
        """,
    )
    config = config_with(models={"policy": {"init": "builtin:tiny-qwen3", "engine": engine}})
    snapshot = write_snapshot(tmp_path / "snapshot")
    make = engine_maker(NodeId("n"), state_dir=tmp_path)
    pool = EnginePool([make(run_info(config), POLICY, EngineSeat())])
    await pool.load(snapshot, penstock.Version(policy=POLICY, incarnation=1, number=4))
    row = await attempt(snapshot, "single_turn", scorer=None, generate=pool)
    await pool.close()
    [turn] = row.turns
    prompt = list(view_ids(turn.prompt_ids))
    assert list(view_ids(turn.sampled_ids)) == prompt[:3] and turn.spans[0].number == 4


async def test_a_workflow(newcomer: Newcomer, tmp_path: Path) -> None:
    workflow = newcomer.add(
        "workflows",
        "twice",
        """
        from penstock import Context, Task

        async def twice(task: Task, ctx: Context) -> float:
            messages = [{"role": "user", "content": task.payload["prompt"]}]
            for _ in range(2):
                answer = await ctx.policy().chat(messages)
                messages += [answer.message, {"role": "user", "content": "abc>"}]
            return 0.25
        """,
    )
    config = config_with(workflow=workflow)
    assert isinstance(config.workflow, str)
    row = await attempt(write_snapshot(tmp_path / "snapshot"), config.workflow, scorer=None)
    assert row.reward == 0.25 and [turn.parent for turn in row.turns] == [-1, 0]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reward(newcomer: Newcomer, is_async: bool) -> None:
    reward = newcomer.add(
        "rewards",
        "exact",
        f"""
        import penstock

        @penstock.reward
        {"async " if is_async else ""}def exact(completion: str, answer: str) -> float:
            return float(completion == answer)
        """,
    )
    name = config_with(reward=reward).reward
    assert isinstance(name, str)
    scorer = Scorer(name)
    running = asyncio.create_task(scorer.run())
    try:
        async with asyncio.timeout(100):
            right = task(0).payload["answer"]
            results = await asyncio.gather(*(scorer.score(t, task(0)) for t in (right, "no")))
        assert results == [1.0, 0.0]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_dialect_of_an_installed_package_is_served(folder: Path, tmp_path: Path) -> None:
    (folder / "own_dialect.py").write_text(
        textwrap.dedent("""
        from dataclasses import replace
        from penstock.gateway.dialects.completions import COMPLETIONS

        MINE = replace(COMPLETIONS, path="/v9/complete", summary="My own.")
        """)
    )
    install(folder, "own_dialect", {"dialects": {"mine": "own_dialect:MINE"}})
    async with running_gateway(tmp_path / "snapshot") as gateway, gateway.http() as http:
        body = {"model": "policy", "prompt": "x"}
        answer = await http.post("/v9/complete", json=body)
        document = (await http.get("/openapi.json")).json()
    assert answer.json()["choices"][0]["text"] == "abc"
    assert "/v9/complete" in document["paths"]


async def test_a_dialect_cannot_take_the_path_of_another(folder: Path, tmp_path: Path) -> None:
    chat = "penstock.gateway.dialects.chat:CHAT"
    install(folder, "own_chat", {"dialects": {"mine": chat}})
    with pytest.raises(penstock.ConfigError, match=r"'mine'.*/v1/chat/completions, which another"):
        async with running_gateway(tmp_path / "snapshot"):
            pass


WRONG: list[tuple[Callable[[str], dict[str, Any]], str]] = [
    (lambda name: {"models": {"policy": {"init": "x", "engine": name}}}, "engines"),
    (lambda name: {"dataflow": {"rules": [{"admit": name}]}}, "rules"),
    (lambda name: {"workflow": name}, "workflows"),
    (lambda name: {"reward": name}, "rewards"),
    (lambda name: {"pipeline": graph({"fn": name, "role": "own"}, {})}, "stages"),
    (lambda name: {"pipeline": graph({}, {"fn": name})}, "losses"),
]


@pytest.mark.parametrize(("values", "group"), WRONG, ids=[group for _, group in WRONG])
def test_a_mistyped_plug_in_is_refused_with_the_names_there_are(
    folder: Path, values: Callable[[str], dict[str, Any]], group: str
) -> None:
    install(folder, "offers", {group: {"my-plug-in": "offers:thing"}})
    config_with(**values("my-plug-in"))  # named without an import
    with pytest.raises(penstock.ConfigError, match='did you mean "my-plug-in"'):
        config_with(**values("my-plugin"))
    with pytest.raises(penstock.ConfigError, match=r"my-plug-in"):
        config_with(**values("zzz"))


def test_a_stage_is_no_loss(folder: Path) -> None:
    install(folder, "offers", {"stages": {"my-stage": "offers:thing"}})
    with pytest.raises(penstock.ConfigError, match="write module:function"):
        config_with(pipeline=graph({}, {"fn": "my-stage"}))


def test_two_packages_with_one_name_are_told_apart(folder: Path) -> None:
    install(folder, "first_package", {"rules": {"same": "first_package:Rule"}})
    install(folder, "second_package", {"rules": {"same": "second_package:Rule"}})
    config = config_with(dataflow={"rules": [{"admit": "same"}]})
    with pytest.raises(
        penstock.ConfigError, match=r"first_package:Rule and second_package:Rule.*write one of"
    ):
        RuleRunner(core_spec(config).rules, CommandJournal(), seed=0)


def test_a_built_in_name_stays_built_in(folder: Path) -> None:
    install(folder, "shadow", {"rules": {"reward-spread": "shadow:Rule"}})
    config = config_with(dataflow={"rules": [{"admit": "reward-spread"}]})
    assert config.dataflow.rules[0].is_builtin
    assert not RuleRunner(core_spec(config).rules, CommandJournal(), seed=0).errors
