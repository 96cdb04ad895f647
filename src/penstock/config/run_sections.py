# SPDX-License-Identifier: Apache-2.0
"""The sections of a run file, and the settings of one policy.

Owns the shape of run.yaml, each section valid by itself. Whether the sections fit together is
checked in `run`. Plain data: reads no file, imports no user code and builds nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from penstock.config.algorithms import AlgorithmConfig, with_minibatches
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.base import NAME, Name, Section, non_blank
from penstock.config.dataflow import DataflowConfig
from penstock.config.evaluation import EvalConfig
from penstock.config.harbor import harbor_workflow
from penstock.config.hosts import HostConfig, HostName, expanded
from penstock.config.launchers import RayConfig, SshConfig
from penstock.config.limits import BudgetConfig, StallConfig
from penstock.config.models import ModelConfig
from penstock.config.network import NetworkConfig
from penstock.config.pipeline import PipelineConfig
from penstock.config.prompts import Prompts
from penstock.config.roles import Roles
from penstock.config.rules import RuleConfig, effective_rules
from penstock.config.sandbox import SandboxConfig
from penstock.config.sources import (
    CommandWorkflow,
    SourceConfig,
    WorkflowConfig,
    workflow_name,
)
from penstock.config.stages import PipelineStageConfig, StageConfig
from penstock.config.tools import ToolServerConfig
from penstock.config.trackers import TrackerName
from penstock.config.trainer import SamplingConfig, TrainingConfig
from penstock.config.trust import SCORE_STAGE, AnyReward, RewardConfig, TrustConfig
from penstock.config.weights import WeightsConfig
from penstock.errors import ConfigError
from penstock.options import at_most, non_empty
from penstock.plugins import quoted, unknown

MAX_POLICIES = 128


def _run_name(value: str) -> str:
    if not all(NAME.fullmatch(part) for part in value.split(".")) or len(value) > 100:
        raise ValueError(
            f"{quoted(value)} is not a valid run name (it names the run folder); use up to 100 "
            "letters, digits, _, - and single dots, starting with a letter or digit"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The effective settings of one policy."""

    name: str
    model: ModelConfig
    """Its entry in the file."""
    algorithm: AlgorithmConfig
    training: TrainingConfig
    sampling: SamplingConfig
    rules: tuple[RuleConfig, ...]
    """Its effective rules, hook by hook, defaults included."""


def _launcher(value: object) -> object:
    if value in ("kubernetes", "slurm"):
        raise ValueError(
            f"{quoted(value)} is not a launcher: the files in deploy/{value} start `penstock run` "
            "there; use local, ray or ssh"
        )
    return value


class RunSections(Section):
    """All sections of a run file, each valid by itself."""

    name: Annotated[str, AfterValidator(_run_name)]
    """Names the run and its folder."""
    output_dir: Annotated[str, AfterValidator(non_blank)] = "outputs"
    """Folder of the run folders; relative to the working directory."""
    launcher: Annotated[Literal["local", "ray", "ssh"], BeforeValidator(_launcher)] = "local"
    """What starts the processes: `local` on this machine, `ray` on a Ray cluster, `ssh` on the
    machines under `hosts`. The dataflow service and the weight server stay on this machine."""
    ray: RayConfig = RayConfig()
    """The cluster of `launcher: ray`."""
    ssh: SshConfig = SshConfig()
    """The connections of `launcher: ssh`."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seeds everything random in the run."""
    deterministic: bool = False
    """Make the run a function of config and data, with crashes, on any number of nodes: batches
    in order of issue, always max_staleness versions old, one answer at a time in each engine.
    Slow."""
    models: Annotated[Mapping[Name, ModelConfig], non_empty(), at_most(MAX_POLICIES)]
    """One entry per policy."""
    roles: Roles = Field(default_factory=dict[str, str])
    """Policy by role, such as {solver: big, verifier: small}; a policy's own name is a role too."""
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False), non_empty()]
    """Where tasks come from."""
    workflow: WorkflowConfig = "single_turn"
    """What attempts a task, for every source without another."""
    prompts: Prompts = Field(default_factory=dict[str, Any])
    """Files of prompt templates for `ctx.prompt`, such as {solver: prompts/solver.txt}."""
    reward: AnyReward | None = None
    """What scores a trajectory, for every source without another; null if the workflow does. A
    function alone, or a mapping that also says where."""
    trust: TrustConfig = TrustConfig()
    """Nodes of other people, and how their rows are checked."""
    dataflow: DataflowConfig = DataflowConfig()
    """The service between nodes and trainers: stores, leases, rules, bounds."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled, for every source without its own."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The algorithm of every policy without another."""
    training: TrainingConfig
    """The training of every policy without another."""
    weights: WeightsConfig = WeightsConfig()
    """How weights reach the nodes."""
    network: NetworkConfig = NetworkConfig()
    """Where the services listen, and how other hosts reach them."""
    hosts: Mapping[HostName, HostConfig] = Field(default_factory=dict[str, HostConfig])
    """Machines by name, such as {"gpu[0-7]": {devices: 8, memory_gb: 80}}; empty: this one, with
    the devices it has, and plans are not checked for tags and memory."""
    autoscale: AutoscaleConfig = AutoscaleConfig()
    """How the rollout pool grows and shrinks while the run runs."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where rewards, workflow commands and tools run, and what they may reach."""
    tools: Mapping[Name, ToolServerConfig] = Field(default_factory=dict[str, ToolServerConfig])
    """Servers whose tools a workflow finds in `ctx.tools`, by name."""
    pipeline: PipelineConfig | None = None
    """What trainers do with a batch, as a graph of stages; null: the algorithm's graph."""
    eval: EvalConfig | None = None
    """Evaluations during training; null: none."""
    stall: StallConfig = StallConfig()
    """When a run counts as stalled, and what happens then."""
    budget: BudgetConfig = BudgetConfig()
    """What the run may use; then it ends with a checkpoint."""
    report_to: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Trackers in addition to metrics.jsonl: trackio, wandb, tensorboard, mlflow, or your own;
    opentelemetry gets a trace of each rollout instead of metrics."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fill in what follows from other sections: each policy inherits algorithm and training,
        each source sampling, and each service of the pipeline is a stage of the dataflow."""
        if not isinstance(data, Mapping):
            return data
        entries = cast(Mapping[str, Any], data)
        written = {
            key: value.model_dump() if isinstance(value, Section) else value
            for key, value in entries.items()
        }
        run_file = _with_service_stages(with_minibatches(written))
        models = run_file.get("models")
        if isinstance(models, Mapping):
            run_file["models"] = {
                name: _with_inherited_keys(entry, written)
                for name, entry in cast(Mapping[str, Any], models).items()
            }
        if isinstance(sources := run_file.get("sources"), list | tuple):
            entries = cast(Sequence[Any], sources)
            run_file["sources"] = [_with_shared_keys(one, run_file, "sampling") for one in entries]
        return run_file

    @property
    def trained(self) -> Mapping[str, ModelConfig]:
        """The policies that have a trainer."""
        return {name: model for name, model in self.models.items() if not model.frozen}

    @property
    def all_hosts(self) -> Mapping[str, HostConfig]:
        """Each host under its own name, ranges written out, in the order of the file."""
        return expanded(self.hosts)

    def num_ranks_of(self, policy: str) -> int:
        """Ranks of the trainer of this policy."""
        own = self.pipeline.of_policy(policy) if self.pipeline else ()
        ranks = [stage.parallel.num_ranks for stage in own if not stage.is_service]
        return max(ranks, default=self.for_policy(policy).training.parallel.num_ranks)

    def policies_of(self, source: SourceConfig) -> tuple[str, ...]:
        """Policies that the workflow of this source may call."""
        return tuple(self.models) if source.policies is None else source.policies

    def served_with(self, policy: str) -> tuple[str, ...]:
        """Policies that nodes of this one serve: all that share a source with it. Empty for all
        of the run."""
        called = [self.policies_of(source) for source in self.sources]
        shared = {name for names in called if policy in names for name in names}
        served = tuple(name for name in self.models if name in shared)
        return () if len(served) == len(self.models) else served

    @property
    def session_source(self) -> SourceConfig | None:
        """The source of sessions of external agents, if there is one."""
        return next((source for source in self.sources if source.session is not None), None)

    def workflow_of(self, source: SourceConfig) -> WorkflowConfig:
        """What attempts the tasks of this source."""
        found = source.workflow or self.workflow
        if source.harbor is not None:
            return harbor_workflow(found.command if isinstance(found, CommandWorkflow) else ())
        return found

    def workflow_name_of(self, source: SourceConfig) -> str:
        """The name of what attempts the tasks of this source; empty for a command."""
        return workflow_name(self.workflow_of(source))

    def reward_of(self, source: SourceConfig) -> str | None:
        """What scores the trajectories of this source; None if the workflow or a stage does, or
        the agents, or the verifier of a Harbor task."""
        if source.session is not None or source.harbor is not None:
            return None
        return source.reward or self.reward_function

    @property
    def reward_function(self) -> str | None:
        """What scores the trajectories of every source without another."""
        return self.reward.fn if isinstance(self.reward, RewardConfig) else self.reward

    @property
    def has_score_stage(self) -> bool:
        """Whether the built-in stage computes rewards: all, or the rewards of untrusted nodes."""
        return any(stage.name == SCORE_STAGE for stage in self.dataflow.stages)

    @property
    def is_scored_by_nodes(self) -> bool:
        """Whether trusted nodes deliver rows with a reward."""
        if isinstance(self.reward, RewardConfig) and self.reward.at == "stage":
            return False
        stages = (stage for stage in self.dataflow.stages if stage.name != SCORE_STAGE)
        return not any("reward" in stage.writes for stage in stages)

    @property
    def evaluated(self) -> str | None:
        """The policy that is evaluated; None without evaluations."""
        if self.eval is None:
            return None
        return self.eval.policy or next(iter(self.trained))

    def source_like(self, policy: str) -> SourceConfig:
        """The first source with tasks that calls this policy: an evaluation uses its workflow
        and its policies."""
        callers = [source for source in self.sources if policy in self.policies_of(source)]
        return next(source for source in callers if source.session is None)

    def sampling_of(self, source: SourceConfig) -> SamplingConfig:
        """How the turns of this source are sampled."""
        return source.sampling or self.sampling

    def for_policy(self, name: str) -> PolicyConfig:
        """The settings of this policy: its own where it has any, else the shared ones."""
        if name not in self.models:
            raise ConfigError(unknown("policy", name, self.models))
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
                algorithm.declaration.rules,
            ),
        )


def _with_inherited_keys(entry: Any, run_file: Mapping[str, Any]) -> Any:
    """A model's entry, completed with the keys that its own sections leave out."""
    completed = _with_shared_keys(entry, run_file, "algorithm", "training")
    if not isinstance(completed, dict):
        return completed
    own = cast(dict[str, Any], completed)
    return own | _own_minibatches(own, run_file)


def _with_shared_keys(entry: Any, run_file: Mapping[str, Any], *sections: str) -> Any:
    """An entry of the run file; its own sections get the keys that only the shared ones have."""
    if not isinstance(entry, Mapping):
        return entry
    completed = dict(cast(Mapping[str, Any], entry))
    for section in sections:
        own, shared = completed.get(section), run_file.get(section)
        if isinstance(own, Mapping) and isinstance(shared, Mapping):
            completed[section] = {**cast(Mapping[str, Any], shared), **cast(Mapping[str, Any], own)}
    return completed


def _own_minibatches(entry: Mapping[str, Any], run_file: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's own training, if it has any or if its algorithm has another default number of
    minibatches than the shared one."""
    sections = {name: entry.get(name) or run_file.get(name) for name in ("algorithm", "training")}
    own, shared = (with_minibatches(given).get("training") for given in (sections, run_file))
    return {"training": own} if entry.get("training") or own != shared else {}


def _with_service_stages(run_file: Mapping[str, Any]) -> dict[str, Any]:
    """The run file as written, with every service of the pipeline added to `dataflow.stages`.

    An entry that the file has there wins, so it can set deadlines. Reports no mistakes: an entry
    that is not valid is left to the section that declares it."""
    completed = dict(run_file)
    section: object = run_file.get("dataflow", {})
    if not isinstance(section, Mapping):
        return completed  # not valid; the section says so
    dataflow = cast(Mapping[str, Any], section)
    if not isinstance(dataflow.get("stages", ()), list | tuple):
        return completed
    written = [*cast(Sequence[object], dataflow.get("stages", ()))]
    names = {_name(entry) for entry in written}
    services = [stage for stage in _services(run_file.get("pipeline")) if stage.name not in names]
    if _needs_score_stage(run_file) and SCORE_STAGE not in names:
        services.append(StageConfig(name=SCORE_STAGE, reads=("turns",), writes=("reward",)))
    if services:
        completed["dataflow"] = {**dataflow, "stages": [*written, *services]}
    return completed


def _needs_score_stage(run_file: Mapping[str, Any]) -> bool:
    """Whether rewards are computed on the trusted side, of all nodes or of untrusted ones."""
    reward, trust = (_mapping(run_file.get(key)) for key in ("reward", "trust"))
    accepts = trust.get("accept_untrusted") is True and run_file.get("reward") is not None
    return accepts or reward.get("at") == "stage"


def _mapping(entry: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], entry) if isinstance(entry, Mapping) else {}


def _services(pipeline: object) -> Iterator[StageConfig]:
    is_mapping = isinstance(pipeline, Mapping)
    stages = cast(Mapping[str, object], pipeline).get("stages") if is_mapping else None
    for entry in cast(Sequence[object], stages) if isinstance(stages, list | tuple) else ():
        try:
            stage = PipelineStageConfig.model_validate(entry)
        except ValidationError:
            continue
        if stage.is_service and stage.writes:
            yield stage.to_stage_config()


def _name(entry: object) -> object:
    if isinstance(entry, StageConfig):
        return entry.name
    return cast(Mapping[str, object], entry).get("name") if isinstance(entry, Mapping) else None
