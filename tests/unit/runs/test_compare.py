# SPDX-License-Identifier: Apache-2.0
"""`penstock compare`: which results of a run count, the tables, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tests.unit.cli.test_commands import run_main
from tests.unit.evals.test_figures import result_of
from tests.unit.runs.metrics_files import run_with_metrics

from penstock.cli.compare_lines import comparison_lines
from penstock.errors import ConfigError
from penstock.evals.distributions import fair_coin_p
from penstock.evals.results import Evaluation, SuiteResult
from penstock.runs.compare import compare


def scored(num_right: int, version: int = 0, suite: str = "aime") -> SuiteResult:
    """Of 20 questions, the last ones right."""
    made = result_of({f"q{i}": [float(i >= 20 - num_right)] for i in range(20)})
    return msgspec.structs.replace(made, suite=suite, version=version)


def write_results(path: Path, *suites: SuiteResult) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = Evaluation(model="m", step=suites[0].version, suites=suites)
    path.write_bytes(msgspec.json.encode(found))
    return path


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, reward, right in (("old", 0.2, 4), ("new", 0.8, 14)):
        run_with_metrics(tmp_path / name, [(i, i, reward) for i in range(1, 11)])
        folder = tmp_path / name / "evaluations"
        write_results(folder / "policy@0.json", scored(2))
        write_results(folder / "policy@10.json", scored(right, 10))
        (folder / "best.json").write_text('{"version": 10}')
    return tmp_path


def test_two_runs_are_compared_at_their_newest_versions(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_main(capsys, "compare", "old", "new")
    assert code == 0
    lines = out.splitlines()
    assert lines[:2] == ["A  old", "B  new"]
    assert lines[4].split()[:4] == ["A", "policy@10", "20.0", "%"]
    assert lines[5].split()[:4] == ["B", "policy@10", "70.0", "%"]
    assert lines[6].startswith("B - A  +50.0 points (+")
    assert lines[6].endswith("p = 0.002, significant (McNemar, exact)")
    assert lines[7].startswith("gained  10 questions: q6, q7")
    assert lines[-2].split() == ["A", "policy", "10", "0.200", "0.200", "0.0", "s"]
    assert max(map(len, lines[3:6])) <= 80


def test_two_versions_of_one_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "compare", "new@0", "new", "--json")
    report = json.loads(out.splitlines()[-1])
    [suite] = report["suites"]
    assert (code, suite["difference"], suite["a"]["avg"]) == (0, pytest.approx(0.6), 0.1)
    assert report["a"]["training"] == [], "it is the same training"


def test_the_newest_file_about_a_version_counts(runs: Path) -> None:
    write_results(runs / "new/evaluations/local/policy@10.json", scored(20, 10))
    assert compare("old", "new").suites[0].b.avg == 1.0


def test_two_files_of_results(runs: Path) -> None:
    a = write_results(runs / "a.json", scored(5), scored(5, suite="only"))
    b = write_results(runs / "b.json", scored(6))
    found = compare(str(a), str(b))
    assert found.only_one == ("only",)
    assert found.suites[0].gained == ("q14",)
    [lost] = [line for line in comparison_lines(compare(str(b), str(a)), 9) if "q14" in line]
    assert lost == "lost    1 question: q14", "as wide as `gained`"
    assert not found.suites[0].is_significant


def test_markdown_and_picture(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--svg", "c.svg", "--markdown", "c.md")
    code, _, err = run_main(capsys, "compare", "old", "new", *words)
    assert code == 0
    assert "wrote c.svg" in err
    picture = Path("c.svg").read_text()
    for text in ("aime", "20 questions", "+50.0 points", "p = 0.002", "mean reward", "old", "new"):
        assert text in picture
    page = Path("c.md").read_text().splitlines()
    assert page[0] == "# old and new"
    assert page[4].startswith("| aime | 20.0 % (")
    assert "| +50.0 points (+" in page[4]
    assert [line.split(" | ")[0] for line in page[-2:]] == ["| old", "| new"], "no A and B here"


HOSTILE = "a\x1b]0;owned\x07\n# <script>alert(1)</script> [x](http://evil) `|` $\\frac$ \u202e"


def test_names_in_foreign_files_are_text_in_pages_and_pictures(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_results(runs / "$a$<b>.json", scored(5, suite=HOSTILE))
    b = write_results(runs / "b.json", scored(6, suite=HOSTILE))
    words = ("--svg", "c.svg", "--markdown", "c.md")
    assert run_main(capsys, "compare", str(a), str(b), *words)[0] == 0
    page, picture = Path("c.md").read_text(), Path("c.svg").read_text()
    [*_] = ElementTree.fromstring(picture).iter()
    for text in (page, picture):
        assert "<script" not in text and "<b>" not in text
        assert not [char for char in text if char not in "\n\t" and not char.isprintable()]
    assert "\\[x\\](" in page and "\\`\\|\\`" in page
    assert [line for line in page.splitlines() if line.startswith("#")] == [page.splitlines()[0]]


def broken(text: str, becomes: str) -> bytes:
    """A file of results in which something was replaced."""
    whole = msgspec.json.encode(Evaluation(model="m", step=0, suites=(scored(1),))).decode()
    assert text in whole
    return whole.replace(text, becomes, 1).encode()


@pytest.mark.parametrize(
    "content",
    [
        broken('"score":0.0', '"score":1e300'),
        broken('"score":0.0', '"score":1e400'),
        broken('"score":0.0', '"score":NaN'),
        broken('"sample":0', '"sample":-1'),
        broken('"tokens":0', f'"tokens":{1 << 64}'),
        broken('"samples":1', '"samples":0'),
        broken('"question":"q0"', f'"question":"{"q" * 3000}"'),
        broken('"question":"q0"', '"question":"q1"'),
        broken("{", "[" * 100_000),
        b"\xff",
    ],
    ids=[
        *("huge", "infinite", "nan", "negative", "65-bits"),
        *("none", "long", "twice", "deep", "bytes"),
    ],
)
def test_a_foreign_file_outside_the_bounds_is_refused(runs: Path, content: bytes) -> None:
    foreign = runs / "foreign.json"
    foreign.write_bytes(content)
    with pytest.raises(ConfigError, match=r"foreign\.json holds .*evaluate again"):
        compare("old", str(foreign))


def test_no_more_of_a_foreign_file_is_read_than_results_may_have(runs: Path) -> None:
    with (runs / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"huge\.json has more than 256 MiB"):
        compare("old", "huge.json")


def test_many_flips_are_compared_at_once() -> None:
    """Sums of whole binomial coefficients take half a second for 4,000 flips already."""
    assert fair_coin_p(50_000, 100_400) == pytest.approx(0.207946, rel=1e-5)


def test_what_cannot_be_compared_says_what_to_do(runs: Path) -> None:
    other = msgspec.structs.replace(scored(3), suite_digest="other")
    for words, says in (
        (("new", "new"), "are the same"),
        (("old@3", "new"), "penstock eval old --version 3"),
        ((str(write_results(runs / "x.json", other)), "new"), "not comparable"),
        (("nothing.json", "new"), "cannot read"),
        ((str(write_results(runs / "y.json", scored(1, suite="z"))), "new"), "share neither"),
    ):
        with pytest.raises(ConfigError, match=says):
            compare(*words)
