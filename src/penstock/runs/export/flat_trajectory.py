# SPDX-License-Identifier: Apache-2.0
"""Trajectories as plain values and back: the part that all formats share.

Owns the round trip of the record itself. Token ids and log-probs become lists of numbers and are
never tokenised again; float32 survives as a decimal number. Text is added by `prompt_parts` and
never read back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.errors import StoreError
from penstock.types import Trajectory, log_probs, token_ids, view_ids, view_log_probs

Plain = dict[str, Any]


def to_plain(trajectory: Trajectory) -> Plain:
    """The record as JSON-like values."""
    plain: Plain = msgspec.to_builtins(trajectory, builtin_types=(bytes,))
    turns = zip(plain["turns"], trajectory.turns, strict=True)
    plain["turns"] = [
        {
            **values,
            "prompt_ids": view_ids(turn.prompt_ids).tolist(),
            "sampled_ids": view_ids(turn.sampled_ids).tolist(),
            "logprobs": view_log_probs(turn.logprobs).tolist(),
            "experts": msgspec.to_builtins(turn.experts),  # choices in base64
        }
        for values, turn in turns
    ]
    return plain


def from_plain(plain: Plain, *, origin: str) -> Trajectory:
    """The record; StoreError if the values are not one. origin: where they come from, for the
    message."""
    try:
        turns = [
            {
                **turn,
                "prompt_ids": token_ids(turn["prompt_ids"]),
                "sampled_ids": token_ids(turn["sampled_ids"]),
                "logprobs": log_probs(turn["logprobs"]),
            }
            for turn in plain["turns"]
        ]
        return msgspec.convert({**plain, "turns": turns}, Trajectory)
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise StoreError(
            f"{origin} is not a trajectory that penstock exported: {error!r}; export it again with "
            "`penstock export trajectories`"
        ) from None
