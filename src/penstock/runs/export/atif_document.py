# SPDX-License-Identifier: Apache-2.0
"""Trajectories as documents of the Agent Trajectory Interchange Format (ATIF 1.8), and back.

Owns the mapping. A turn is an agent step: its metrics hold the full prompt, the sampled ids and
their log-probs, its `model_name` the version. What the format has no field for, such as spans and
sampling, is in `extra` under `penstock`. Coming back, ids are taken from the metrics, never from
text, and a prompt that does not continue its parent turn is refused. The `atif` package validates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, cast

from pydantic import ValidationError

from penstock.errors import ConfigError, StoreError
from penstock.runs.export.flat_trajectory import Plain, from_plain, to_plain
from penstock.runs.export.made_by import penstock_version
from penstock.runs.export.prompt_parts import TrajectoryTexts
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.types import JsonObject, ToolUse, Trajectory, view_ids

try:
    import atif
except ModuleNotFoundError:
    raise ConfigError(
        "ATIF needs the package atif, which is not installed; pip install 'penstock-rl[export]'"
    ) from None

SCHEMA = "ATIF-v1.8"
OWN = "penstock"
"""Key of what the format has no field for."""
_IN_METRICS = ("prompt_ids", "sampled_ids", "logprobs")
MAX_PROMPT_TOKENS = 1 << 25
"""Of all steps of a document, each with its full prompt: 500 turns in a window of 128,000 tokens.
A row of 1 MB can have thousands of turns that extend one long prompt by nothing."""


def num_prompt_tokens(record: Trajectory) -> int:
    """Of all its turns, each with the full prompt that its document has."""
    contexts: list[int] = []
    total = 0
    for turn in record.turns:
        before = contexts[turn.parent] if turn.parent >= 0 else 0
        prompt = before + len(view_ids(turn.prompt_ids))
        total += prompt
        contexts.append(prompt + len(view_ids(turn.sampled_ids)))
    return total


def to_document(one: RecordedTrajectory, texts: TrajectoryTexts) -> atif.Trajectory:
    """A stored trajectory as a validated document."""
    assert one.payload is not None, "only stored trajectories are exported"
    plain = to_plain(one.payload)
    steps = [*_steps(one.payload, plain, texts)]
    sampled = [len(turn["sampled_ids"]) for turn in plain["turns"]]
    return atif.Trajectory(
        schema_version=SCHEMA,
        session_id=one.group_id,
        trajectory_id=one.row_id,
        agent=atif.Agent(
            name=OWN if one.task is None else one.task.workflow or OWN,
            version=penstock_version(),
            model_name=", ".join(one.versions) or None,
            tool_definitions=[*texts.tools] or None,
            extra={"system_prompt": texts.system} if texts.system else None,
        ),
        steps=[step.model_copy(update={"step_id": at}) for at, step in enumerate(steps, 1)],
        notes=f"no text: {texts.problem}" if texts.problem else None,
        final_metrics=atif.FinalMetrics(
            total_completion_tokens=sum(sampled), total_steps=len(steps)
        ),
        extra={OWN: _facts(one, plain)},
    )


def to_json(document: atif.Trajectory) -> str:
    return document.model_dump_json(exclude_none=True)


def from_json(text: str | bytes, *, origin: str) -> Trajectory:
    """The trajectory of such a document, as it was delivered; origin: the file, for messages."""
    try:
        document = atif.Trajectory.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise StoreError(
            f"{origin} is not an ATIF document: {where}: {first['msg']}; export it again"
        ) from None
    own = (document.extra or {}).get(OWN)
    if not isinstance(own, dict) or "record" not in own:
        raise StoreError(
            f"{origin} is an ATIF document, but not one of penstock: it has no extra.{OWN}.record, "
            "so its sampling and versions are unknown; import documents that penstock exported"
        )
    record = cast(Plain, own["record"])
    made = (step for step in document.steps if step.source == "agent")
    turns = _turns([step for step in made if step.metrics is not None], origin)
    return from_plain({**record, "turns": turns}, origin=origin)


# --- writing --------------------------------------------------------------------------------------


def _facts(one: RecordedTrajectory, plain: Plain) -> JsonObject:
    return {
        "record": {name: value for name, value in plain.items() if name != "turns"},
        "source": one.source,
        "task": None if one.task is None else one.task.payload,
        "task_key": None if one.task is None else one.task.key,
        "reward": one.reward,
        "steps": list(one.steps),
        "values": {name: v for name, v in one.columns.items() if isinstance(v, float)},
    }


def _steps(record: Trajectory, plain: Plain, texts: TrajectoryTexts) -> Iterator[atif.Step]:
    """Ids of steps are set afterwards."""
    uses: dict[int, list[ToolUse]] = {}
    for use in record.tool_uses:
        uses.setdefault(use.turn, []).append(use)
    if texts.system:
        yield atif.Step(step_id=1, source="system", message=texts.system)
    for at, turn in enumerate(plain["turns"]):
        asked = texts.prompts[at].rest if texts.prompts else ""
        if asked and (turn["parent"] < 0 or turn["parent"] not in uses):
            yield atif.Step(step_id=1, source="user", message=asked)
        yield _agent_step(turn, at, _full_prompt(plain["turns"], at), texts, uses.get(at, ()))


def _full_prompt(turns: Sequence[Plain], at: int) -> list[int]:
    path = list[Plain]()
    above: int = turns[at]["parent"]
    while above >= 0:
        path.append(turns[above])
        above = int(path[-1]["parent"])
    parts = [part for turn in reversed(path) for part in (turn["prompt_ids"], turn["sampled_ids"])]
    return [*chain.from_iterable(map(_ids, parts)), *_ids(turns[at]["prompt_ids"])]


def _ids(values: Any) -> list[int]:
    return values


def _agent_step(
    turn: Plain, at: int, prompt: list[int], texts: TrajectoryTexts, uses: Sequence[ToolUse]
) -> atif.Step:
    decoded = texts.turns[at] if texts.turns else None
    calls = [_call(f"{at}.{number}", use) for number, use in enumerate(uses)]
    if decoded is not None and not calls:
        calls = [
            atif.ToolCall(
                tool_call_id=f"{at}.{number}",
                function_name=call.name,
                arguments=_arguments(call.arguments),
            )
            for number, call in enumerate(decoded.tool_calls)
        ]
    results = [
        atif.ObservationResult(source_call_id=f"{at}.{number}", content=use.result)
        for number, use in enumerate(uses)
    ]
    versions = dict.fromkeys(f"{s['incarnation']}.{s['number']}" for s in turn["spans"])
    return atif.Step(
        step_id=1,
        source="agent",
        timestamp=_moment(turn["ended_at"]),
        model_name=", ".join(f"{turn['policy']}@{version}" for version in versions) or None,
        message="" if decoded is None else decoded.answer,
        reasoning_content=(decoded.reasoning or None) if decoded else None,
        tool_calls=calls or None,
        observation=atif.Observation(results=results) if results else None,
        metrics=atif.Metrics(
            prompt_tokens=len(prompt),
            completion_tokens=len(turn["sampled_ids"]),
            prompt_token_ids=prompt,
            completion_token_ids=turn["sampled_ids"],
            logprobs=turn["logprobs"],
        ),
        extra={
            OWN: {
                **{name: value for name, value in turn.items() if name not in _IN_METRICS},
                "new_prompt_tokens": len(turn["prompt_ids"]),
            }
        },
        llm_call_count=1,
    )


def _call(call_id: str, use: ToolUse) -> atif.ToolCall:
    facts = {"is_error": use.is_error, "seconds": use.seconds, "cost": use.cost}
    return atif.ToolCall(
        tool_call_id=call_id,
        function_name=use.name,
        arguments=_arguments(use.arguments),
        extra={OWN: facts},
    )


def _arguments(text: str) -> JsonObject:
    """The format wants an object; other text, such as a cut one, is kept under a name of ours."""
    try:
        found: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"_text": text}
    return cast(JsonObject, found) if isinstance(found, dict) else {"_text": text}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _moment(at: float) -> str | None:
    return datetime.fromtimestamp(at, UTC).isoformat() if at > 0 else None


# --- reading --------------------------------------------------------------------------------------


def _turns(steps: Sequence[atif.Step], origin: str) -> list[Plain]:
    contexts: list[list[int]] = []
    turns: list[Plain] = []
    for step in steps:
        metrics, own = step.metrics, (step.extra or {}).get(OWN)
        if metrics is None or not isinstance(own, dict):
            raise StoreError(f"{origin}: step {step.step_id} has no extra.{OWN}; export it again")
        facts = cast(Plain, own)
        prompt, sampled = metrics.prompt_token_ids or [], metrics.completion_token_ids or []
        at = len(prompt) - int(facts["new_prompt_tokens"])
        parent = int(facts["parent"])
        if not -1 <= parent < len(contexts):
            raise StoreError(f"{origin}: step {step.step_id} continues a step that comes later")
        if prompt[:at] != (contexts[parent] if parent >= 0 else []) or at < 0:
            raise StoreError(
                f"{origin}: the prompt of step {step.step_id} does not continue turn {parent}; the "
                "document was changed after its export: export it again"
            )
        contexts.append([*prompt, *sampled])
        ids = {
            "prompt_ids": prompt[at:],
            "sampled_ids": sampled,
            "logprobs": metrics.logprobs or [],
        }
        rest = {name: value for name, value in facts.items() if name != "new_prompt_tokens"}
        turns.append({**rest, **ids})
    return turns
