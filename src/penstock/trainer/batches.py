# SPDX-License-Identifier: Apache-2.0
"""A sealed batch as the trainer uses it: its rows verified and cut into samples, with columns.

Owns the check that the rows received are the rows sealed, and the columns that stages add. Rewards
come from the manifest, so a missing row, or one with unknown token ids, does not change the
advantages of the others.

R = rows of the manifest, in its order; T = tokens of all samples, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import structlog
from blake3 import blake3

from penstock.bounds import MAX_SHOWN_ROLES, OTHER_ROLES
from penstock.errors import BadRequest, StoreError
from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.pass_cost import TYPICAL, PassCost
from penstock.trainer.ranks.balance import manifest_costs
from penstock.trainer.ranks.group import RankReductions, SingleRank
from penstock.trainer.samples import (
    ExpertShape,
    Samples,
    is_trained_role,
    join_samples,
    make_samples,
)
from penstock.types import (
    MIN_TEMPERATURE,
    ROLE_REWARD,
    TURN_REWARD,
    FinishReason,
    Manifest,
    OutcomeKind,
    PolicyName,
    RowPayload,
    Trajectory,
    is_usable,
    subject_of_node,
)
from penstock.wire.codec import decode

NO_COLUMNS: Mapping[str, Floats] = MappingProxyType({})

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRewards:
    """What turns earned where a row does not have one reward for all, from the manifest alone: the
    same on every rank. N = pairs of a row and a role."""

    rewards_N: Floats
    """Of the role in that row: its own, or else the row's."""
    rewards_R: Floats
    """Column `reward` of the batch; what a stage adds to it counts for every turn of the row."""
    team_R: Floats
    """Of the row itself, whatever its roles earned."""
    has_turn_rewards: bool
    """Some turn has its own reward; payloads tell which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which roles had a part in which rows, of the turns that this trainer sees.

    N = pairs of a row and a role."""

    names: tuple[str, ...]
    """The number of a role is its place here."""
    rows_N: Ints
    roles_N: Ints
    tokens_N: Ints
    """Sampled tokens of that role in that row."""
    own: OwnRewards | None = None
    """Rewards of roles and turns, if any row of the batch has them."""

    @classmethod
    def unnamed(cls, num_rows: int) -> Roles:
        """For rows without role names."""
        zeros_N = np.zeros(num_rows, np.int64)
        return cls(names=("",), rows_N=np.arange(num_rows), roles_N=zeros_N, tokens_N=zeros_N)

    def figures(self, rewards_R: Floats) -> dict[str, tuple[float, float]]:
        """(mean reward, tokens) of each named role; empty if no role has a name. Nodes name roles:
        those with the most tokens count apart."""
        rewards_N = rewards_R[self.rows_N] if self.own is None else self.own.rewards_N
        num_P = np.bincount(self.roles_N, minlength=len(self.names))
        tokens_P = np.bincount(self.roles_N, self.tokens_N, len(self.names))
        numbers = [number for number, name in enumerate(self.names) if name and num_P[number]]
        ranked = sorted(
            (number for number in numbers if self.names[number] != OTHER_ROLES),
            key=lambda number: -tokens_P[number],
        )
        shown = sorted(ranked[:MAX_SHOWN_ROLES])
        parts = [(self.names[number], self.roles_N == number) for number in shown]
        if others := set(numbers) - set(shown):
            parts.append((OTHER_ROLES, np.isin(self.roles_N, list(others))))
        return {
            name: (float(rewards_N[is_it_N].mean()), float(self.tokens_N[is_it_N].sum()))
            for name, is_it_N in parts
        }

    @classmethod
    def of(cls, manifest: Manifest) -> Roles:
        """The same on every rank, and of rows that are gone too."""
        policy, visible_roles = PolicyName(manifest.consumer), manifest.visible_roles
        counted = [
            (index, role, tokens)
            for index, row in enumerate(manifest.rows)
            for (made_by, role), tokens in row.parts
            if is_trained_role(made_by, role, policy, visible_roles)
        ]
        parts = [(index, role) for index, role, _ in counted]
        names = tuple(sorted({role for _, role in parts}))
        numbers = {name: number for number, name in enumerate(names)}
        return cls(
            names=names,
            rows_N=np.array([index for index, _ in parts], np.int64),
            roles_N=np.array([numbers[role] for _, role in parts], np.int64),
            tokens_N=np.array([tokens for _, _, tokens in counted], np.int64),
            own=_own_rewards(manifest, parts, names),
        )


def _own_rewards(
    manifest: Manifest, parts: Sequence[tuple[int, str]], names: Sequence[str]
) -> OwnRewards | None:
    rows = list(manifest.rows)
    values = {name for row in rows for name in row.values}
    has_turn_rewards = any(TURN_REWARD + name in values for name in names)
    if not has_turn_rewards and not any(ROLE_REWARD + name in values for name in names):
        return None
    rewards = [rows[index].role_reward(role) for index, role in parts]
    return OwnRewards(
        rewards_N=np.array(rewards, np.float64),
        rewards_R=np.array([manifest.reward(row) for row in rows], np.float64),
        team_R=np.array([row.score for row in rows], np.float64),
        has_turn_rewards=has_turn_rewards,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains on."""

    seq: int
    trains_from: int
    """Number of the version these rows were judged for."""
    samples: Samples
    groups_R: Ints
    """Which group of the manifest a row belongs to; never falls."""
    staleness_R: Ints
    costs_R: Floats
    """Cost of computing each row; ranks divide rows by it."""
    row_columns: Mapping[str, Floats]
    """By name, one number per row (R): `reward`, which is this policy's, and the rewards of roles
    (`reward.ROLE`) from the manifest, and what stages write."""
    token_columns: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """By name, one number per token (T), all written by stages."""
    longest_R: Ints
    """Sampled tokens of each row's longest turn, of those that this trainer sees."""
    roles: Roles
    subjects: Mapping[int, str] = field(default_factory=dict[int, str])
    """Whose credential delivered each row held here."""

    @property
    def num_groups(self) -> int:
        return int(self.groups_R[-1]) + 1 if self.groups_R.size else 0

    @property
    def rows_T(self) -> Ints:
        """The row each token belongs to."""
        starts_S, num_tokens = self.samples.starts_S, self.samples.ids_T.size
        if starts_S.size == 0:
            return np.zeros(num_tokens, np.int64)
        sample_T = np.searchsorted(starts_S, np.arange(num_tokens), side="right") - 1
        return self.samples.rows_S[np.maximum(sample_T, 0)]

    def without(self, is_out_R: npt.NDArray[np.bool_]) -> Batch:
        """This batch, the tokens of some rows neither trained nor counted."""
        mask_T = self.samples.mask_T & ~is_out_R[self.rows_T]
        return replace(self, samples=replace(self.samples, mask_T=mask_T))

    @property
    def column_names(self) -> frozenset[str]:
        return frozenset({*self.row_columns, *self.token_columns})

    def with_columns(
        self,
        *,
        row_columns: Mapping[str, Floats] = NO_COLUMNS,
        token_columns: Mapping[str, Floats] = NO_COLUMNS,
    ) -> Batch:
        """This batch with the columns that a stage wrote and checked; each is written once."""
        written = {*row_columns, *token_columns}
        twice = (written & self.column_names) | (row_columns.keys() & token_columns.keys())
        if twice:
            raise ValueError(f"columns {sorted(twice)} exist already; write each column once")
        return replace(
            self,
            row_columns={**self.row_columns, **row_columns},
            token_columns={**self.token_columns, **token_columns},
        )


def assemble(
    manifest: Manifest,
    rows: Sequence[RowPayload],
    policy: PolicyName,
    vocab_size: int,
    *,
    ranks: RankReductions | None = None,
    cost: PassCost = TYPICAL,
    experts: ExpertShape | None = None,
) -> Batch:
    """The batch of this manifest, from its rows as received. cost: by which they were divided.

    With several ranks, rows that other ranks compute have no payload here, like missing rows; row
    columns cover all of them. experts: of the model, if recorded choices are replayed."""
    sizes = [len(group.rows) for group in manifest.groups]
    groups_R = np.repeat(np.arange(len(sizes)), np.array(sizes, np.int64))
    received = dict(_trajectories(manifest, rows))
    roles = Roles.of(manifest)
    numbers = {name: number for number, name in enumerate(roles.names)}
    samples = make_samples(received.items(), policy, manifest.visible_roles, numbers, experts)
    truncated_R, longest_R = _row_lengths(manifest, received, ranks or SingleRank())
    batch = Batch(
        seq=manifest.seq,
        trains_from=manifest.trains_from,
        samples=_drop_unknown_ids(samples, vocab_size, manifest.seq),
        groups_R=groups_R,
        staleness_R=_staleness(manifest, policy),
        costs_R=manifest_costs(manifest, cost),
        row_columns=_row_columns(manifest, truncated_R),
        longest_R=longest_R,
        roles=roles,
        subjects={index: subject_of_node(one.node_id) for index, one in received.items()},
    )
    return _with_token_columns(batch, rows, manifest)


def _join_own_rewards(parts: Sequence[Batch]) -> OwnRewards | None:
    """In a part without them, each role earns the reward of its row."""
    if all(part.roles.own is None for part in parts):
        return None
    owns = [
        part.roles.own
        or OwnRewards(
            rewards_N=(rewards_R := part.row_columns["reward"])[part.roles.rows_N],
            rewards_R=rewards_R,
            team_R=rewards_R,
            has_turn_rewards=False,
        )
        for part in parts
    ]
    return OwnRewards(
        rewards_N=np.concatenate([own.rewards_N for own in owns]),
        rewards_R=np.concatenate([own.rewards_R for own in owns]),
        team_R=np.concatenate([own.team_R for own in owns]),
        has_turn_rewards=any(own.has_turn_rewards for own in owns),
    )


def join_batches(parts: Sequence[Batch]) -> Batch:
    """The batch whose instalments these are, each with the same columns. The same as one assembled
    from the complete manifest, with the same columns."""
    first_rows = _offsets(part.groups_R.size for part in parts)
    first_groups = _offsets(part.num_groups for part in parts)
    names = tuple(sorted({name for part in parts for name in part.roles.names}))
    numbers = {name: number for number, name in enumerate(names)}
    renumbered = [np.array([numbers[name] for name in part.roles.names]) for part in parts]
    roles = Roles(
        names=names,
        rows_N=np.concatenate(
            [part.roles.rows_N + row for part, row in zip(parts, first_rows, strict=True)]
        ),
        roles_N=np.concatenate(
            [to[part.roles.roles_N] for part, to in zip(parts, renumbered, strict=True)]
        ).astype(np.int64),
        tokens_N=np.concatenate([part.roles.tokens_N for part in parts]),
        own=_join_own_rewards(parts),
    )
    return Batch(
        seq=parts[0].seq,
        trains_from=parts[0].trains_from,
        samples=join_samples([part.samples for part in parts], first_rows, renumbered),
        groups_R=np.concatenate(
            [part.groups_R + group for part, group in zip(parts, first_groups, strict=True)]
        ),
        staleness_R=np.concatenate([part.staleness_R for part in parts]),
        costs_R=np.concatenate([part.costs_R for part in parts]),
        row_columns=_join_columns([part.row_columns for part in parts]),
        token_columns=_join_columns([part.token_columns for part in parts]),
        longest_R=np.concatenate([part.longest_R for part in parts]),
        roles=roles,
        subjects={
            index + row: subject
            for part, row in zip(parts, first_rows, strict=True)
            for index, subject in part.subjects.items()
        },
    )


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Where each part begins."""
    return [0, *accumulate(sizes)][:-1]


def _join_columns(parts: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """Columns one after another; a scalar that no row of a part has is NaN there."""
    names = sorted({name for part in parts for name in part})
    sizes = [next(iter(part.values())).size if part else 0 for part in parts]
    return {
        name: np.concatenate(
            [part.get(name, np.full(size, np.nan)) for part, size in zip(parts, sizes, strict=True)]
        )
        for name in names
    }


def _trajectories(
    manifest: Manifest, rows: Sequence[RowPayload]
) -> Iterator[tuple[int, Trajectory]]:
    sealed = list(manifest.rows)
    batch = f"batch {manifest.consumer}.{manifest.seq}"
    if len(rows) != len(sealed):
        raise StoreError(f"{batch}: {len(rows)} rows were received, {len(sealed)} are sealed")
    for index, (summary, row) in enumerate(zip(sealed, rows, strict=True)):
        if row.payload is None:
            continue
        if row.row_id != summary.row_id or blake3(row.payload).hexdigest() != summary.digest:
            raise StoreError(
                f"{batch}, row {index}: the bytes received for {row.row_id} do not match "
                f"{summary.row_id} as sealed; the ledger's segments may be damaged"
            )
        try:
            trajectory = decode(row.payload, Trajectory)
        except BadRequest as error:
            _log.warning("row left out: it is invalid", row=row.row_id, batch=batch, why=str(error))
            continue
        if has_sound_specs(trajectory):
            yield index, trajectory
        else:
            _log.warning(
                "row left out: no gradient is finite at its temperature",
                row=row.row_id,
                batch=batch,
                node=trajectory.node_id,
            )


def has_sound_specs(trajectory: Trajectory) -> bool:
    """Whether log-probs under its sampling specs are finite. The door refuses others; a row stored
    before that, or by another door, must not end the trainer at every start."""
    temperatures = (turn.sampling.temperature for turn in trajectory.turns)
    return all(t == 0 or t >= MIN_TEMPERATURE for t in temperatures)


def _row_lengths(
    manifest: Manifest, received: Mapping[int, Trajectory], ranks: RankReductions
) -> tuple[Floats, Ints]:
    """(whether each row was truncated, tokens of its longest turn), reduced over the ranks that
    hold the rows. A missing row counts as one turn."""
    policy, visible_roles = PolicyName(manifest.consumer), manifest.visible_roles
    lengths_R = np.array([manifest.tokens(row) for row in manifest.rows], np.int64)
    own = np.zeros((2, lengths_R.size))
    for index, trajectory in received.items():
        turns = [
            len(turn.sampled_ids) // 4
            for turn in trajectory.turns
            if is_usable(turn) and is_trained_role(turn.policy, turn.role, policy, visible_roles)
        ]
        own[:, index] = _is_truncated(trajectory), max(turns, default=0)
    truncated_R, longest_R = ranks.sum_over_ranks(own)
    return truncated_R, np.where(longest_R > 0, longest_R, lengths_R).astype(np.int64)


def _row_columns(manifest: Manifest, truncated_R: Floats) -> dict[str, Floats]:
    rows = list(manifest.rows)
    names = sorted({name for row in rows for name in row.values} - {*_token_names(manifest)})
    return {
        "reward": np.array([manifest.reward(row) for row in rows], np.float64),
        "length": np.array([manifest.tokens(row) for row in rows], np.float64),
        "truncated": truncated_R,
        **{name: np.array([row.values.get(name, np.nan) for row in rows]) for name in names},
    }


def _token_names(manifest: Manifest) -> list[str]:
    """Names of token columns: those that came as bytes for any row of the batch, on any rank."""
    return sorted({name for row in manifest.rows for name in row.columns})


def _is_truncated(trajectory: Trajectory) -> bool:
    """A declared limit cut it short: of the attempt, or of its last answer."""
    last = trajectory.turns[-1].finish if trajectory.turns else None
    return trajectory.outcome.kind is OutcomeKind.TRUNCATED or last is FinishReason.LENGTH


def _with_token_columns(batch: Batch, rows: Sequence[RowPayload], manifest: Manifest) -> Batch:
    """Add the columns that a placed stage wrote as bytes: one float32 per sampled token of the row,
    turn after turn. A row with anything else, such as one number, is masked: a worker's mistake
    must not crash the trainer over and over."""
    samples = batch.samples
    columns = {name: np.zeros(samples.ids_T.shape) for name in _token_names(manifest)}
    if not columns:
        return batch
    is_broken_R = np.zeros(len(rows), np.bool_)
    for start, end, index in zip(samples.starts_S, samples.ends_S, samples.rows_S, strict=True):
        token_K = start + np.flatnonzero(samples.mask_T[start:end])
        num_needed = int(samples.sampled_T[token_K].max(initial=-1)) + 1
        for name, values_T in columns.items():
            content = rows[int(index)].columns.get(name)
            if content is None or len(content) % 4 or len(content) < 4 * num_needed:
                is_broken_R[index] = True
                continue
            values_T[token_K] = np.frombuffer(content, "<f4")[samples.sampled_T[token_K]]
    if is_broken_R.any():
        _log.warning(
            "rows left out: a column is not one float32 per sampled token",
            seq=batch.seq,
            rows=np.flatnonzero(is_broken_R).tolist(),
        )
        batch = batch.without(is_broken_R)
    return batch.with_columns(token_columns=columns)


def _drop_unknown_ids(samples: Samples, vocab_size: int, seq: int) -> Samples:
    """Leave out samples with ids this model does not have: only here is its vocabulary known."""
    if samples.ids_T.size == 0 or int(samples.ids_T.max()) < vocab_size:
        return samples
    is_known_S = np.maximum.reduceat(samples.ids_T, samples.starts_S) < vocab_size
    rows = samples.rows_S[~is_known_S]
    _log.warning("rows with foreign token ids left out", seq=seq, rows=rows.tolist())
    mask_T = samples.mask_T.copy()
    for start, end in zip(samples.starts_S[~is_known_S], samples.ends_S[~is_known_S], strict=True):
        mask_T[start:end] = False
    return replace(
        samples,
        mask_T=mask_T,
        starts_S=samples.starts_S[is_known_S],
        ends_S=samples.ends_S[is_known_S],
        rows_S=samples.rows_S[is_known_S],
    )


def _staleness(manifest: Manifest, policy: PolicyName) -> Ints:
    versions = (row.versions.get(policy, ()) for row in manifest.rows)
    oldest = (min(number for _, number in made_by) for made_by in versions if made_by)
    lags = [manifest.trains_from - number for number in oldest]
    return np.maximum(np.array(lags, np.int64), 0)
