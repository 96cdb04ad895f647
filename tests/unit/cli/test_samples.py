# SPDX-License-Identifier: Apache-2.0
"""`penstock samples`: the text of the right trajectories, safe to print, and what was freed."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.audit.ledgers import Run as ServiceRun
from tests.unit.audit.ledgers import small_config, some_failures
from tests.unit.gateway.chatml import write_snapshot
from tests.unit.runs.test_history import keeping, trained

from penstock.cli.explain import explain
from penstock.cli.sample_lines import print_samples, tree_lines
from penstock.cli.samples import samples
from penstock.config import RunConfig, dump
from penstock.config.evaluation import EvalConfig, SuiteConfig
from penstock.errors import ConfigError
from penstock.runs.agent_tree import agent_tree
from penstock.runs.decoded import DecodedToolCall, DecodedTurn
from penstock.runs.history import open_run
from penstock.runs.samples import Sample, choose, follow
from penstock.runs.samples_page import render_page
from penstock.types import ToolUse


def with_tokenizer(folder: Path, config: RunConfig) -> RunConfig:
    model = write_snapshot(folder / "model")
    policy = config.models["policy"].model_copy(update={"init": str(model)})
    return config.model_copy(update={"models": {"policy": policy}})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")

    async def made() -> None:
        service = ServiceRun(folder, small_config(), choose=some_failures)
        await service.start()
        for _ in range(3):
            await service.step()
        service.close()

    asyncio.run(made())
    (folder / "config.yaml").write_text(dump(with_tokenizer(folder, small_config())))
    return folder


Show = Callable[..., str]


@pytest.fixture
def show(finished: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    def run(**options: object) -> str:
        assert samples(finished, **options) == 0  # pyright: ignore[reportArgumentType]
        return capsys.readouterr().out

    return run


def heads(text: str) -> list[str]:
    return re.findall(r"^p0-\d+\.\d+\.\d+", text, re.MULTILINE)


def test_the_newest_are_shown_with_their_text(show: Show) -> None:
    text = show(number=2)
    assert len(heads(text)) == 2
    assert "  prompt  bcde\n" in text and re.search(r"  policy  [a-e]bh\n", text)
    assert "  task    {" in text and "node-" in text and "policy@1." in text


def test_steps_best_worst_and_failed(show: Show, finished: Path) -> None:
    with open_run(finished) as run:
        step_two = {trajectory.row_id for trajectory in run.trajectories(steps=2)}
    text = show(step="2", number=50)
    assert set(heads(text)) == step_two and "step 2" in text and "step 1" not in text
    found = json.loads(show(step="1:2", best=2, worst=1, json=True).splitlines()[-1])
    assert [sample["reward"] for sample in found["samples"]] == [0.75, 0.75, 0.0]
    assert found["freed"] == 0 and found["trajectories"] > 24
    text = show(failed=True, number=50)
    assert len(heads(text)) >= 3 and "no reward  failed" in text and "completed" not in text


def test_those_of_one_node(show: Show, finished: Path) -> None:
    with open_run(finished) as run:
        of_nodes = Counter(one.node_id for one in run.trajectories())
        rewarded = [one.row_id for one in run.trajectories(steps=2, node=min(of_nodes))]
    assert len(of_nodes) > 1
    for node, count in of_nodes.items():
        assert len(heads(show(node=node, number=500))) == count
    assert len(rewarded) > 0 and {*heads(show(node=min(of_nodes), step="2"))} <= {*rewarded}
    assert show(node="nobody") == ""


async def test_answers_of_evaluations_are_shown_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = SuiteConfig(name="held_out", task="penstock.tasks.reverse", limit=2)
    evaluation = EvalConfig(every=5, samples=1, suites=(suite,))
    config = small_config().model_copy(update={"eval": evaluation})
    service = ServiceRun(tmp_path, config)
    await service.start()
    await service.step()
    service.close()
    (tmp_path / "config.yaml").write_text(dump(with_tokenizer(tmp_path, config)))
    assert samples(tmp_path, eval=True, number=50) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^p0-e1-0-[01]\.0\.1 .* evaluation", text, re.MULTILINE)) == 2
    assert "held_out-1" in text and "  policy  " in text and not heads(text)
    assert samples(tmp_path, number=500) == 0
    text = capsys.readouterr().out
    assert heads(text) and "p0-e1" not in text
    with pytest.raises(ConfigError, match="no step trained; remove --step"):
        samples(tmp_path, eval=True, step="1")


def test_wrong_requests_say_what_to_write(finished: Path) -> None:
    for step in ("x", ":", "1-2"):
        with pytest.raises(ConfigError, match=r"write one step \(12\) or a range \(1:5, 100:\)"):
            samples(finished, step=step)
    with pytest.raises(ConfigError, match="--follow shows what arrives from now on"):
        samples(finished, follow=True, best=1)
    with pytest.raises(ConfigError, match="use 1 or more"):
        samples(finished, number=0)


async def test_what_was_freed_is_said_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_tokenizer(tmp_path, keeping("sample(1e-9)"))
    (await trained(tmp_path, config)).close()
    assert samples(tmp_path, step="1", json=True) == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert found["samples"] == [] and found["passed_over"] == 12 and found["freed"] >= 36
    assert re.search(r"\d+ of \d+ trajectories of this run were freed after training", err)
    assert "set dataflow.keep=all and a larger dataflow.keep_mb" in err


async def test_following_shows_what_arrives_and_ends_with_the_run(tmp_path: Path) -> None:
    service = ServiceRun(tmp_path, with_tokenizer(tmp_path, small_config()), choose=some_failures)
    await service.start()
    await service.step()
    with open_run(tmp_path) as run, run.folder.locked():  # as a launcher holds it
        assert run.is_running
        steps = follow(run, count=3, sleep=lambda seconds: None)
        before = run.num_trajectories()
        shown: list[Sample] = []

        def look() -> int:
            found, num_others = next(steps)
            shown.extend(found)
            return len(found) + num_others

        reading = asyncio.create_task(asyncio.to_thread(look))
        await service.step()
        num_seen = await reading
        assert 1 <= len(shown) <= 3 and shown[0].turns
    service.close()
    with open_run(tmp_path) as run:
        assert run.num_trajectories() - before >= num_seen > 0
        assert not run.is_running and [*follow(run, count=3)] == [], "it has ended"


SAMPLE = Sample(
    row_id="p0-1.0.1",
    group_id="p0-1",
    source="s",
    task={"q": "<b>&"},
    reward=0.5,
    outcome="completed",
    detail="",
    steps=(3,),
    fate="trained",
    versions=("policy@1.2",),
    node="node-0",
    delivered_at=0.0,
    num_tokens=7,
    state="stored",
    turns=(
        DecodedTurn(
            policy="policy",
            role="",
            parent=-1,
            prompt="<script>alert(1)</script>" + "p" * 2000,
            answer="\x1b[31mred\x07 </pre><img src=x>",
            reasoning="hmm",
            tool_calls=(DecodedToolCall(name="add", arguments='{"a": 1}'),),
            versions=("policy@1.2",),
            finish="stop",
            num_tokens=7,
        ),
    ),
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def test_a_page_stands_alone_and_escapes_what_the_model_wrote(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = render_page("run", [SAMPLE], "12 were freed")
    tags = Tags()
    tags.feed(page)
    assert not {"script", "img", "link"} & tags.seen and "details" in tags.seen
    assert "&lt;script&gt;" in page and "http" not in page.replace("http-equiv", "")
    assert "12 were freed" in page and "prefers-color-scheme: dark" in page and "viewport" in page
    target = tmp_path / "samples.html"
    assert samples(finished, html=target, number=3) == 0
    assert target.read_text().count("<article>") == 3
    assert f"wrote 3 samples to {target}" in capsys.readouterr().err


def test_a_model_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_samples([SAMPLE])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text
    assert "  thinks  hmm\n" in text and '  calls   add({"a": 1})\n' in text


def agent_turn(agent: str, role: str, reward: float | None = None) -> DecodedTurn:
    return replace(SAMPLE.turns[0], agent=agent, role=role, reward=reward, reasoning="")


TREE = replace(
    SAMPLE,
    role_rewards={"solver": 1.0, "\x1bverifier": 0.25},
    turns=(
        agent_turn("", "planner"),
        agent_turn("0", "solver", 0.75),
        agent_turn("0.10", "solver", 0.5),
        agent_turn("0.2", "solver", -1.0),
    ),
    tool_uses=(
        ToolUse(turn=1, name="py", arguments="{}", result="4 <b>", seconds=0.25, agent="0"),
        ToolUse(turn=-1, name="search", arguments="{}", result="no index", is_error=True),
    ),
)


def test_roles_agents_and_tools_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_samples([TREE])
    text = capsys.readouterr().out
    assert "reward 0.5 · solver 1 · " in text and "\x1b" not in text
    assert "(agent 0, reward 0.75)" in text and "(agent 0.2, reward -1)" in text
    first, tool = text.index("search({}) 0.00 s → no index"), text.index("py({}) 0.25 s → 4 <b>")
    assert first < text.index("  planner ") < tool < text.index("(agent 0.10")
    page = render_page("run", [TREE])
    assert "result of py" in page and "4 &lt;b&gt;" in page and "error of search" in page
    assert "agent 0.10 · reward 0.5" in page and "<span>solver 1</span>" in page


def test_a_run_without_roles_and_agents_looks_as_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_samples([replace(SAMPLE, turns=(replace(SAMPLE.turns[0], answer="a", prompt="p"),))])
    head, *rest = capsys.readouterr().out.splitlines()
    assert head == "p0-1.0.1  reward 0.5  completed  step 3 · policy@1.2 · node-0 · 7 tokens"
    assert rest[1:4] == ["  prompt  p", "  thinks  hmm", "  policy  a"]


def test_the_tree_of_agents() -> None:
    tree = agent_tree(TREE.turns)
    assert [line.plain for line in tree_lines(tree)] == [
        "  workflow  planner · 1 turn · 7 tokens",
        "    agent 0  solver · 1 turn · 7 tokens · reward 0.75",
        "      agent 0.2  solver · 1 turn · 7 tokens · reward -1",
        "      agent 0.10  solver · 1 turn · 7 tokens · reward 0.5",
    ]
    assert tree.num_agents == 4
    [idle] = agent_tree([agent_turn("3.1", "solver")]).children
    assert (idle.path, idle.num_turns, idle.children[0].path) == ("3", 0, "3.1")


def test_explain_shows_the_text_of_a_row_and_of_its_group(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(finished, "p0-1.2.1") == 0
    out = capsys.readouterr().out
    assert heads(out) == ["p0-1.2.1"] and "  prompt  bcde\n" in out and "  policy  cbh\n" in out
    assert explain(finished, "p0-1", json=True) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sample["row_id"] for sample in found["samples"]] == [f"p0-1.{n}.1" for n in range(4)]
    assert found["samples"][3]["turns"][0]["answer"] == "dbh" and found["kind"] == "group"


def test_a_choice_counts_what_it_passes_over(finished: Path) -> None:
    with open_run(finished) as run:
        found = choose(run, count=4, order="best")
    assert len(found.samples) == 4 and found.num_without_text == 0
