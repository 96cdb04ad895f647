# SPDX-License-Identifier: Apache-2.0
"""The tree of sub-agents of one trajectory: who spawned whom, what each did and earned.

Reads the path that each turn carries. Knows neither text nor tokens beyond their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.runs.decoded import DecodedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNode:
    """One agent, and those that it spawned."""

    path: str
    """Spawns from the workflow on, such as `0.2`; empty for the workflow itself."""
    roles: tuple[str, ...]
    """Roles, or policies where a turn has no role, in the order of their first turn."""
    num_turns: int
    num_tokens: int
    """Sampled tokens of its own turns."""
    reward: float | None
    """Mean of its turns' own rewards; None if it has none."""
    children: tuple[AgentNode, ...]

    @property
    def num_agents(self) -> int:
        """Itself and all below it."""
        return 1 + sum(child.num_agents for child in self.children)


def agent_tree(turns: Sequence[DecodedTurn]) -> AgentNode:
    """The workflow and its sub-agents. An agent without turns is there if one that it spawned has
    some."""
    turns_of: dict[str, list[DecodedTurn]] = {"": []}
    for turn in turns:
        turns_of.setdefault(turn.agent, []).append(turn)
    children: dict[str, set[str]] = {}
    for path in [*turns_of]:
        while path and path not in children.setdefault(above := path.rpartition(".")[0], set()):
            children[above].add(path)
            path = above
    return _node("", children, turns_of)


def _node(
    path: str, children: Mapping[str, Collection[str]], turns_of: Mapping[str, list[DecodedTurn]]
) -> AgentNode:
    own = turns_of.get(path, [])
    rewards = [turn.reward for turn in own if turn.reward is not None]
    below = sorted(children.get(path, ()), key=_order)
    return AgentNode(
        path=path,
        roles=tuple(dict.fromkeys(turn.role or turn.policy for turn in own)),
        num_turns=len(own),
        num_tokens=sum(turn.num_tokens for turn in own),
        reward=sum(rewards) / len(rewards) if rewards else None,
        children=tuple(_node(child, children, turns_of) for child in below),
    )


def _order(path: str) -> list[tuple[int, str]]:
    """0.2 before 0.10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in path.split(".")]
