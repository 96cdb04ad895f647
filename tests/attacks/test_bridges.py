# SPDX-License-Identifier: Apache-2.0
"""Environments: what a model says in one episode ends no other one in the same bridge."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.rollout.environments.test_environments import info, session, sessions

from penstock.errors import EnvironmentFailed
from penstock.rollout import environments as package

BRIDGES = Path(package.__file__).parent / "bridges"
ECHO = """
import json, sys
sys.path.insert(0, sys.argv[1])
from serving import serve

class Echo:
    def reset(self, payload, seed, model):
        return {"text": "hello"}
    def step(self, text, tool_calls):
        said = json.loads(text)
        return {"text": said.get("say", ""), "reward": said.get("bet"), "info": said}
    def score(self):
        return 0.0
    def close(self):
        pass

serve(lambda settings: Echo)
"""


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        (r'{"say": "\ud800"}', None),
        ('{"bet": NaN}', "not JSON compliant"),
        ('{"bet": 1e300}', "Expected `float` <="),
        ('{"say": 7}', "Expected `str`"),
    ],
)
async def test_an_episode_that_says_what_no_answer_holds_ends_no_other(
    tmp_path: Path, said: str, failure: str | None
) -> None:
    """Environments show an action of the model again, or compute a reward of its numbers."""
    script = tmp_path / "echo_bridge.py"
    script.write_text(ECHO)
    environments = sessions(info(command=(sys.executable, str(script), str(BRIDGES))))
    bad, good = session(environments, "a"), session(environments, "b")
    await bad.reset()
    await good.reset()
    try:
        if failure is None:
            assert (await bad.step(said)).text == "?"
        else:
            with pytest.raises(EnvironmentFailed, match=failure):
                await bad.step(said)
        assert (await good.step('{"say": "hi"}')).text == "hi"
    finally:
        await environments.close()


class _NoClient:
    """In place of the library's."""

    def __init__(self, base_url: str) -> None:
        pass

    def sync(self) -> None:
        pass


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., Any]]:
    """Imports a bridge without its library, in place of whose modules are `stand_ins`."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BRIDGES), *sys.path])

    def load(name: str, **stand_ins: Any) -> Any:
        for module, stand_in in stand_ins.items():
            monkeypatch.setitem(sys.modules, module.replace("__", "."), stand_in)
        return import_module(name)

    yield load
    for name in {"openenv_bridge", "gymnasium_bridge", "serving"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def read_action(bridge: Callable[..., Any]) -> Any:
    """How the bridge of OpenEnv reads an answer, without the library."""
    client = SimpleNamespace(GenericEnvClient=_NoClient)
    names = ("uvicorn", "openenv", "openenv__core", "openenv__core__generic_client")
    return bridge("openenv_bridge", **dict.fromkeys(names, client)).OpenEnvEpisode("", "")._read


def test_an_answer_of_many_braces_is_read_in_one_pass(read_action: Any) -> None:
    """A pattern began again at each of them: 160 KB took 40 seconds."""
    assert read_action("{" * 4_000_000) is None
    assert read_action("{" * 90_000 + "}") is None
    assert read_action('I move } so {"go": {"x": 1}}, yes') == {"go": {"x": 1}}
    assert read_action("} no {") is None
    assert read_action("{[1]}") is None


def test_a_number_of_very_many_digits_is_no_action(bridge: Callable[..., Any]) -> None:
    """Python refuses to read it: the step failed, and with it the attempt."""
    env = SimpleNamespace(action_space=SimpleNamespace(n=4))
    episode = bridge("gymnasium_bridge", gymnasium=SimpleNamespace()).GymnasiumEpisode(env, {})
    assert episode.step("9" * 5_000, [])["text"].startswith("No such action")
    assert episode._read("first 3, then " + "1" * 5_000) == 3
    assert [episode._read(text) for text in ("go 3", "4", "-1", "")] == [3, None, None, None]
