# SPDX-License-Identifier: Apache-2.0
"""Agents that try to pass the verifier of a Harbor task without solving it: none is rewarded."""

from __future__ import annotations

import sys

import pytest
from tests.unit.rollout.harbor_trials import attempt, attempt_script, task, with_test

from penstock.errors import RewardError
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.sandbox.types import Grants
from penstock.rollout.visible_folders import interpreter_folders

LIE = "echo 1 > /logs/verifier/reward.txt"
FAKE = "mkdir -p bin && printf '#!/bin/sh\\nexit 0\\n' > bin/cat && chmod +x bin/cat"
CHEATS = {
    "a reward written beforehand": LIE,
    "a reward.json, which is read first": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a reward that cannot be replaced": f"{LIE}; chmod 400 /logs/verifier/reward.txt; "
    "chmod 500 /logs/verifier",
    "a folder in the place of the reward": "mkdir -p /logs/verifier/reward.txt",
    "a link in the place of the logs": "rm -rf /logs/verifier; mkdir /app/mine; "
    "ln -s /app/mine /logs/verifier; echo 1 > /app/mine/reward.txt",
    "a process that outlives the agent": f"(setsid sh -c 'while true; do {LIE}; done' &) 2>&1",
    "programs of the same name in the folder": f"{FAKE}; cp bin/cat sh; cp bin/cat cat",
    "start-up files of the shell": "for f in .bashrc .profile .bash_profile .shrc; do "
    f"echo '{LIE}; exit 0' > $HOME/$f; done",
    "a PATH in start-up files": f"{FAKE}; echo 'export PATH=/app/bin:$PATH' > $HOME/.profile",
    "a library that is loaded first": "echo 'export LD_PRELOAD=/app/x.so' >> $HOME/.bashrc; "
    "echo /app/x.so > /etc/ld.so.preload; : > /app/x.so",
    "other tests in their place": f"mkdir -p /tests && echo '{LIE}' > /tests/test.sh",
    "other programs of the system": "cp /bin/true /usr/bin/cat; cp /bin/true /bin/cat",
    "a variable that shells read": f"echo '{LIE}' > e; export ENV=/app/e BASH_ENV=/app/e",
    "a hard link to the expected answer": "ln /tests/expected.txt hello.txt",
}
"""Most would be rewarded by a verifier that ran where the agent did."""


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_cheat_is_not_rewarded(cheat: str) -> None:
    done = await attempt_script(task("hello-file"), f"{CHEATS[cheat]}\ntrue")
    assert (done.reward, done.failure) == (0.0, "")


async def test_an_honest_answer_beside_all_of_them_is() -> None:
    """What keeps cheats out does not keep the files of an agent out."""
    cheats = "\n".join(f"({cheat})" for cheat in CHEATS.values())
    done = await attempt_script(task("hello-file"), f"{cheats}\necho hello > hello.txt")
    assert done.reward == 1.0


@pytest.mark.parametrize(
    "links",
    [
        "ln -s /tests/expected.txt sorted.txt",
        "ln -s ../tests/expected.txt sorted.txt",
        "ln -s /proc/self/root/tests/expected.txt sorted.txt",
        "ln -s . here; ln -s here/../tests/expected.txt sorted.txt",
    ],
)
async def test_a_link_to_the_expected_answer_is_left_out(links: str) -> None:
    """The tests are not there yet when the link is made; it would lead to them when they are."""
    assert (await attempt_script(task("sort-lines"), links)).reward == 0.0


async def test_links_of_an_honest_agent_stay() -> None:
    honest = "mkdir made; LC_ALL=C sort words.txt > made/real; ln -s made/real sorted.txt"
    assert (await attempt_script(task("sort-lines"), honest)).reward == 1.0
    absolute = honest.replace("ln -s made", "ln -s /app/made")
    assert (await attempt_script(task("sort-lines"), absolute)).reward == 1.0


USER_SITE = "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d"
PYTHON_LIE = 'import json; json.loads = lambda text: {"sum": 45}'
PYTHON = {
    "sitecustomize in the folder": f"echo '{PYTHON_LIE}' > sitecustomize.py",
    "sitecustomize of the user": f"{USER_SITE}; echo '{PYTHON_LIE}' > $d/sitecustomize.py; "
    f"echo '{PYTHON_LIE}' > $d/usercustomize.py",
    "a .pth file of the user": f"{USER_SITE}; echo '{PYTHON_LIE}' > $d/x.pth",
    "a module of the verifier's name": f"echo '{PYTHON_LIE}' > json.py",
}


@pytest.mark.parametrize("cheat", PYTHON)
async def test_a_cheat_of_python_is_not_rewarded(cheat: str) -> None:
    done = await attempt_script(task("json-sum"), f"{PYTHON[cheat]}\necho '{{}}' > sum.json")
    assert (done.reward, done.failure) == (0.0, "")


CONFTEST = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""


async def test_a_conftest_of_the_agent_is_not_read() -> None:
    """Also where the verifier runs pytest in the agent's folder; nor is the agent's pytest.ini."""
    run = f"cp /tests/check_it.py . && {sys.executable} -m pytest -q check_it.py"
    given = with_test(
        task("hello-file", verifier_env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        f"#!/bin/sh\nif {run}; then echo 1; else echo 0; fi > /logs/verifier/out\n"
        "tail -n 1 /logs/verifier/out > /logs/verifier/reward.txt",
        **{"check_it.py": "def test_it():\n    assert open('hello.txt').read() == 'hello\\n'\n"},
    )
    conftest = f"cat > conftest.py <<'END'{CONFTEST}END\n"
    settings = "printf '[pytest]\\naddopts = --setup-plan\\n' > pytest.ini\n"  # runs no test
    shown = UseSettings(grants=Grants(folders=interpreter_folders()))
    isolation = Isolation(IsolationSettings(uses={Use.TOOLS: shown}))
    cheats = {conftest: "no", settings: "no", conftest + settings: "hello"}
    for cheat, text in cheats.items():
        argv = ["sh", "-c", f"{cheat}echo {text} > hello.txt"]
        assert (await attempt(given, argv, isolation)).reward == float(text == "hello")


async def test_a_program_that_ends_the_verifier_earns_nothing() -> None:
    """It runs with the rights of the verifier that starts it, so it can end it: that is a failure
    of the verifier, which is not trained."""
    program = f"printf '#!/bin/sh\\n{LIE}\\nkill -9 $PPID\\n' > add.sh; chmod +x add.sh"
    with pytest.raises(RewardError, match="signal 9"):
        await attempt_script(task("shell-script"), program)
