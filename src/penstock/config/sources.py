# SPDX-License-Identifier: Apache-2.0
"""Where tasks come from and what attempts them: sources, agent sessions, workflows.

Owns their shape in the run file. Imports no task module and no workflow."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, PositiveInt, Tag

from penstock.config.base import FUNCTION, MODULE, Name, Section, is_custom
from penstock.options import Contradiction, non_empty
from penstock.plugins import WORKFLOW_GROUP, plugin_names, quoted, unknown

WORKFLOWS = ("single_turn",)
"""Built-in workflows, by name."""

_PLANNED_TASK_FORMATS = (".parquet", ".csv", ".arrow")


def _task(value: str) -> str:
    if value.endswith(_PLANNED_TASK_FORMATS) or value.startswith(("hf:", "hf://")):
        raise ValueError(f"{quoted(value)} is not supported yet; use a module or a .jsonl file")
    if value.endswith(".jsonl") or MODULE.fullmatch(value):
        return value
    if FUNCTION.fullmatch(value):
        fix = f"name the module alone: {value.partition(':')[0]}"
    else:
        fix = "use a module like penstock.tasks.reverse or a path ending in .jsonl"
    raise ValueError(f"{quoted(value)} is not a task source; {fix}")


def _workflow(value: str) -> str:
    if value in WORKFLOWS or is_custom(value, WORKFLOW_GROUP):
        return value
    known = (*WORKFLOWS, *plugin_names(WORKFLOW_GROUP))
    also = "module:function | {command: [...]}"
    raise ValueError(unknown("workflow", value, known, also=also))


class SessionConfig(Section):
    """Sessions of external agents, which connect to `penstock gateway` at any time."""

    reward_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds from the start of a session in which its reward must arrive."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds without a call after which a session ends."""
    default_reward: float | None = Field(default=None, ge=-1e9, le=1e9)
    """Reward of a session that got none in time; null: it is never trained."""


class SourceConfig(Section):
    """A named, ordered supplier of tasks, or sessions of external agents."""

    name: Name
    """Names the source in ids and metrics."""
    task: Annotated[str, AfterValidator(_task)] | None = None
    """A module with tasks, or a .jsonl file, relative to the working directory."""
    session: SessionConfig | None = None
    """Instead of tasks: sessions of external agents, each a group of one."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mix, relative to the others."""
    limit: PositiveInt | None = None
    """Use only this many tasks, the first ones; null for all."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if (self.task is None) is (self.session is None):
            text = f"source {self.name} needs either task: (a module or a .jsonl file) or session: "
            yield Contradiction(text=f"{text}({{}} for sessions of external agents)", keys=((),))


class CommandWorkflow(Section):
    """Any program, trained through the gateway whose address is in its environment."""

    command: Annotated[tuple[str, ...], Field(strict=False), non_empty()]
    """The program and its arguments, without a shell."""


def _workflow_kind(value: object) -> str:
    return "<mapping>" if isinstance(value, Mapping | CommandWorkflow) else "<word>"


WorkflowConfig = Annotated[
    Annotated[str, AfterValidator(_workflow), Tag("<word>")]
    | Annotated[CommandWorkflow, Tag("<mapping>")],
    Discriminator(_workflow_kind),
]
"""A built-in name, one that an installed package offers, `module:function`, or a command."""
