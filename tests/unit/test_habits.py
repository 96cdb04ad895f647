# SPDX-License-Identifier: Apache-2.0
"""The habits of this repository hold: hooks refuse faults, hosted CI runs what .ci/run runs, the
checks find what they are for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from scripts.check_public_imports import blocks, check, public_names
from scripts.check_words import check_code, check_page, read_list
from scripts.import_graph import find_cycles, read_graph

ROOT = Path(__file__).parents[2]
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with our hooks and nothing else."""
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__py*"))
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "src" / "penstock").mkdir(parents=True)
    (tmp_path / "src" / "penstock" / "__init__.py").write_text(LICENCE + '__all__ = ["Task"]\n')
    (tmp_path / "docs").mkdir()
    (tmp_path / ".gitignore").write_text(".venv\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    git(tmp_path, *identity, "commit", "--quiet", "--message", "hooks")
    return tmp_path


def git(folder: Path, *args: str) -> None:
    subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True)


FAULTS = {
    "ruff-check": {"src/penstock/planted.py": LICENCE + "import os\n"},
    "ruff-format": {"src/penstock/planted.py": LICENCE + "x=[1,2]\n"},
    "spelling": {"docs/planted.md": "A page with t" + "eh usual mistake.\n"},
    "files": {"planted.toml": "key = [1,\n"},
    "forbidden": {"src/penstock/planted.py": LICENCE + "import pickle  # noqa: F401\n"},
    "words": {"src/penstock/planted.py": LICENCE + '"""The caller is told so."""\n'},
    "public-imports": {"docs/planted.md": "```python\nfrom penstock import Tasks\n```\n"},
    "cycles": {
        "src/penstock/one.py": LICENCE + "import penstock.two\n",
        "src/penstock/two.py": LICENCE + "import penstock.one\n",
    },
}


@pytest.mark.parametrize("hook", FAULTS)
def test_a_hook_refuses_a_planted_fault(hook: str, repository: Path) -> None:
    def run() -> int:
        git(repository, "add", "--all")
        environment = {**os.environ, "PRE_COMMIT_HOME": str(repository / ".git" / "hooks-cache")}
        command = [str(ROOT / ".venv" / "bin" / "pre-commit"), "run", hook]
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True)
        return done.returncode

    harmless = repository / "src" / "penstock" / "harmless.py"
    harmless.write_text(LICENCE + '"""Nothing wrong here."""\n')
    assert run() == 0
    for name, text in FAULTS[hook].items():
        (repository / name).write_text(text)
    assert run() == 1


def test_every_hook_is_local() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {entry["repo"] for entry in config["repos"]} == {"local"}


def test_hosted_ci_runs_what_our_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["ci"]["steps"]
    hosted = [step["run"] for step in steps if "run" in step]
    ours = re.findall(r"^run (make .+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert hosted == ours
    actions = [step["uses"] for step in steps if "uses" in step]
    assert all(re.search(r"@[0-9a-f]{40}$", action) for action in actions)


def test_no_module_imports_itself_through_others() -> None:
    assert find_cycles(read_graph()) == []


def test_a_cycle_for_type_checkers_only_is_found(tmp_path: Path) -> None:
    package = tmp_path / "penstock"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def later():\n    from penstock import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.a import later\n"
    )
    assert find_cycles(read_graph(tmp_path)) == [("penstock.a", "penstock.b")]


def test_words_are_found_in_prose_and_names_and_not_in_code_spans() -> None:
    banned = read_list()
    found = list(check_code('"""It begins\nanew."""\nfruitless = 1\n', banned))
    assert [line for line, _ in found] == [2, 3]
    assert not list(check_page("`anew` is a name here.\n\n```\ntold\n```\n", banned))
    assert len(list(check_page("A row is told\nanew.\n", banned))) == 2


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("from penstock.types import Task", "imports Task from penstock.types"),
        ("import penstock.types", "imports penstock.types"),
        ("from penstock import Tasks", "imports Tasks, which is not public"),
        ("import penstock\npenstock.launch()", "uses penstock.launch"),
        ("def f():\n    from penstock.runs.launch import launch", "imports launch"),
    ],
)
def test_an_import_of_what_is_not_public_is_found(code: str, says: str) -> None:
    names = public_names()
    [found] = check(code, "recipes/planted.py", 1, names)
    assert says in str(found)
    allowed = "import penstock\nfrom penstock import Task, reward\npenstock.run({})\nx.penstock.y"
    assert check(allowed, "recipes/planted.py", 1, names) == []
    assert check("import penstock", "recipes/foreign/planted.py", 1, names)


def test_blocks_of_a_page_are_checked_where_they_stand() -> None:
    page = "One.\n\n```python\nfrom penstock.a import b\n```\n\n=== tab\n\n    ```python title=x\n"
    page += "    f(…\n    from penstock.c import d\n    ```\n\n```yaml\nimport penstock.e\n```\n"
    found = [
        (one.line, one.message.split(";")[0])
        for line, code in blocks(page)
        for one in check(code, "docs/page.md", line, public_names())
    ]
    assert found == [(4, "imports b from penstock.a"), (11, "imports d from penstock.c")]


LEAK = """
import socket

class Leaked(socket.socket):
    pass

def test_leaks():
    one = Leaked()
    one.itself = one  # only a collection finds it
"""


def test_a_leak_fails_in_the_file_that_leaked(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(LEAK)
    (tmp_path / "test_b.py").write_text("def test_other():\n    pass\n")
    words = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    words = [sys.executable, "-m", "pytest", *words, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert re.search(r"^ERROR .*test_a\.py::test_leaks", done.stdout, re.MULTILINE), done.stdout


TOGETHER = """
import time
from pathlib import Path

import pytest

def stays(name):
    with Path("log").open("a") as log:
        log.write(f"+{name} ")
    time.sleep(0.05)
    with Path("log").open("a") as log:
        log.write(f"-{name} ")

@pytest.mark.parametrize("number", range(3))
def test_one_of_many(number):
    stays("many")

@pytest.mark.alone
def test_alone():
    stays("alone")
"""


def test_what_is_marked_alone_has_no_other_beside_it(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(TOGETHER)
    words = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    words = [sys.executable, "-m", "pytest", "-n", "2", *words, str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "12 passed" in done.stdout, done.stdout
    log = (tmp_path / "log").read_text()
    assert log.count("+alone -alone") == 3, log


MODULES = {
    "math_verify": "math-verify",
    "opentelemetry": "opentelemetry-sdk",
    "google": "protobuf",
    "yaml": "pyyaml",
    "anyio": "starlette",
    "httpcore2": "httpx2",
    "huggingface_hub": "transformers",
    "mcp_types": "mcp",
    "pydantic_core": "pydantic",
    "referencing": "jsonschema",
}
"""Modules whose distribution has another name, or comes with the one that is named here."""
ELSEWHERE = {
    *("gymnasium", "openenv", "reasoning_gym", "verifiers", "serving", "solution"),
    *("penstock", "penstock_answers", "penstock_patches", "penstock_slices"),
}
"""Imported in environments of other libraries, or written beside their program."""


def test_what_we_import_comes_with_the_wheel() -> None:
    """By a plain installation or an extra for users: the tests' own environment has more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(w for e in extras if e != "dev" for w in extras[e])]
    declared = {re.split(r"[\[<>=]", one)[0].lower().replace("_", "-") for one in wanted}
    line = re.compile(r"^ *(?:from (\w+)\S* import |import (\w+)\S*(?: as \w+)? *(?:#.*)?$)", re.M)
    missing: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        found = {str(a or b) for a, b in line.findall(path.read_text())}
        for module in found - sys.stdlib_module_names - ELSEWHERE:
            if str(MODULES.get(module, module)).replace("_", "-") not in declared:
                missing[module] = str(path.relative_to(ROOT))
    assert missing == {}, "declare it in pyproject.toml, not only for `dev`"
