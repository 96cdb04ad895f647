# SPDX-License-Identifier: Apache-2.0
"""Trajectories cut into flat token sequences for one policy.

Owns which tokens are trained: tokens in turns visible to this policy's trainer (its own unless the
manifest lists roles), in an answer that reached its agent, each exactly once and in the context in
which it was sampled. Does not know rewards, torch or text.

T = tokens of all samples one after another, S = samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.trainer.arrays import Bools, Ints
from penstock.types import ExpertChoices, PolicyName, Trajectory, Turn, is_trainable

Floats = npt.NDArray[np.float32]
TrainedRoles = Collection[tuple[PolicyName, str]]
"""The (policy, role) pairs whose turns are trained."""
NO_ROLES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Columns over all tokens; where `mask_T` is false the columns below it are undefined."""

    starts_S: Ints
    """First token of each sample."""
    ends_S: Ints
    rows_S: Ints
    """Index in the manifest of the row each sample was cut from; never decreases."""
    ids_T: npt.NDArray[np.int32]
    mask_T: Bools
    """True for sampled tokens that are trained."""
    logprobs_T: Floats
    """As sampled, under the token's own sampling spec."""
    versions_T: npt.NDArray[np.int32]
    """Number of the version that sampled it; -1 for another policy."""
    turns_T: npt.NDArray[np.int32]
    """Index of the token's turn in its trajectory, its prompt included."""
    roles_T: npt.NDArray[np.int32]
    """Number of the role of its turn; valid where trained."""
    rewards_T: npt.NDArray[np.float64]
    """Its turn's own reward, NaN where it has none; valid where trained."""
    agents_T: npt.NDArray[np.int32]
    """Number of the sub-agent of its turn within its trajectory; 0 for the workflow itself."""
    spawners_T: npt.NDArray[np.int32]
    """Number of the agent that spawned this one."""
    sampled_T: npt.NDArray[np.int64]
    """Index among all sampled tokens of its trajectory, turn after turn; valid where trained."""
    temperature_T: Floats
    top_k_T: npt.NDArray[np.int32]
    top_p_T: Floats
    min_p_T: Floats
    experts_T: npt.NDArray[np.uint8]
    """T×W: the experts that the engine chose for each token, in W bytes as `ExpertShape` says; W is
    0 if they are not replayed."""

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.mask_T))


TOKEN_COLUMNS = tuple(one.name for one in fields(Samples) if one.name.endswith("_T"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What a mixture of experts chooses for one token."""

    num_layers: int
    """Layers with experts."""
    num_chosen: int
    """Experts per layer."""
    num_experts: int

    @property
    def none(self) -> ExpertChoices:
        """Without any token."""
        return ExpertChoices(
            num_layers=self.num_layers,
            num_chosen=self.num_chosen,
            num_experts=self.num_experts,
            choices=b"",
        )

    def read(self, turn: Turn, num_tokens: int) -> bytes:
        """The choices of a turn's tokens; no choice for any of them if it has none of this
        model."""
        found = self.none if turn.experts is None else turn.experts
        is_own = replace(found, choices=b"") == self.none
        return (found if is_own else self.none).last(num_tokens).choices


_Spec = tuple[bool, float, int, float, float]
"""(whether it is trained, temperature, top-k, top-p, min-p)."""
_CONTEXT: _Spec = (False, 1.0, 0, 1.0, 0.0)
_Credit = tuple[float, int, int]
"""(own reward of the turn or NaN, its agent, the agent's spawner)."""
_NO_CREDIT: _Credit = (math.nan, 0, 0)


@dataclass(slots=True)
class _SampleBuilder:
    """What `make_samples` collects before concatenating: a segment is one prompt part or one
    answer."""

    ids: list[bytes] = field(default_factory=list[bytes])
    logprobs: list[bytes] = field(default_factory=list[bytes])
    lengths: list[int] = field(default_factory=list[int])
    specs: list[_Spec] = field(default_factory=list[_Spec])
    span_lengths: list[int] = field(default_factory=list[int])
    span_numbers: list[int] = field(default_factory=list[int])
    turns: list[int] = field(default_factory=list[int])
    roles: list[int] = field(default_factory=list[int])
    credits: list[_Credit] = field(default_factory=list[_Credit])
    sampled: list[int] = field(default_factory=list[int])
    sample_lengths: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    experts: list[bytes] = field(default_factory=list[bytes])

    def add_context(self, ids: bytes, turn: int) -> int:
        self.span_lengths.append(len(ids) // 4)
        self.span_numbers.append(-1)
        return self._add(ids, bytes(len(ids)), _CONTEXT, turn, role=0, num_before=0)

    def add_answer(
        self,
        turn: Turn,
        index: int,
        role: int,
        num_before: int,
        *,
        is_own: bool,
        agents: Mapping[str, int],
    ) -> int:
        for span in turn.spans:
            self.span_lengths.append(span.end - span.start)
            self.span_numbers.append(span.number if is_own else -1)
        rule = turn.sampling
        spec = (True, rule.temperature, rule.top_k, rule.top_p, rule.min_p)
        credit = _credit(turn, agents)
        return self._add(turn.sampled_ids, turn.logprobs, spec, index, role, num_before, credit)

    def _add(
        self,
        ids: bytes,
        logprobs: bytes,
        spec: _Spec,
        turn: int,
        role: int,
        num_before: int,
        credit: _Credit = _NO_CREDIT,
    ) -> int:
        num_ids = len(ids) // 4
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        self.lengths.append(num_ids)
        self.specs.append(spec)
        self.turns.append(turn)
        self.roles.append(role)
        self.credits.append(credit)
        self.sampled.append(num_before)
        return num_ids


def make_samples(
    rows: Iterable[tuple[int, Trajectory]],
    policy: PolicyName,
    visible_roles: TrainedRoles | None = None,
    roles: Mapping[str, int] = NO_ROLES,
    experts: ExpertShape | None = None,
) -> Samples:
    """Samples of these (manifest index, trajectory) pairs, in their order. `roles` numbers the
    roles of the batch; any other role is 0. experts: of the model, if choices are replayed."""
    pieces = _SampleBuilder()
    for row, trajectory in rows:
        lengths = [len(turn.sampled_ids) // 4 for turn in trajectory.turns]
        before = [0, *accumulate(lengths)]
        agents = _number_agents(trajectory.turns)
        for path, trained in _paths(trajectory.turns, policy, visible_roles):
            num_ids = 0
            for index in path:
                turn = trajectory.turns[index]
                if experts is not None:
                    size = (len(turn.prompt_ids) + len(turn.sampled_ids)) // 4
                    pieces.experts.append(experts.read(turn, size))
                num_ids += pieces.add_context(turn.prompt_ids, index)
                if index in trained:
                    is_own = turn.policy == policy
                    role = roles.get(turn.role, 0)
                    num_ids += pieces.add_answer(
                        turn, index, role, before[index], is_own=is_own, agents=agents
                    )
                else:
                    num_ids += pieces.add_context(turn.sampled_ids, index)
            pieces.sample_lengths.append(num_ids)
            pieces.rows.append(row)
    return _join(pieces, 0 if experts is None else experts.none.token_bytes)


def _number_agents(turns: Sequence[Turn]) -> Mapping[str, int]:
    """Numbers of the agents of a trajectory, by path; 0 is the workflow itself."""
    paths = {turn.agent for turn in turns} - {""}
    paths |= {_spawner(path) for path in paths} - {""}
    return {"": 0} | {path: number for number, path in enumerate(sorted(paths), 1)}


def _spawner(path: str) -> str:
    return path.rpartition(".")[0]


def _credit(turn: Turn, agents: Mapping[str, int]) -> _Credit:
    reward = math.nan if turn.reward is None else turn.reward
    return reward, agents[turn.agent], agents[_spawner(turn.agent)]


def is_trained_role(
    made_by: PolicyName, role: str, policy: PolicyName, visible_roles: TrainedRoles | None
) -> bool:
    """Whether the trainer of `policy` trains on turns of `made_by` in this role."""
    return made_by == policy if visible_roles is None else (made_by, role) in visible_roles


def _paths(
    turns: Sequence[Turn], policy: PolicyName, visible_roles: TrainedRoles | None
) -> Iterator[tuple[Sequence[int], frozenset[int]]]:
    """Each root-to-leaf path with the turns to train in it, cut after the last of these.

    A turn shared by several branches is trained in the first; a path without turns to train is
    dropped."""
    left = {
        index
        for index, turn in enumerate(turns)
        if is_trained_role(turn.policy, turn.role, policy, visible_roles) and is_trainable(turn)
    }
    parents = {turn.parent for turn in turns}
    for leaf in range(len(turns)):
        if leaf in parents or not left:
            continue
        path = _path_to(leaf, turns)
        trained = left.intersection(path)
        if trained:
            left -= trained
            yield path[: path.index(max(trained)) + 1], frozenset(trained)


def _path_to(leaf: int, turns: Sequence[Turn]) -> list[int]:
    path: list[int] = []
    while leaf >= 0:
        path.append(leaf)
        leaf = turns[leaf].parent
    return path[::-1]


def _join(pieces: _SampleBuilder, expert_bytes: int) -> Samples:
    lengths = np.array(pieces.lengths, np.int64)
    specs = np.array(pieces.specs, np.float64).reshape(-1, 5)
    credits = np.array(pieces.credits, np.float64).reshape(-1, 3)
    ends = np.cumsum(np.array(pieces.sample_lengths, np.int64))
    starts = ends - np.array(pieces.sample_lengths, np.int64)
    span_lengths = np.array(pieces.span_lengths, np.int64)
    mask = np.repeat(specs[:, 0] > 0, lengths)
    mask[starts] = False  # no token precedes it, so no forward pass predicts it
    return Samples(
        starts_S=starts,
        ends_S=ends,
        rows_S=np.array(pieces.rows, np.int64),
        ids_T=np.frombuffer(b"".join(pieces.ids), "<i4"),
        mask_T=mask,
        logprobs_T=np.frombuffer(b"".join(pieces.logprobs), "<f4"),
        versions_T=np.repeat(np.array(pieces.span_numbers, np.int32), span_lengths),
        turns_T=np.repeat(np.array(pieces.turns, np.int32), lengths),
        roles_T=np.repeat(np.array(pieces.roles, np.int32), lengths),
        rewards_T=np.repeat(credits[:, 0], lengths),
        agents_T=np.repeat(credits[:, 1].astype(np.int32), lengths),
        spawners_T=np.repeat(credits[:, 2].astype(np.int32), lengths),
        sampled_T=ranges(np.array(pieces.sampled, np.int64), lengths),
        temperature_T=np.repeat(specs[:, 1].astype(np.float32), lengths),
        top_k_T=np.repeat(specs[:, 2].astype(np.int32), lengths),
        top_p_T=np.repeat(specs[:, 3].astype(np.float32), lengths),
        min_p_T=np.repeat(specs[:, 4].astype(np.float32), lengths),
        experts_T=np.frombuffer(b"".join(pieces.experts), np.uint8).reshape(
            int(lengths.sum()), expert_bytes
        ),
    )


def join_samples(
    parts: Sequence[Samples], first_rows: Sequence[int], roles: Sequence[Ints]
) -> Samples:
    """Samples of several manifests as samples of one. first_rows: where the rows of each begin.
    roles: by its number in the part, the number of a role in the whole."""
    first_tokens = [0, *accumulate(part.ids_T.size for part in parts)]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in TOKEN_COLUMNS
    }
    joined["roles_T"] = np.concatenate(
        [_renumber(part, to) for part, to in zip(parts, roles, strict=True)]
    )
    for name, firsts in (
        ("starts_S", first_tokens),
        ("ends_S", first_tokens),
        ("rows_S", first_rows),
    ):
        values = [getattr(part, name) + first for part, first in zip(parts, firsts, strict=False)]
        joined[name] = np.concatenate(values)
    return Samples(**joined)


def _renumber(part: Samples, to: Ints) -> npt.NDArray[np.int32]:
    roles_T = part.roles_T.copy()
    roles_T[part.mask_T] = to[roles_T[part.mask_T]]
    return roles_T


def ranges(firsts: Ints, lengths: Ints) -> Ints:
    """first, first+1, … of each, one after another."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(firsts - offsets, lengths) + np.arange(int(lengths.sum()))
