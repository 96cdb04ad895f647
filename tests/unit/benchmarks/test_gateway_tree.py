# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the session tree, at a small size."""

from __future__ import annotations

from benchmarks.gateway_tree import Setting, measure

SMALL = Setting(num_sessions=2, num_turns=10, question_tokens=20, answer_tokens=10)


async def test_a_straight_conversation_is_kept_and_trained_once() -> None:
    straight = Setting(
        num_sessions=2, num_turns=10, question_tokens=20, answer_tokens=10, sub_agent=0.0,
        go_back=0.0, sum_up=0.0,
    )  # fmt: skip
    found = await measure(straight)
    assert (found.num_calls, found.num_branches) == (20, 0)
    assert found.tokens_tree < 0.3 * found.tokens_full
    assert found.bytes_tree < found.bytes_full


async def test_branches_cost_what_they_do_not_share() -> None:
    found = await measure(SMALL)
    assert 0 < found.num_branches < found.num_calls
    assert found.tokens_trained < found.tokens_tree < found.tokens_full


async def test_agents_that_never_go_on_save_nothing() -> None:
    always_new = Setting(num_sessions=1, num_turns=4, sub_agent=1.0)
    found = await measure(always_new)
    assert (found.tokens_tree, found.bytes_tree) == (found.tokens_full, found.bytes_full)
