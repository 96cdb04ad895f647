# SPDX-License-Identifier: Apache-2.0
"""What follows from an untrusted credential: its nodes are tagged, deliver without a reward and
without expert choices, and sample exactly as their leases say, with the versions that they serve.

Owns these rules; pure. Refuses nodes of strangers where the run does not check them. Whether a row
is true is for the trainer and the stage `trusted-reward` to find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.leasing import LiveVersion, RegisterRequest
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import Forbidden
from penstock.seeds import derive
from penstock.types import SESSION_TAG, UNTRUSTED_TAG, SamplingSpec, Turn, is_trainable


class Trust(Protocol):
    """The part of a credential that counts here."""

    @property
    def is_trusted(self) -> bool: ...


def tagged(body: RegisterRequest, credential: Trust, *, accepts_untrusted: bool) -> RegisterRequest:
    """The registration, tagged by what its credential says, never by what the node says."""
    tags = tuple(tag for tag in body.tags if tag != UNTRUSTED_TAG)
    if credential.is_trusted:
        return replace(body, tags=tags)
    if not accepts_untrusted:
        raise Forbidden(
            f"node {body.node_id} has an untrusted token, and this run does not check the rows of "
            "strangers; set trust.accept_untrusted: true and resume the run, or get a trusted token"
        )
    if SESSION_TAG in tags:
        raise Forbidden(
            f"node {body.node_id} has an untrusted token and cannot serve external agents, whose "
            "rewards cannot be computed again; join without the session tag"
        )
    return replace(body, tags=(*tags, UNTRUSTED_TAG))


def require_same_trust(node: Node | None, credential: Trust) -> None:
    """An untrusted credential does not act for a node that a trusted one registered."""
    if node is not None and not credential.is_trusted and not node.is_untrusted:
        raise Forbidden(
            f"node {node.record.node_id} was registered with a trusted token; use another node id"
        )


def facts_for(facts: RunInfo, credential: Trust) -> RunInfo:
    """What a node learns of the run: an untrusted one does not score, nor record experts."""
    if credential.is_trusted:
        return facts
    engines = {policy: replace(one, records_experts=False) for policy, one in facts.engines.items()}
    return replace(facts, is_scored=False, engines=engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSampling:
    """The sampling that leases fix, by source."""

    shared: SamplingSpec = field(default_factory=SamplingSpec)
    by_source: dict[str, SamplingSpec] = field(default_factory=dict[str, SamplingSpec])

    @classmethod
    def of(cls, facts: RunInfo) -> LeaseSampling:
        return cls(
            shared=facts.sampling,
            by_source={source.name: source.sampling for source in facts.sources},
        )

    def problem(self, turns: Sequence[Turn], source: str, seed: int) -> str:
        """Which turn was not sampled as the lease says; empty if all were. `seed` is the slot's.

        An answer may be shorter than the limit says where the context window is full."""
        fixed = self.by_source.get(source, self.shared)
        seeds = {derive(seed, number) for number in range(len(turns) + MAX_LOST_CALLS)}
        for index, turn in enumerate(turns):
            given = turn.sampling
            expected = replace(fixed, seed=given.seed, max_tokens=given.max_tokens)
            if given != expected or not 0 < given.max_tokens <= fixed.max_tokens:
                return f"turn {index}: the lease fixes the sampling as {fixed}, not {given}"
            if (num := len(turn.sampled_ids) // 4) > given.max_tokens:
                return f"turn {index}: {num} sampled tokens; its limit is {given.max_tokens}"
            if turn.experts is not None:
                # A trainer replays them, so its log-probs agree with whatever they are.
                return f"turn {index}: experts are believed of trusted nodes only; send none"
            if given.seed not in seeds:
                return f"turn {index}: its seed is not one of the lease's"
        return ""


def call_problem(turns: Sequence[Turn], workflow: str) -> str:
    """Why these are not the calls of this workflow; empty if they may be. A node could add calls
    with other prompts, which would be trained with the reward of the answer."""
    num_calls = sum(map(is_trainable, turns))
    if workflow in ONE_CALL and num_calls > 1:
        return f"{num_calls} model calls; the workflow {workflow} makes one"
    return ""


def version_problem(turns: Sequence[Turn], live: Sequence[LiveVersion]) -> str:
    """Which turn names a version older than one that the node served before it; empty if none does.
    Otherwise a node could try versions and name the one whose answer it likes.

    live: the versions that the node served when it got the lease."""
    oldest = {one.policy: (one.incarnation, one.number) for one in live}
    for index, turn in enumerate(turns):
        served = oldest.get(turn.policy, (0, 0))
        for span in turn.spans:
            version = span.incarnation, span.number
            if version < served:
                names = [f"{turn.policy}@{'.'.join(map(str, one))}" for one in (version, served)]
                return f"turn {index}: sampled by {names[0]}, when its node served {names[1]}"
            served = version
    return ""


ONE_CALL = ("single_turn", '{"name": "single_turn"}')
"""The workflow that makes one model call, as tasks name it."""
MAX_LOST_CALLS = 64
"""Calls of an attempt that may have failed, and so have a seed but no turn."""
