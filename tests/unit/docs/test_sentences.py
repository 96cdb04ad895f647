# SPDX-License-Identifier: Apache-2.0
"""Sentences that were wrong once, and topics that were missing: each stays mended."""

from __future__ import annotations

import ast
import re

import pytest
from tests.e2e.document_blocks import Block, all_blocks, blocks_of
from tests.unit.docs.pages import DOCS, ROOT, words

from penstock.config import ModelConfig
from penstock.config.weights import WeightsConfig

GLOSSARY = DOCS / "reference" / "glossary.md"


def everything() -> str:
    return " ".join(words(page) for page in [ROOT / "README.md", *DOCS.rglob("*.md")])


@pytest.mark.parametrize(
    "wrong",
    [
        "joins in the same way as a cluster node",
        "a config cannot name a bucket",
        "no run has trained two policies",
    ],
)
def test_a_wrong_sentence_stays_away(wrong: str) -> None:
    assert wrong.lower() not in everything().lower()


def test_another_machine_is_described_alike_everywhere() -> None:
    """A node on another machine needs the run's authority, or a tunnel."""
    assert "penstock tls init --host" in words(DOCS / "how-to" / "join.md")
    assert "network namespaces" in words(DOCS / "explanation" / "limits.md")


def test_a_mirror_is_documented_where_weights_are() -> None:
    assert WeightsConfig.model_fields["mirror"].default == ""
    assert "weights.mirror: s3://" in words(DOCS / "explanation" / "weights.md")


def test_lag_is_never_versions() -> None:
    assert "| **lag** | Seconds" in GLOSSARY.read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        found = re.findall(r"lag of (?:\d+|max_staleness)|lags? of \d+ versions", words(page))
        assert found == [], page


def test_two_policies_in_one_run_are_listed_as_tested() -> None:
    limits = words(DOCS / "explanation" / "limits.md")
    for test in ("test_policies.py", "test_adapters.py"):
        assert f"tests/e2e/{test}" in limits and (ROOT / "tests" / "e2e" / test).exists()


def test_no_paragraph_of_the_protocol_is_mangled() -> None:
    """A line that runs on far beyond its paragraph was joined by mistake."""
    text = (DOCS / "reference" / "protocol.md").read_text(encoding="utf-8")
    prose = [line for line in text.splitlines() if "|" not in line and "`{" not in line]
    assert [line for line in prose if len(line) > 125] == []


def test_the_guide_says_how_nodes_report_gpus_and_cost() -> None:
    assert "tags" not in ModelConfig.model_fields, "then say how in how-to/balance.md"
    assert "penstock join URL --tags gpus=8,cost=12.5" in words(DOCS / "how-to" / "balance.md")


def test_losses_have_an_import_path_and_an_example() -> None:
    page = (DOCS / "how-to" / "add-loss.md").read_text(encoding="utf-8")
    assert "from penstock import TokenLoss, Tokens" in page
    for field in ("logprobs_K", "sampling_K", "advantages_K", "sequences_K"):
        assert f"`{field}`" in page


@pytest.mark.parametrize(
    ("page", "topics"),
    [
        ("how-to/add-rule.md", ["`task_key`", "`rewards`", "`number`", "`source`", "`values`"]),
        ("tutorials/tool-agent.md", ["`messages`", "`tools`", "`thinking`", "`tool_calls`"]),
        ("how-to/online-agents.md", ["name: live", "session:", "algorithm:", "training:"]),
        ("how-to/backup-move-upgrade.md", ["## Back up", "## Move", "## Upgrade"]),
        ("how-to/scrape-metrics.md", ["scrape_configs", "credentials_file"]),
        ("how-to/systemd.md", ["[Service]", "ExecStart", "Restart=on-failure"]),
    ],
)
def test_a_topic_is_documented(page: str, topics: list[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [topic for topic in topics if topic not in text] == []


def test_every_block_says_what_it_is() -> None:
    """A language, and a reason where it is not run."""
    known = {"bash", "python", "yaml", "json", "text", "toml", "ini"}
    odd = [block.where for block in all_blocks() if block.language not in known]
    assert odd == []
    commands = [
        block.where
        for block in all_blocks()
        if block.language == "text"
        and not block.reason
        and re.search(r"^(\$|make) ", block.text, re.M)
    ]
    assert commands == []
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        fences = re.findall(r"^[ ]*```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(list(blocks_of(page))), page


PYTHON = [block for block in all_blocks() if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_a_python_block_parses(block: Block) -> None:
    ast.parse(block.text)


def test_print_the_blocks_that_are_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """`pytest -s` shows the list; each has a reason of some words."""
    listed = [block for block in all_blocks() if block.reason]
    with capsys.disabled():
        for block in listed:
            print(f"\nnot run: {block.where}: {block.reason}", end="")
    assert all(len((block.reason or "").split()) >= 3 for block in listed)
