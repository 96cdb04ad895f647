# SPDX-License-Identifier: Apache-2.0
"""Folders of Harbor tasks as sources: what a task carries, and which tasks are refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import load
from penstock.dataflow.service.build_sources import build_source
from penstock.dataflow.sources import harbor
from penstock.dataflow.sources.harbor import (
    MAX_TASK_BYTES,
    HarborSpec,
    environment_digest,
    open_harbor,
    read_task,
    read_tasks,
)
from penstock.errors import ConfigError
from penstock.tasks.harbor import HarborTask, TaskFile

TASKS = Path(__file__).parents[2] / "harbor_tasks"
RUN = """
name: harbor
models: {policy: {init: "builtin:tiny-qwen3"}}
sources: [{name: shell, harbor: TASKS}]
training: {learning_rate: 1.0e-3, groups_per_batch: 1, steps: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TASKS / "sort-lines", tmp_path / "tasks" / "sort-lines")


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_task(folder, HarborSpec(path=str(folder.parent), **options))
    return str(refused.value)


def test_twenty_tasks_become_tasks_with_their_files() -> None:
    source = open_harbor("shell", HarborSpec(path=str(TASKS)))
    made = [source.task(ordinal, seed=0, workflow="w") for ordinal in range(21)]
    assert len({task.key for task in made}) == 20
    assert made[20].key == made[0].key and made[20].payload == made[0].payload
    by_name = {task.payload["harbor"]["name"]: task for task in made}
    assert sorted(by_name) == sorted(path.name for path in TASKS.iterdir())
    record = msgspec.convert(by_name["binary-file"].payload["harbor"], HarborTask)
    assert record.files["/app/image.bin"].data == bytes(range(256))
    assert record.tests["test.sh"].mode == 0o755
    assert (record.workdir, record.agent_timeout_s, record.memory_mb) == ("/app", 300.0, 512)
    assert not any("solve" in str(task.payload) for task in made)


def test_a_changed_file_changes_the_key_and_the_digest(folder: Path) -> None:
    def opened() -> tuple[str, str]:
        source = open_harbor("shell", HarborSpec(path=str(folder.parent)))
        return source.task(0, seed=0, workflow="w").key, source.digest(0)

    before = opened()
    assert opened() == before
    (folder / "tests" / "expected.txt").write_text("other\n")
    after = opened()
    assert after[0] != before[0] and after[1] != before[1]


def test_time_limits_of_the_run_file_bound_those_of_a_task(folder: Path) -> None:
    spec = HarborSpec(path=str(folder), agent_timeout_s=7.0, verifier_timeout_s=900.0)
    task = read_task(folder, spec)
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (7.0, 300.0)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[[steps]]\nname = 'a'", "steps"),
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[environment]\ngpus = 1", "gpus"),
        ("[environment.healthcheck]\ncommand = 'x'", "healthcheck"),
        ("[[environment.mcp_servers]]\nname = 'x'", "mcp_servers"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
        ("[agent]\nuser = 'bob'", "agent.user"),
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec"),
        ("[environment]\nmemory_mb = -1", "memory_mb"),
        ("[environment]\nmemory_mb = 9" + "9" * 40, "memory_mb"),
        ("[environment]\nmemory = '9" + "9" * 400 + "G'", "memory_mb"),
        ("[environment]\nstorage = '2000000G'", "storage_mb"),
        ("[verifier.env]\nKEY = '${HOME}'", "verifier.env.KEY"),
        ("not toml", "task.toml"),
    ],
)
def test_settings_that_no_sandbox_gives_are_refused_by_name(
    folder: Path, line: str, named: str
) -> None:
    (folder / "task.toml").write_text(line)
    assert named in refusal(folder)


@pytest.mark.parametrize(
    ("dockerfile", "named"),
    [
        ("FROM debian\n", "WORKDIR /app"),
        ("FROM debian\nWORKDIR /usr/src\n", "/usr/src, which is read-only"),
        ("FROM debian\nWORKDIR /tests\n", "a place of the format itself"),
        ("FROM debian\nWORKDIR /app\nCOPY nothing .\n", "Dockerfile:3: COPY: environment/nothing"),
        ("FROM debian\nWORKDIR /app\nCOPY *.md .\n", "no file matches environment/*.md"),
        (
            "FROM debian\nWORKDIR /app\nCOPY words.txt /etc/x\n",
            "Dockerfile:3: COPY: its target",
        ),
        ("FROM alpine:3\nWORKDIR /app\n", "no root file system for the image alpine:3"),
        ("FROM debian\nWORKDIR /app\nRUN true\n", "Dockerfile:3: RUN is not run here"),
    ],
)
def test_environments_that_cannot_be_made_are_refused(
    folder: Path, dockerfile: str, named: str
) -> None:
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    assert named in refusal(folder)


def test_a_root_file_system_stands_in_for_run_and_for_other_images(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "root" / "usr").mkdir(parents=True)
    root, dockerfile = str(tmp_path / "root"), folder / "environment" / "Dockerfile"
    dockerfile.write_text("FROM alpine:3\nWORKDIR /app\nRUN true\n")
    digest = environment_digest(folder / "environment")
    for key in ("sort-lines", digest):
        assert read_task(folder, HarborSpec(path="", roots={key: root})).root == root
    assert digest in refusal(folder, roots={"alpine:3": root})  # RUN differs by task, images do not
    dockerfile.write_text("FROM alpine:3\nWORKDIR /app\n")
    assert read_task(folder, HarborSpec(path="", roots={"alpine:3": root})).root == root
    assert "no folder usr" in refusal(folder, roots={"alpine:3": str(tmp_path)})


def test_an_environment_is_read_to_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files need no room on a disk: of a sparse one, a terabyte was read."""
    environment = folder / "environment"
    monkeypatch.setattr(harbor, "MAX_ENVIRONMENT_BYTES", 3 << 20)
    for name in ("first", "second"):
        (environment / name).touch()
        os.truncate(environment / name, 2 << 20)
    assert "environment has more than 3,145,728 bytes" in refusal(folder)
    (environment / "second").unlink()
    read_task(folder, HarborSpec(path=""))


def test_an_image_made_beforehand_has_all_that_the_dockerfile_does(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "root" / "usr").mkdir(parents=True)
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'made:1'\n")
    task = read_task(folder, HarborSpec(path="", roots={"made:1": str(tmp_path / "root")}))
    assert (task.workdir, task.files) == ("/app", {})


def test_files_that_would_be_missing_are_refused(folder: Path) -> None:
    (folder / "tests" / "big").write_bytes(b"x" * (1 << 20))
    assert "more than 1,048,576" in refusal(folder)
    (folder / "tests" / "big").unlink()
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    assert "is a link" in refusal(folder)
    (folder / "tests" / "link").unlink()
    (folder / "tests" / "test.sh").unlink()
    assert "test.sh is missing" in refusal(folder)


def test_copies_of_a_file_count_while_they_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small Dockerfile named one file thousands of times; all were in memory before the sum."""
    made, of = 0, TaskFile.of

    def counted(data: bytes, mode: int) -> TaskFile:
        nonlocal made
        made += len(data)
        return of(data, mode)

    monkeypatch.setattr(TaskFile, "of", counted)
    (folder / "environment" / "words.txt").write_bytes(b"x" * (MAX_TASK_BYTES // 4))
    dockerfile = folder / "environment" / "Dockerfile"
    for target in ("/app/{}", "/app/same"):
        copies = "".join(f"COPY words.txt {target.format(number)}\n" for number in range(100))
        dockerfile.write_text(f"FROM debian\nWORKDIR /app\n{copies}")
        made = 0
        assert "more than 1,048,576" in refusal(folder)
        assert made <= MAX_TASK_BYTES


def test_names_of_files_count(folder: Path) -> None:
    """Thousands of empty files, at long paths, travel with every lease, too."""
    for number in range(20):
        (folder / "environment" / f"empty-{number}").touch()
    copies = f"COPY . /app/{'d' * 2000}/\n" * 30
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(f"FROM debian\nWORKDIR /app\n{copies}")
    assert "more than 1,048,576" in refusal(folder)


def test_the_instruction_counts(folder: Path) -> None:
    spec = HarborSpec(path=str(folder))
    (folder / "instruction.md").write_text("x" * (MAX_TASK_BYTES // 2))
    read_tasks("shell", spec)
    (folder / "tests" / "data").write_bytes(b"x" * (MAX_TASK_BYTES // 2))
    with pytest.raises(ConfigError, match="more than 1,048,576"):
        read_tasks("shell", spec)


@pytest.mark.parametrize(
    "name", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh"]
)
def test_no_file_of_a_task_is_read_without_end(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, read = 0, Path.read_bytes

    def counted(path: Path) -> bytes:
        nonlocal most
        most = max(most, path.stat().st_size)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: counted(path).decode())  # pyright: ignore
    with (folder / name).open("ab") as file:
        file.truncate(MAX_TASK_BYTES * 4)  # sparse
    with pytest.raises(ConfigError, match=r"more than 1,048,576|longer than"):
        read_tasks("shell", HarborSpec(path=str(folder)))
    assert most < MAX_TASK_BYTES


def test_every_task_that_cannot_be_used_is_named(folder: Path) -> None:
    other = shutil.copytree(folder, folder.with_name("other"))
    (folder / "instruction.md").write_text("\n")
    (other / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        read_tasks("shell", HarborSpec(path=str(folder.parent)))
    text = str(refused.value)
    assert "source 'shell': 2 tasks" in text
    assert "instruction.md is empty" in text and "docker-compose.yaml is not supported" in text
    with pytest.raises(ConfigError, match="has no Harbor tasks"):
        read_tasks("shell", HarborSpec(path=str(folder / "tests")))


def test_markers_of_data_sets_do_not_reach_the_agent(folder: Path) -> None:
    (folder / "instruction.md").write_bytes(
        b"<!-- x-canary GUID 1 -->\r\n# canary y\n\nDo\r\nit.\n"
    )
    [payload] = read_tasks("shell", HarborSpec(path=str(folder)))
    assert payload["prompt"] == "Do\nit.\n"


def test_a_run_file_names_the_agent_of_its_harbor_tasks(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("TASKS", str(TASKS)))
    config = load(file)
    [source] = config.sources
    made = build_source(config, source).task(0, seed=0, workflow="single_turn")
    assert made.workflow == '{"harbor": []}' and config.reward_of(source) is None
    file.write_text(file.read_text() + "workflow: {command: [agent, -x]}\n")
    config = load(file)
    assert config.workflow_of(config.sources[0]) == '{"harbor": ["agent", "-x"]}'


@pytest.mark.parametrize("key", ["workflow: single_turn", "reward: a:b", "task: a.b"])
def test_what_has_no_effect_on_harbor_tasks_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("harbor: TASKS", f"harbor: {TASKS}, {key}"))
    with pytest.raises(ConfigError, match=key.partition(":")[0]):
        load(file)
