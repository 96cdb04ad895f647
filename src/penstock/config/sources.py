# SPDX-License-Identifier: Apache-2.0
"""Where tasks come from and what attempts them: sources, agent sessions, workflows.

Owns their shape in the run file. Imports no task module and no workflow."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_validator,
)

from penstock.config.base import (
    FUNCTION,
    MODULE,
    FunctionName,
    Name,
    Section,
    is_custom,
    non_blank,
)
from penstock.config.environments import EnvironmentConfig
from penstock.config.harbor import AnyHarbor
from penstock.config.trainer import SamplingConfig
from penstock.options import Contradiction, non_empty, parse_options
from penstock.plugins import WORKFLOW_GROUP, load_function, plugin_names, quoted, unknown

WORKFLOWS = ("single_turn", "tool_loop", "env_loop", "solver_verifier", "planner")
"""Built-in workflows, by name."""
SELF_SCORED = ("env_loop",)
"""Built-in workflows that need no reward function."""

DATA_FILES = (".jsonl", ".parquet", ".csv")
"""Suffixes of files with one task per row."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""`owner/name` of a data set on the Hugging Face Hub."""
LOCAL_PREFIXES = ("/", "./", "../", "~")


def _task(value: str) -> str:
    is_other_file = value.endswith(DATA_FILES) and not value.endswith(".jsonl")
    if value.endswith(".jsonl") or (MODULE.fullmatch(value) and not is_other_file):
        return value
    if is_other_file or value.startswith("hf:"):
        fix = f"a data set goes under data: {value.removeprefix('hf:').removeprefix('//')}"
    elif FUNCTION.fullmatch(value):
        fix = f"name the module alone: {value.partition(':')[0]}"
    else:
        fix = "use a module like penstock.tasks.reverse or a path ending in .jsonl; a data set of "
        fix += "the Hub or another file goes under data:"
    raise ValueError(f"{quoted(value)} is not a task source; {fix}")


def _data_path(value: str) -> str:
    """Accept a path of a data file, any folder, or a Hub id; the files are not looked at."""
    is_other_file = value.endswith((".json", ".txt", ".tsv", ".arrow"))
    is_folder = value.startswith(LOCAL_PREFIXES) or HUB_ID.fullmatch(value)
    if value.endswith(DATA_FILES) or (is_folder and not is_other_file):
        return value
    if is_other_file:
        fix = f"convert it to one of {', '.join(DATA_FILES)}"
    elif value.startswith("hf:"):
        fix = f"write {value.removeprefix('hf:').removeprefix('//').removeprefix('datasets/')}"
    else:
        fix = f"for a folder write ./{value}, for a data set of the Hub OWNER/{value}"
    raise ValueError(f"{quoted(value)} is neither a data file, a folder nor a Hub id; {fix}")


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


class DataConfig(Section):
    """Tasks from the rows of a file, a folder or a data set of the Hugging Face Hub."""

    path: Annotated[str, AfterValidator(_data_path)]
    """A .jsonl, .parquet or .csv file, a folder that `datasets` can load, or `owner/name` on the
    Hub; relative to the working directory. A folder of that name comes before the Hub."""
    name: Annotated[str, AfterValidator(non_blank)] | None = None
    """The configuration of the data set, such as `main`; not for files."""
    split: Annotated[str, AfterValidator(non_blank)] | None = None
    """The split, such as `train[:1000]`; null: train. Not for files."""
    revision: Annotated[str, AfterValidator(non_blank)] | None = None
    """The commit, tag or branch on the Hub; null: the newest."""
    columns: Mapping[str, str | None] = Field(default_factory=dict[str, str | None])
    """Key of the task to column of the data, such as {prompt: question}; null drops the column of
    that name. All other columns keep their names."""
    limit: PositiveInt | None = None
    """Use only the first rows, this many; null for all. Tasks repeat after the last row."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt, by the policy's tokenizer. `check` and `run` refuse a longer one."""

    def _contradictions(self) -> Iterator[Contradiction]:
        is_file = self.path.endswith(DATA_FILES)
        for key in ("name", "split"):
            if is_file and getattr(self, key) is not None:
                text = f"{key} belongs to a data set with several, and {self.path} is one file; "
                yield Contradiction(text=f"{text}remove it", keys=((key,), ("path",)))
        if self.revision is not None and (is_file or self.path.startswith(LOCAL_PREFIXES)):
            text = f"revision belongs to a data set of the Hub, and {self.path} is local; remove it"
            yield Contradiction(text=text, keys=(("revision",), ("path",)))


def _data(value: Any) -> Any:
    """Accept a path alone."""
    return {"path": value} if isinstance(value, str) else value


class CommandWorkflow(Section):
    """Any program, trained through the gateway whose address is in its environment."""

    command: Annotated[tuple[str, ...], Field(strict=False), non_empty()]
    """The program and its arguments, without a shell."""


class NamedWorkflow(Section):
    """A workflow and its options: `{name: tool_loop, max_turns: 8}`. A function of yours gets them
    as keyword arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, AfterValidator(_workflow)]
    """As without options: a built-in name, one of an installed package, or `module:function`."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Check the options of a built-in workflow, and write out their defaults."""
        if not isinstance(data, Mapping):
            return data
        entry = cast(Mapping[str, Any], data)
        name = entry.get("name")
        if name not in WORKFLOWS:
            return entry
        options = {key: value for key, value in entry.items() if key != "name"}
        kind = load_function("penstock.rollout.workflows:builtin_options")(name)
        return {"name": name, **parse_options(kind, name, options).model_dump(mode="json")}

    @property
    def options(self) -> dict[str, Any]:
        """Its options; for a built-in workflow all of them, defaults included."""
        return dict(self.model_extra or {})


def _workflow_kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "<mapping>" if "name" in value else "<command>"
    if isinstance(value, CommandWorkflow):
        return "<command>"
    return "<mapping>" if isinstance(value, NamedWorkflow) else "<word>"


WorkflowConfig = Annotated[
    Annotated[str, AfterValidator(_workflow), Tag("<word>")]
    | Annotated[CommandWorkflow, Tag("<command>")]
    | Annotated[NamedWorkflow, Tag("<mapping>")],
    Discriminator(_workflow_kind),
]
"""A built-in name, one that an installed package offers, `module:function`, one of these with
options, or a command."""


def workflow_name(workflow: WorkflowConfig) -> str:
    """The name without options; empty for a command."""
    if isinstance(workflow, NamedWorkflow):
        return workflow.name
    return workflow if isinstance(workflow, str) else ""


class SourceConfig(Section):
    """A named, ordered supplier of tasks, or sessions of external agents."""

    name: Name
    """Names the source in ids and metrics."""
    task: Annotated[str, AfterValidator(_task)] | None = None
    """A module with tasks, or a .jsonl file, relative to the working directory."""
    data: (
        Annotated[DataConfig, BeforeValidator(_data, json_schema_input_type=str | DataConfig)]
        | None
    ) = None
    """Instead of a module: rows of a data set. A path alone, or a mapping."""
    harbor: AnyHarbor | None = None
    """Instead of a module: a folder of Harbor tasks, run in sandboxes. A path, or a mapping."""
    session: SessionConfig | None = None
    """Instead of tasks: sessions of external agents, each a group of one."""
    env: EnvironmentConfig | None = None
    """The environment that its workflow plays against. Without `task` or `data`, its tasks are
    numbered: {index, seed}."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mix, relative to the others."""
    limit: PositiveInt | None = None
    """End the source after this many tasks; null: never."""
    workflow: WorkflowConfig | None = None
    """What attempts its tasks; null: the workflow of the run."""
    reward: FunctionName | None = None
    """What scores its trajectories; null: the reward of the run."""
    sampling: SamplingConfig | None = None
    """Sampling of its turns; a key that is left out has the value of the run."""
    tools: Annotated[tuple[Name, ...], Field(strict=False)] | None = None
    """Names of the tool servers that its workflow may call; null: all of the run."""
    policies: Annotated[tuple[Name, ...], Field(strict=False), non_empty()] | None = None
    """Policies that its workflow calls; null: all of the run. Only nodes that serve them all get
    its tasks, and only they are trained on them."""

    @property
    def rows(self) -> DataConfig | None:
        """The data set it reads, also where `task` names a file."""
        is_file = self.task is not None and self.task.endswith(DATA_FILES)
        return DataConfig(path=self.task) if self.task and is_file else self.data

    @property
    def kind(self) -> str:
        """The key that says where its tasks come from."""
        return next(key for key in (*KINDS, "env") if getattr(self, key) is not None)

    def _contradictions(self) -> Iterator[Contradiction]:
        kinds = [key for key in KINDS if getattr(self, key) is not None]
        if len(kinds) > 1 or not (kinds or self.env):
            text = f"source {self.name} needs exactly one of task: (a module), data: (a data set), "
            text = f"{text}harbor: (a folder of Harbor tasks) and session: ({{}} for sessions of "
            text = f"{text}external agents), or an env:"
            yield Contradiction(text=text, keys=tuple((kind,) for kind in kinds[1:]) or ((),))
        for key, why in _NOT_FOR_SESSIONS.items():
            if self.session is not None and getattr(self, key) is not None:
                text = f"{key} has no effect on sessions: {why}; remove it"
                yield Contradiction(text=text, keys=((key,), ("session",)))
        if self.harbor is not None and isinstance(self.workflow, str | NamedWorkflow):
            text = "workflow has no effect on Harbor tasks: an agent runs inside each; write "
            text = f"{text}workflow: {{command: [...]}}, or remove it for the built-in one"
            yield Contradiction(text=text, keys=(("workflow",), ("harbor",)))
        if self.harbor is not None and self.reward is not None:
            text = "reward has no effect on Harbor tasks: the verifier of a task is its reward; "
            yield Contradiction(text=f"{text}remove it", keys=(("reward",), ("harbor",)))


KINDS = ("task", "data", "harbor", "session")
"""What a source can be; each the key that makes it so."""
_NOT_FOR_SESSIONS = {
    "workflow": "external agents run themselves",
    "reward": "external agents send their own rewards",
    "env": "external agents have their own",
    "sampling": "external agents choose their own, or get the sampling of the run",
    "tools": "external agents bring their own tools",
}
