# SPDX-License-Identifier: Apache-2.0
"""Harbor tasks in sandboxes: the files of an agent reach the verifier, whose word counts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.unit.rollout.harbor_trials import NAMES, TASKS, attempt, attempt_script, task, with_test

from penstock.errors import RewardError, RewardTimeout, SandboxError, WorkflowError
from penstock.rollout.attempt import reward_failure
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.proxied_sandbox import INTERPRETER
from penstock.rollout.sandbox.types import Limits
from penstock.types import FailureKind


async def test_each_of_20_tasks_is_solved_by_its_solution_and_by_nothing_less() -> None:
    """Their verifiers are written in sh, bash, Python, Perl, awk, sed and Node."""
    solutions = {name: (TASKS / name / "solution" / "solve.sh").read_text() for name in NAMES}
    given = [(name, script) for name in NAMES for script in (solutions[name], "true")]
    trials = await asyncio.gather(*(attempt_script(task(name), script) for name, script in given))
    assert len(NAMES) == 20 and not any(trial.failure for trial in trials)
    assert [(name, trial.reward) for (name, _), trial in zip(given, trials, strict=True)] == [
        (name, float(script != "true")) for name, script in given
    ]


async def test_part_of_the_work_is_part_of_the_reward() -> None:
    done = await attempt_script(task("partial-credit"), "echo one > one.txt")
    assert done.reward == 0.25


async def test_an_agent_gets_the_instruction_and_its_own_files_but_no_tests(tmp_path: Path) -> None:
    agent = tmp_path / "agent.sh"
    agent.write_text(
        'test "$1" = "say: Do it." && test "$(cat)" = "Do it." || exit 7\n'
        f"test ! -e {TASKS} || exit 8\n"
        'test ! -e /tests && test ! -e /solution && test -z "$(ls -A /logs/verifier)" || exit 9\n'
        "echo hello > hello.txt\n"
    )
    (tmp_path / "secret").write_text("beside the agent")
    argv = ["sh", str(agent), "say: {instruction}"]
    done = await attempt(task("hello-file"), argv, Isolation())
    assert (done.reward, done.failure) == (1.0, "")
    agent.write_text(f"test ! -e {tmp_path}/secret")
    assert (await attempt(task("hello-file"), argv, Isolation())).failure == ""


async def test_an_agent_out_of_time_is_judged_by_what_it_did() -> None:
    given = task("hello-file", agent_timeout_s=5.0)
    done = await attempt_script(given, "echo hello > hello.txt; sleep 600")
    assert (done.reward, done.failure) == (1.0, "")


async def test_an_agent_that_fails_is_judged_but_stays_a_failure() -> None:
    done = await attempt_script(task("hello-file"), "echo hello > hello.txt; echo oh >&2; exit 3")
    assert done.reward == 1.0
    assert "exited with code 3: oh" in done.failure
    broken = await attempt(task("hello-file"), ["no-such-agent"], Isolation())
    assert "no-such-agent" in broken.failure and "code 127" in broken.failure


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("true", "wrote neither reward.txt nor reward.json"),
        ("echo nonsense > /logs/verifier/reward.txt", "'nonsense'"),
        ("echo nan > /logs/verifier/reward.txt", "'nan'"),
        ("echo 1e400 > /logs/verifier/reward.txt", "'1e400'"),
        (": > /logs/verifier/reward.txt", "''"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "one finite number"),
        ("echo true > /logs/verifier/reward.json", "'true'"),
        ("printf '1%0400d' 0 > /logs/verifier/reward.json", "one finite number"),
        ("mkdir /logs/verifier/reward.txt", "reward.txt"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "reward.txt"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "signal 9"),
        ("exec /tests/missing", "exit code 127"),
    ],
)
async def test_a_verifier_without_a_reward_is_an_error_and_never_zero(
    script: str, why: str
) -> None:
    with pytest.raises(RewardError) as failed:
        await attempt_script(with_test(task("hello-file"), f"#!/bin/sh\n{script}"), "true")
    assert "hello-file" in str(failed.value) and why in str(failed.value)
    assert reward_failure(failed.value) is FailureKind.REWARD


async def test_a_verifier_out_of_time_has_its_own_kind() -> None:
    given = with_test(task("hello-file", verifier_timeout_s=0.5), "#!/bin/sh\nsleep 600")
    with pytest.raises(RewardTimeout, match=r"exceeded 0\.5 s") as failed:
        await attempt_script(given, "true")
    assert reward_failure(failed.value) is FailureKind.REWARD_DEADLINE


async def test_a_verifier_writes_rewards_as_the_format_has_them() -> None:
    rewards = {"0.5": 0.5, '{"accuracy": 0.75}': 0.75, '{"reward": -1, "n": 3}': -1.0}
    for text, value in rewards.items():
        script = f"echo '{text}' > /logs/verifier/reward.json; exit 3"
        given = with_test(task("hello-file"), script)  # without a first line: sh runs it
        assert (await attempt_script(given, "true")).reward == value


async def test_an_agent_that_fills_its_disk_is_judged_and_one_that_digs_fails() -> None:
    fill = "head -c 80M /dev/zero > big; echo hello > hello.txt; true"
    filled = await attempt_script(task("hello-file"), fill)
    assert filled.reward == 0.0  # no room was left for the answer
    deep = "i=0; while test $i -lt 70; do mkdir d && cd d; i=$((i + 1)); done"
    with pytest.raises(WorkflowError, match="at most 64 levels deep"):
        await attempt_script(task("hello-file"), deep)


def libraries(program: str) -> list[str]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    found = [word for word in done.stdout.split() if word.startswith("/")]
    return [path for path in found if not path.startswith(sys.base_prefix)]  # shown anyway


def make_root(root: Path) -> None:
    """A root file system with sh, cat, cp, the libraries of this Python, and what a RUN made."""
    programs = ["/bin/sh", "/bin/cat", "/bin/cp"]
    modules = [str(import_module(name).__file__) for name in ("_ctypes", "_socket")]
    users = (*programs, *modules, INTERPRETER)
    needed = [*programs, *(file for program in users for file in libraries(program))]
    for file in {Path(file).parent.resolve() / Path(file).name for file in needed}:
        copy = root / file.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc").mkdir()
    (root / "etc" / "made").write_text("etc of the root\n")
    (root / "app" / "inner").mkdir(parents=True)
    (root / "app" / "inner" / "made.txt").write_text("by RUN\n")
    (root / "app" / "link.txt").symlink_to("inner/made.txt")


async def test_a_root_file_system_made_beforehand_stands_in_for_run(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_root(root)
    test = '[ "$(cat link.txt hello.txt /etc/made)" = "$(cat /tests/x)" ] && echo 1 || echo 0'
    given = with_test(
        task("hello-file", root=str(root)),
        f"#!/bin/sh\n({test}) > /logs/verifier/reward.txt",
        x="by RUN\nmine\netc of the root\n",
    )
    script = "test ! -e /usr/bin/perl && echo mine > hello.txt && echo x > /app/inner/new"
    done = await attempt_script(given, script)
    assert (done.reward, done.failure) == (1.0, "")
    assert (await attempt_script(given, "echo x > link.txt; echo mine > hello.txt")).reward == 0.0
    assert (root / "app" / "inner" / "made.txt").read_text() == "by RUN\n"


@pytest.mark.parametrize("name", ["root", "etc", "app"])
async def test_links_of_a_root_file_system_do_not_lead_to_the_host(
    tmp_path: Path, name: str
) -> None:
    """The author of a task wrote its Dockerfile, and so the links in what it builds."""
    root, host = tmp_path / "root", tmp_path / "host"
    make_root(root)
    host.mkdir(mode=0o755)
    (host / "secret").write_text("of the host")
    if (root / name).exists():
        shutil.rmtree(root / name)
    (root / name).symlink_to(host)
    with pytest.raises(SandboxError, match=f"{name} is a link"):
        await attempt_script(task("hello-file", root=str(root)), f"cat /{name}/secret")


async def test_an_empty_root_file_system_is_no_reward(tmp_path: Path) -> None:
    (tmp_path / "usr").mkdir()
    with pytest.raises(SandboxError):
        await attempt_script(task("hello-file", root=str(tmp_path)), "true")


async def test_places_need_the_back_end_that_has_them() -> None:
    with pytest.raises(SandboxError, match="backend: auto"):
        await attempt(task("hello-file"), ["true"], Isolation(IsolationSettings(backend="none")))


async def test_limits_of_the_run_file_bound_a_task() -> None:
    uses = {Use.WORKFLOW: UseSettings(limits=Limits(wall_s=600, cpu_s=600, disk_mb=8))}
    script = "head -c 20M /dev/zero > big; test $(stat -c %s big) -lt 9000000 || exit 5"
    isolation = Isolation(IsolationSettings(uses=uses))
    done = await attempt(task("hello-file"), ["sh", "-c", script], isolation)
    assert (done.reward, done.failure) == (0.0, "")
