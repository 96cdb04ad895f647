# SPDX-License-Identifier: Apache-2.0
"""What an operator that is an agent may do with a run: a table of tools, each with its arguments.

Owns the tools and who may call which: readers look, operators also act, and every action takes a
reason, which stands in the log of operators' actions. Knows no protocol; `mcp_server` serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import Forbidden
from penstock.fleet.autoscaler import ScaleMode
from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import drain_node, read_report, read_stored_report, tag_node
from penstock.runs.explained import explain_with_text
from penstock.runs.fork import fork_run
from penstock.runs.history import open_run
from penstock.runs.samples import choose
from penstock.runs.scaling import request_scale
from penstock.runs.state import read_summary
from penstock.types import OutcomeKind
from penstock.wire.auth import Role

MAX_SAMPLES = 20
DRAIN_S = 60.0
READERS = frozenset({Role.READER, Role.ADMIN})
OPERATORS = frozenset({Role.ADMIN})

Reason = Annotated[
    str,
    Meta(min_length=8, max_length=1000, description="Why: for the run's log of actions."),
]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls a tool."""

    name: str
    """Of its token, or the user of this process."""
    role: Role

    @property
    def who(self) -> str:
        """For the log of actions, as the services write it."""
        return f"{self.role} {self.name}".strip()


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


class ExplainArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[
        Name,
        Meta(
            description="Task key, group (p0-17), row (p0-17.2.1), batch (POLICY.5) or version "
            "(POLICY@1.5)."
        ),
    ]


class SamplesArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 5
    order: Literal["newest", "best", "worst"] = "newest"
    failed: Annotated[bool, Meta(description="Only failed rollouts, with the reason.")] = False
    step: Annotated[int | None, Meta(description="Only what this step trained.")] = None
    node: Annotated[Name | None, Meta(description="Only of this node.")] = None


class ScaleArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Reason
    to: Annotated[int | None, Meta(description="Wanted GPUs; a node counts as one.")] = None
    mode: Literal["act", "recommend"] | None = None


class DrainArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Reason
    node: Annotated[Name, Meta(description="Name of the node, as status shows it.")]


class TagArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Reason
    node: Annotated[Name, Meta(description="Name of the node, as status shows it.")]
    add: Annotated[tuple[Name, ...], Meta(max_length=16, description="Such as train.")] = ()
    remove: Annotated[tuple[Name, ...], Meta(max_length=16, description="Such as rollout.")] = ()


class ForkArguments(Arguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Reason
    step: Annotated[int, Meta(ge=0, description="Step to start from.")]
    overrides: Annotated[
        tuple[str, ...], Meta(max_length=64, description="Settings that differ: KEY=VALUE.")
    ] = ()
    name: Annotated[str | None, Meta(description="By default NAME-fork-STEP.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTool:
    name: str
    description: str
    roles: frozenset[Role]
    arguments: type[Arguments]
    do: Callable[[RunFolder, Caller, Any], object]
    """Blocks; returns something that can be written as JSON."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        _, parts = msgspec.json.schema_components([self.arguments])
        found = parts[self.arguments.__name__]
        return {
            name: value for name, value in found.items() if name not in ("title", "description")
        }


def call_tool(folder: RunFolder, caller: Caller, name: str, arguments: dict[str, Any]) -> object:
    """Raises Forbidden, msgspec.ValidationError for wrong arguments, or what the tool raises."""
    tool = TOOLS.get(name)
    if tool is None:
        raise Forbidden(f"no tool {name[:80]!r}; there are {', '.join(TOOLS)}")
    if caller.role not in tool.roles:
        raise Forbidden(
            f"{name} changes the run, and {caller.who} may only read. A person who may allow it "
            f"runs `penstock token {folder.path} --role admin --name NAME --out FILE`"
        )
    return tool.do(folder, caller, msgspec.convert(arguments, tool.arguments))


def _status(folder: RunFolder, caller: Caller, asked: Arguments) -> object:
    return read_summary(folder)


def _report(folder: RunFolder, caller: Caller, asked: Arguments) -> object:
    is_answered = read_summary(folder).status is not None
    return read_report(folder) if is_answered else read_stored_report(folder)


def _explain(folder: RunFolder, caller: Caller, asked: ExplainArguments) -> object:
    explanation, said = explain_with_text(folder, asked.id)
    return {**asdict(explanation), "samples": said[:MAX_SAMPLES]}


def _samples(folder: RunFolder, caller: Caller, asked: SamplesArguments) -> object:
    steps = None if asked.step is None else (asked.step, asked.step)
    outcome = OutcomeKind.FAILED if asked.failed else None
    with open_run(folder.path) as run:
        return choose(
            run,
            count=asked.count,
            steps=steps,
            outcome=outcome,
            node=asked.node,
            order=asked.order,
        )


def _scale(folder: RunFolder, caller: Caller, asked: ScaleArguments) -> object:
    mode = None if asked.mode is None else ScaleMode(asked.mode)
    return request_scale(
        folder, gpus=asked.to, mode=mode, who=caller.who, why=_one_line(asked.reason)
    )


def _drain(folder: RunFolder, caller: Caller, asked: DrainArguments) -> object:
    why = _one_line(asked.reason)
    has_left = drain_node(folder, asked.node, who=caller.name, why=why, timeout_s=DRAIN_S)
    return {"node": asked.node, "has_left": has_left}


def _tag(folder: RunFolder, caller: Caller, asked: TagArguments) -> object:
    return tag_node(
        folder,
        asked.node,
        add=asked.add,
        remove=asked.remove,
        who=caller.name,
        why=_one_line(asked.reason),
    )


def _fork(folder: RunFolder, caller: Caller, asked: ForkArguments) -> object:
    created, weights_only = fork_run(
        folder,
        asked.overrides,
        asked.step,
        asked.name,
        by_another=True,
        who=caller.who,
        why=_one_line(asked.reason),
    )
    return {
        "folder": str(created.path),
        "weights_only": list(weights_only),
        "next": f"penstock run {Path(created.path)}",
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


TOOLS = {
    tool.name: tool
    for tool in (
        OperatorTool(
            name="status",
            description="State of the run: step, reward, nodes, what waits for what, alarms.",
            roles=READERS,
            arguments=Arguments,
            do=_status,
        ),
        OperatorTool(
            name="report",
            description="Whether trainers or nodes are the bottleneck, each node's rate, wasted "
            "work by reason, and the recommended size of the pool.",
            roles=READERS,
            arguments=Arguments,
            do=_report,
        ),
        OperatorTool(
            name="explain",
            description="Why a task, group, row, batch or version was used or dropped, step by "
            "step, with the text.",
            roles=READERS,
            arguments=ExplainArguments,
            do=_explain,
        ),
        OperatorTool(
            name="samples",
            description="What the model said, with rewards, or why rollouts failed.",
            roles=READERS,
            arguments=SamplesArguments,
            do=_samples,
        ),
        OperatorTool(
            name="scale",
            description="Ask for another size of the rollout pool, or another mode of the "
            "autoscaler; the launcher follows within seconds.",
            roles=OPERATORS,
            arguments=ScaleArguments,
            do=_scale,
        ),
        OperatorTool(
            name="drain",
            description="Take one node out of the run; it returns its work first.",
            roles=OPERATORS,
            arguments=DrainArguments,
            do=_drain,
        ),
        OperatorTool(
            name="tag",
            description="Add and remove tags of a node: with train it also gives way to training.",
            roles=OPERATORS,
            arguments=TagArguments,
            do=_tag,
        ),
        OperatorTool(
            name="fork",
            description="Create a new run from a step of this one, with other settings. It is not "
            "started.",
            roles=OPERATORS,
            arguments=ForkArguments,
            do=_fork,
        ),
    )
}
