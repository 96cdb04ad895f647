# SPDX-License-Identifier: Apache-2.0
"""Answers that an earlier attempt at the same slot already paid for.

Each is served once, to a call with the same policy, the same sampling but for its seed, and the
same context, token by token; calls that look the same get different answers, in the order in which
they were given. Knows nothing of leases or of who kept the turns.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from blake3 import blake3

from penstock.gateway.generation import Completion
from penstock.types import FinishReason, PolicyName, SamplingSpec, TokenIds, Turn, token_ids

Key = tuple[PolicyName, SamplingSpec, bytes]


class SalvagedAnswers:
    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self._answers: defaultdict[Key, deque[Turn]] = defaultdict(deque)
        contexts: list[bytes] = []
        """Of each turn, up to and with its answer."""
        for turn in turns:
            before = contexts[turn.parent] if turn.parent >= 0 else b""
            prompt = before + turn.prompt_ids
            contexts.append(prompt + turn.sampled_ids)
            if turn.finish is not FinishReason.ABORT:
                self._answers[_key(turn.policy, turn.sampling, TokenIds(prompt))].append(turn)

    def take(
        self, policy: PolicyName, sampling: SamplingSpec, context_ids: Sequence[int]
    ) -> Completion | None:
        """The answer to this call, if there is one that nobody was served yet."""
        if not self._answers:
            return None
        key = _key(policy, sampling, token_ids(context_ids))
        waiting = self._answers.get(key)
        if not waiting:
            return None
        turn = waiting.popleft()
        if not waiting:
            del self._answers[key]
        return Completion(
            sampled_ids=turn.sampled_ids,
            logprobs=turn.logprobs,
            spans=turn.spans,
            finish=turn.finish,
        )


def _key(policy: PolicyName, sampling: SamplingSpec, context: TokenIds) -> Key:
    return policy, replace(sampling, seed=0), blake3(context).digest()
