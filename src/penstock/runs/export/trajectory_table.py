# SPDX-License-Identifier: Apache-2.0
"""Trajectories as rows of an Arrow table, for Parquet files and Hugging Face datasets.

Owns the columns. One row is one trajectory with all its turns: token ids, log-probs and versions as
the engine reported them, and their text beside them. Only types that `datasets` knows, so no maps.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.runs.export.flat_trajectory import Plain, from_plain, to_plain
from penstock.runs.export.prompt_parts import TrajectoryTexts
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.types import Trajectory
from penstock.wire.codec import encode_json

_RECORD = (
    "row_id",
    "group_id",
    "slot",
    "epoch",
    "attempt",
    "node_id",
    "turns",
    "reward",
    "outcome",
    "started_at",
    "ended_at",
    "boot_id",
    "role_rewards",
    "tool_uses",
    "sandbox_ms",
)
"""Columns of the record itself; the others are derived from it or from the ledger."""
_EXPERT_COUNTS = ("num_layers", "num_chosen", "num_experts")
_TURN_TEXTS = ("prompt", "answer", "reasoning", "tool_calls")


def table_schema() -> Any:
    """The columns, as a `pyarrow.Schema`. Needs `penstock-rl[data]`."""
    pa: Any = import_module("pyarrow")
    text, number, whole = pa.string(), pa.float64(), pa.int64()
    span = [("start", whole), ("end", whole), ("incarnation", whole), ("number", whole)]
    call = pa.struct([("name", text), ("arguments", text)])
    turn = [
        ("policy", text),
        ("parent", whole),
        ("role", text),
        ("agent", text),
        ("prompt", text),
        ("answer", text),
        ("reasoning", text),
        ("tool_calls", pa.list_(call)),
        ("prompt_ids", pa.list_(pa.int32())),
        ("sampled_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("spans", pa.list_(pa.struct(span))),
        ("sampling", pa.struct(_sampling(pa))),
        ("finish", text),
        ("reached_agent", pa.bool_()),
        ("reward", number),
        ("started_at", number),
        ("ended_at", number),
        ("kv", pa.list_(whole)),
        ("experts", pa.struct([*((name, whole) for name in _EXPERT_COUNTS), ("choices", text)])),
    ]
    tool_use = [
        ("turn", whole),
        ("name", text),
        ("arguments", text),
        ("result", text),
        ("is_error", pa.bool_()),
        ("seconds", number),
        ("cost", number),
        ("agent", text),
    ]
    outcome = [("kind", text), ("reason", text), ("detail", text)]
    return pa.schema(
        [
            ("row_id", text),
            ("group_id", text),
            ("slot", whole),
            ("epoch", whole),
            ("attempt", whole),
            ("node_id", text),
            ("boot_id", text),
            ("source", text),
            ("task_key", text),
            ("task", text),
            ("reward", number),
            ("scored_reward", number),
            ("outcome", pa.struct(outcome)),
            ("versions", pa.list_(text)),
            ("steps", pa.list_(whole)),
            ("fate", text),
            ("system_prompt", text),
            ("tools", pa.list_(text)),
            ("turns", pa.list_(pa.struct(turn))),
            ("tool_uses", pa.list_(pa.struct(tool_use))),
            ("role_rewards", pa.list_(pa.struct([("role", text), ("reward", number)]))),
            ("values", pa.list_(pa.struct([("name", text), ("value", number)]))),
            ("started_at", number),
            ("ended_at", number),
            ("delivered_at", number),
            ("sandbox_ms", whole),
        ]
    )


def _sampling(pa: Any) -> list[tuple[str, Any]]:
    return [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("max_tokens", pa.int64()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("json_schema", pa.string()),
    ]


def to_row(one: RecordedTrajectory, texts: TrajectoryTexts) -> Plain:
    """A stored trajectory as a row of the table."""
    assert one.payload is not None, "only stored trajectories are exported"
    plain = to_plain(one.payload)
    for at, decoded in enumerate(texts.turns):
        calls = [{"name": call.name, "arguments": call.arguments} for call in decoded.tool_calls]
        values = (decoded.prompt, decoded.answer, decoded.reasoning, calls)
        plain["turns"][at] |= dict(zip(_TURN_TEXTS, values, strict=True))
    roles = plain["role_rewards"].items()
    numbers = ((name, value) for name, value in one.columns.items() if isinstance(value, float))
    return plain | {
        "source": one.source,
        "task_key": "" if one.task is None else one.task.key,
        "task": encode_json(one.task_payload).decode(),
        "scored_reward": one.reward,
        "versions": list(one.versions),
        "steps": list(one.steps),
        "fate": one.uses[-1].fate if one.uses else "",
        "system_prompt": texts.system,
        "tools": [encode_json(tool).decode() for tool in texts.tools],
        "role_rewards": [{"role": role, "reward": reward} for role, reward in roles],
        "values": [{"name": name, "value": value} for name, value in numbers],
        "delivered_at": one.delivered_at,
    }


def from_row(row: Plain, *, origin: str) -> Trajectory:
    """The trajectory of such a row, as it was delivered."""
    plain = {name: row[name] for name in _RECORD if name in row}
    plain["turns"] = [
        {name: value for name, value in turn.items() if name not in _TURN_TEXTS}
        for turn in row.get("turns") or ()
    ]
    roles = row.get("role_rewards") or ()
    plain["role_rewards"] = {each["role"]: each["reward"] for each in roles}
    return from_plain(plain, origin=origin)
