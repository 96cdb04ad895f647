# SPDX-License-Identifier: Apache-2.0
"""The whole run file: `RunConfig`, its models, sources and workflow, and one policy's view of it.

Owns the shape of run.yaml and the contradictions between its sections. Plain data: it reads no
file, imports no user code and builds nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from penstock.config.algorithms import PRESETS, with_minibatches
from penstock.config.base import (
    FUNCTION,
    MODULE,
    NAME,
    Contradiction,
    Section,
    did_you_mean,
    matching,
    non_empty,
    one_of,
    only_supported,
    quoted,
    raise_contradictions,
)
from penstock.config.cross_checks import cross_checks
from penstock.config.dataflow import DataflowConfig, PolicyDataflowConfig
from penstock.config.engines import EngineName
from penstock.config.lora import LoraConfig
from penstock.config.pipeline import PipelineConfig
from penstock.config.pipeline_cross_checks import ledger_stages
from penstock.config.rules import RuleConfig, effective_rules
from penstock.config.trainer import AlgorithmConfig, SamplingConfig, TrainingConfig
from penstock.config.weights import WeightsConfig
from penstock.errors import ConfigError

BUILTIN_MODELS = ("builtin:tiny-qwen3",)
"""Models that penstock builds itself, without a download."""
VLLM_TEMPERATURE_RANGE = (0.01, 2.0)
"""It raises what is below to this, silently, and refuses what is above."""
WORKFLOWS = ("single_turn",)
"""Workflows that penstock ships, by name."""

_PLANNED_TASK_FORMATS = (".parquet", ".csv", ".arrow")
_NAME_FIX = "use up to 64 letters, digits, _ or -, starting with a letter or digit"
Name = Annotated[str, AfterValidator(matching(NAME, _NAME_FIX))]
"""Name of a policy or source."""


def _run_name(value: str) -> str:
    if not all(NAME.fullmatch(part) for part in value.split(".")) or len(value) > 100:
        raise ValueError(
            f"{quoted(value)} does not fit; it names the run folder: use up to 100 letters, "
            "digits, _, - and single dots, starting with a letter or digit"
        )
    return value


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty; give a value")
    return value


def _init(value: str) -> str:
    if value.startswith("builtin:") and value not in BUILTIN_MODELS:
        closest = did_you_mean(value, BUILTIN_MODELS) or BUILTIN_MODELS[0]
        raise ValueError(f'{quoted(value)} is not a built-in model; did you mean "{closest}"?')
    return _text(value)


def _task(value: str) -> str:
    if value.endswith(_PLANNED_TASK_FORMATS) or value.startswith(("hf:", "hf://")):
        raise ValueError(f"{quoted(value)} is not supported yet; use a module or a .jsonl file")
    if value.endswith(".jsonl") or MODULE.fullmatch(value):
        return value
    if FUNCTION.fullmatch(value):
        fix = f"name the module alone: {value.partition(':')[0]}"
    else:
        fix = "use a module like penstock.tasks.reverse or a path ending in .jsonl"
    raise ValueError(f"{quoted(value)} names no source of tasks; {fix}")


def _workflow(value: str) -> str:
    if value in WORKFLOWS or FUNCTION.fullmatch(value):
        return value
    closest = did_you_mean(value, WORKFLOWS)
    fix = (
        f'did you mean "{closest}"?'
        if closest
        else (f"use {' | '.join(WORKFLOWS)}, module:function, or {{command: [...]}}")
    )
    raise ValueError(f"{quoted(value)} is no workflow; {fix}")


def _report_to(value: object) -> object:
    if isinstance(value, str | list | tuple) and value:
        trackers = quoted(cast(object, value))
        raise ValueError(
            f"{trackers} is not supported yet; leave report_to: [] (metrics.jsonl is always written)"
        )
    return cast(object, value)


class VllmConfig(Section):
    """Where vLLM is; what `engine: vllm` needs to know."""

    url: str | None = None
    """A server that runs already, like http://127.0.0.1:8000; null starts one inside each node."""
    environment: str | None = None
    """Virtual environment that holds vLLM; null is the one that `make setup-engine` makes."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More words for `vllm serve`, like [--dtype, float32]."""


class SglangConfig(Section):
    """Where SGLang is, for `engine: sglang`; untested on a real server."""

    url: str | None = None
    """The server, like http://127.0.0.1:30000."""


class ModelConfig(Section):
    """One policy: its model, who serves it, and what it does differently from the others."""

    init: Annotated[str, AfterValidator(_init)]
    """Initial weights: `builtin:NAME`, or a folder in Hugging Face form."""
    lora: LoraConfig | None = None
    """Train an adapter on these weights, which stay as they are; null trains all of them."""
    engine: EngineName = "hf"
    """What generates: transformers in process, vLLM or SGLang in a process of its own, a table of
    answers, or a simulation of timing."""
    vllm: VllmConfig = VllmConfig()
    """Where vLLM is, for that engine."""
    sglang: SglangConfig = SglangConfig()
    """Where SGLang is, for that engine."""
    replicas: NonNegativeInt = 1
    """Rollout nodes the launcher starts; 0 leaves generating to nodes that join."""
    frozen: Annotated[
        Literal[False], only_supported(False, "set frozen: false, or leave it out")
    ] = False
    """Served and never trained (judges, teachers); only false is served yet."""
    capacity: PositiveInt = 256
    """Slots one node works on at once."""
    engines: PositiveInt = 1
    """Engines inside each node; requests of a lost one go on at the others."""
    max_paused: float = Field(default=0.25, gt=0, le=1)
    """Share of a node's engines that may take new weights at once; one always may."""
    torch_threads: PositiveInt = 1
    """CPU threads of torch in each process of this policy."""
    algorithm: AlgorithmConfig | None = None
    """This policy's algorithm; keys not written here come from the shared section."""
    training: TrainingConfig | None = None
    """This policy's training; keys not written here come from the shared section."""
    dataflow: PolicyDataflowConfig | None = None
    """This policy's rules."""

    @model_validator(mode="after")
    def _check_engine_server(self) -> Self:
        if self.engine == "sglang" and not self.sglang.url:
            raise ValueError("engine sglang needs a server that runs; set sglang: {url: ...}")
        if self.engine_url and self.replicas * self.engines > 1:
            raise ValueError(
                f"{self.engine}.url names one server, and an engine swaps weights in its own; "
                "set replicas: 1 and engines: 1"
            )
        return self

    @property
    def engine_url(self) -> str:
        """Where the engine's server runs already; empty when it is to be started."""
        urls = {"vllm": self.vllm.url, "sglang": self.sglang.url}
        return urls.get(self.engine) or ""


class SessionConfig(Section):
    """Sessions of agents outside the run, which come to `penstock gateway` when they like."""

    reward_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds from the opening of a session in which its reward must come."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds without a call after which a session has ended."""
    default_reward: float | None = Field(default=None, ge=-1e9, le=1e9)
    """Reward of a session for which none came in time; null: it is never trained."""


class SourceConfig(Section):
    """A named, ordered supplier of tasks, or the door for agents from outside."""

    name: Name
    """Names the source in ids and metrics."""
    task: Annotated[str, AfterValidator(_task)] | None = None
    """A module with tasks, or a .jsonl file, relative to the working directory."""
    session: SessionConfig | None = None
    """Instead of tasks: sessions of agents outside the run, each a group of one."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mix, relative to the others."""
    limit: PositiveInt | None = None
    """Use the first tasks only, so many; all when null."""

    @model_validator(mode="after")
    def _check_single_supply(self) -> Self:
        if (self.task is None) is (self.session is None):
            raise ValueError(
                f"source {self.name} needs either task: (a module or a .jsonl file) or session: "
                "({} for sessions of agents from outside)"
            )
        return self


class CommandWorkflow(Section):
    """A program of any kind, trained through the gateway's address in its environment."""

    command: Annotated[tuple[str, ...], Field(strict=False), non_empty()]
    """The program and its arguments, without a shell."""


def _workflow_kind(value: object) -> str:
    return "<mapping>" if isinstance(value, Mapping | CommandWorkflow) else "<word>"


WorkflowConfig = Annotated[
    Annotated[str, AfterValidator(_workflow), Tag("<word>")]
    | Annotated[CommandWorkflow, Tag("<mapping>")],
    Discriminator(_workflow_kind),
]
"""A shipped name, `module:function`, or a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Everything that holds for one policy, after its own settings have won."""

    name: str
    """The policy."""
    model: ModelConfig
    """Its entry in the file."""
    algorithm: AlgorithmConfig
    """Its algorithm in force."""
    training: TrainingConfig
    """Its training in force."""
    sampling: SamplingConfig
    """How its tokens are sampled."""
    rules: tuple[RuleConfig, ...]
    """Its rules in force, hook by hook, defaults included."""


class RunConfig(Section):
    """One run, as its file describes it."""

    name: Annotated[str, AfterValidator(_run_name)]
    """Names the run and its folder."""
    output_dir: Annotated[str, AfterValidator(_text)] = "outputs"
    """Holds the run folders; relative to the working directory."""
    launcher: Annotated[
        Literal["local"], one_of("local", planned=("ray", "kubernetes", "slurm"))
    ] = "local"
    """What starts the processes."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seeds everything random in the run."""
    deterministic: bool = False
    """Make the whole run a function of config and data, killed or not, on one node or many: batches
    in order of issue, a fixed lag of max_staleness, one answer at a time in each engine. Slow."""
    models: Annotated[Mapping[Name, ModelConfig], non_empty()]
    """One entry per policy."""
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False), non_empty()]
    """Where tasks come from."""
    workflow: WorkflowConfig = "single_turn"
    """What attempts a task."""
    reward: (
        Annotated[
            str, AfterValidator(matching(FUNCTION, "write module:function, like my_task:reward"))
        ]
        | None
    ) = None
    """What scores a trajectory; null when the workflow does it itself."""
    dataflow: DataflowConfig = DataflowConfig()
    """The dataflow service."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm of every policy that names no other."""
    training: TrainingConfig
    """The training of every policy that names no other."""
    weights: WeightsConfig = WeightsConfig()
    """Weights on their way to the nodes."""
    pipeline: PipelineConfig | None = None
    """What trainers do with a batch, as a graph of stages; null: the algorithm's own."""
    eval: Annotated[None, only_supported(None, "leave eval null")] = None
    """Scored runs beside training; not served yet."""
    report_to: Annotated[
        tuple[str, ...],
        Field(strict=False),
        BeforeValidator(_report_to),
    ] = ()
    """Trackers beside metrics.jsonl; none is served yet."""

    @model_validator(mode="before")
    @classmethod
    def _inherit_shared_sections(cls, data: Any) -> Any:
        """Complete each policy's own algorithm and training from the shared sections."""
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        whole = with_minibatches(written)
        models = whole.get("models")
        if isinstance(models, Mapping):
            entries = cast(Mapping[str, Any], models)
            whole["models"] = {
                n: _with_inherited_keys(entry, written) for n, entry in entries.items()
            }
        return whole

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(
            [*self._repeated_sources(), *self._temperatures(), *cross_checks(self)]
        )
        return self

    @model_validator(mode="after")
    def _add_service_stages(self) -> Self:
        """A pipeline stage that is placed elsewhere is a stage of the dataflow too."""
        stages = tuple(stage for _, stage in ledger_stages(self))
        declared = self.dataflow.model_copy(update={"stages": stages})
        object.__setattr__(self, "dataflow", declared)  # frozen for everybody else
        return self

    def _repeated_sources(self) -> Iterator[Contradiction]:
        names = [source.name for source in self.sources]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Contradiction(
                    text=f"a source named {quoted(name)} stands above; give each its own name",
                    keys=(("sources", index, "name"),),
                )

    def _temperatures(self) -> Iterator[Contradiction]:
        least, most = VLLM_TEMPERATURE_RANGE
        is_vllm = any(model.engine == "vllm" for model in self.models.values())
        if is_vllm and not least <= self.sampling.temperature <= most:
            yield Contradiction(
                text=f"temperature {self.sampling.temperature:g}: vLLM samples from {least:g} to "
                f"{most:g}; choose one of these, or another engine",
                keys=(("sampling", "temperature"),),
            )

    @property
    def session_source(self) -> SourceConfig | None:
        """The one through which agents from outside come, if they may."""
        return next((source for source in self.sources if source.session is not None), None)

    def for_policy(self, name: str) -> PolicyConfig:
        """What holds for this policy: its own settings where it has any, else the shared ones."""
        if name not in self.models:
            closest = did_you_mean(name, tuple(self.models))
            fix = f'did you mean "{closest}"?' if closest else f"known: {', '.join(self.models)}"
            raise ConfigError(f"no policy {quoted(name)} under models; {fix}")
        model = self.models[name]
        algorithm = model.algorithm or self.algorithm
        return PolicyConfig(
            name=name,
            model=model,
            algorithm=algorithm,
            training=model.training or self.training,
            sampling=self.sampling,
            rules=effective_rules(
                model.dataflow.rules if model.dataflow else (),
                self.dataflow.rules,
                PRESETS[algorithm.name].rules,
            ),
        )


def _with_inherited_keys(entry: Any, whole: Mapping[str, Any]) -> Any:
    """A model's entry with the keys that its own sections leave out."""
    if not isinstance(entry, Mapping):
        return entry
    completed = dict(cast(Mapping[str, Any], entry))
    for section in ("algorithm", "training"):
        own, shared = completed.get(section), whole.get(section)
        if isinstance(shared, Section):
            shared = shared.model_dump()
        if isinstance(own, Mapping) and isinstance(shared, Mapping):
            completed[section] = {**cast(Mapping[str, Any], shared), **cast(Mapping[str, Any], own)}
    return completed | _own_minibatches(completed, whole)


def _own_minibatches(entry: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's own training where its own algorithm stands for other mini-batches than the shared
    one does, or where it has own training anyway."""
    sections = {name: entry.get(name) or whole.get(name) for name in ("algorithm", "training")}
    own, shared = (with_minibatches(given).get("training") for given in (sections, whole))
    return {"training": own} if entry.get("training") or own != shared else {}
