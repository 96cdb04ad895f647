# SPDX-License-Identifier: Apache-2.0
"""A source of sessions: what it may be combined with."""

from collections.abc import Callable

import pytest

from penstock.config import RunConfig
from penstock.errors import ConfigError

SOURCE = "  - {name: train, task: penstock.tasks.reverse, weight: 1.0}"
LIVE = "  - {name: live, session: {reward_deadline_s: 60, default_reward: -1.0}}"
Load = Callable[[str], RunConfig]


@pytest.fixture
def with_sessions(example: str) -> str:
    """The design's run, fed by sessions."""
    text = example.replace(SOURCE, LIVE).replace("name: grpo", "name: reinforce")
    return text.replace("{admit: reward-spread}, ", "")


def test_a_run_may_learn_from_sessions_alone_or_beside_tasks(
    with_sessions: str, load_text: Load
) -> None:
    config = load_text(with_sessions)
    assert config.session_source is not None and config.session_source.session is not None
    assert config.session_source.session.default_reward == -1.0
    assert config.session_source.session.idle_s == 600.0
    assert load_text(with_sessions.replace(LIVE, f"{SOURCE}\n{LIVE}")).session_source is not None


def test_runs_without_sessions_have_no_such_source(example: str, load_text: Load) -> None:
    assert load_text(example).session_source is None


@pytest.mark.parametrize(
    ("old", "new", "expected_text"),
    [
        ("name: reinforce", "name: grpo", "set algorithm.name: reinforce"),
        ("rules: [", "rules: [{admit: reward-spread}, ", "remove the rule"),
        ("closing: complete", "closing: survivors(2)", "set closing: complete"),
        (LIVE, f"{LIVE}\n{LIVE.replace('live', 'more')}", "one source of sessions"),
        ("ttl_s: 12", "ttl_s: 12, schedule_to_close_s: 60", "set it to null"),
        ("session: {", "task: a.b, session: {", "needs exactly one of task:"),
        ("reward_deadline_s: 60", "reward_deadline_s: 0", "greater than 0"),
    ],
)
def test_what_it_cannot_go_with(
    with_sessions: str, load_text: Load, old: str, new: str, expected_text: str
) -> None:
    text = with_sessions.replace(old, new, 1)
    assert text != with_sessions
    with pytest.raises(ConfigError, match=expected_text):
        load_text(text)
