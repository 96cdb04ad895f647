# SPDX-License-Identifier: Apache-2.0
"""Contradictions between sections of the run file, and references to unknown names.

Owns the checks that need more than one section. Sets no default and changes no value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.config.base import repeated_names
from penstock.config.builtin_stages import STAGE_FUNCTIONS_MODULE
from penstock.config.dataflow import SurvivorsClosing
from penstock.config.evaluation_checks import evaluation_checks
from penstock.config.host_checks import host_contradictions
from penstock.config.models import is_reproducible, records_experts, serves_adapters
from penstock.config.pipeline_cross_checks import (
    group_comparer,
    pipeline_cross_checks,
    row_stage_checks,
    row_stages,
)
from penstock.config.policy_checks import policy_contradictions
from penstock.config.rank_hosts import rank_host_contradictions
from penstock.config.roles import role_contradictions
from penstock.config.rules import RuleConfig
from penstock.config.run_sections import PolicyConfig, RunSections
from penstock.config.sources import SELF_SCORED, WORKFLOWS, NamedWorkflow
from penstock.config.stream_checks import stream_checks
from penstock.config.trainer import SamplingConfig
from penstock.config.trust import SCORE_STAGE
from penstock.options import Contradiction, KeyPath
from penstock.plugins import unknown
from penstock.types import Hook

VLLM_TEMPERATURE_RANGE = (0.01, 2.0)
"""vLLM silently raises lower temperatures to the minimum and rejects higher ones."""


def cross_checks(config: RunSections) -> Iterator[Contradiction]:
    """Every contradiction between sections."""
    yield from repeated_names("source", [source.name for source in config.sources], "sources")
    yield from role_contradictions(config.roles, config.models)
    yield from policy_contradictions(config)
    yield from host_contradictions(config)
    yield from rank_host_contradictions(config)
    yield from _temperatures(config)
    yield from row_stage_checks(config)
    yield from dict.fromkeys(_groups_too_small(config))
    yield from _groups_that_cannot_close(config)
    yield from _unknown_pace_policy(config)
    yield from _unknown_names_in_rules(config)
    yield from _replay_without_staleness(config)
    yield from _duplicate_reward(config)
    yield from _missing_reward(config)
    yield from _unscored_strangers(config)
    yield from _kept_kv(config)
    yield from _prompts_to_count(config)
    yield from _unused_environments(config)
    yield from _sessions(config)
    yield from _unknown_tools(config)
    yield from _determinism(config)
    yield from _lag_without_partner(config)
    yield from _unlimited_scaling(config)
    yield from evaluation_checks(config)
    yield from _router_replay(config)
    yield from _lora(config)
    yield from pipeline_cross_checks(config)
    yield from dict.fromkeys(stream_checks(config))


def _unknown_tools(config: RunSections) -> Iterator[Contradiction]:
    for index, source in enumerate(config.sources):
        for name in source.tools or ():
            if name not in config.tools:
                text = unknown("tool server", name, config.tools)
                yield Contradiction(text=text, keys=(("sources", index, "tools"),))


def _temperatures(config: RunSections) -> Iterator[Contradiction]:
    least, most = VLLM_TEMPERATURE_RANGE
    if not any(model.engine == "vllm" for model in config.models.values()):
        return
    written: dict[KeyPath, SamplingConfig | None] = {("sampling",): config.sampling}
    written |= {("sources", i, "sampling"): one.sampling for i, one in enumerate(config.sources)}
    for at, sampling in written.items():
        if sampling is not None and not least <= sampling.temperature <= most:
            yield Contradiction(
                text=f"temperature {sampling.temperature:g}: vLLM samples from {least:g} to "
                f"{most:g}; choose a value in this range, or another engine",
                keys=((*at, "temperature"), ("sampling", "temperature")),
            )


def _determinism(config: RunSections) -> Iterator[Contradiction]:
    """Settings that would make a deterministic run depend on timing."""
    if not config.deterministic:
        return
    at: KeyPath = ("deterministic",)
    for name, model in config.models.items():
        if not is_reproducible(model.engine):
            text = f"engine {model.engine} of {name} is not deterministic; use hf or scripted"
            yield Contradiction(text=text, keys=(("models", name, "engine"), at))
    if len(config.models) > 1 or config.dataflow.partitions > 1:
        text = "a deterministic run has one policy and one partition; remove deterministic"
        yield Contradiction(text=text, keys=(at,))
    if config.session_source is not None:
        text = "external agents connect at any time; remove deterministic"
        yield Contradiction(text=text, keys=(at,))
    for source in config.sources:
        workflow = config.workflow_of(source)
        if isinstance(workflow, NamedWorkflow) and workflow.options.get("memory") == "source":
            text = "notes of other tasks depend on the order of attempts; use memory: task"
            yield Contradiction(text=text, keys=(at, ("workflow",)))
    for name in config.trained:
        for rule in config.for_policy(name).rules:
            if rule.hook in (Hook.ADMIT, Hook.CURATE, Hook.REPLAY) and rule.name != "all":
                text = f"{rule.hook} {rule.name} depends on the order of arrival; remove it"
                yield Contradiction(text=text, keys=(at,))


def _unlimited_scaling(config: RunSections) -> Iterator[Contradiction]:
    """Waits have other causes than too few nodes, and nodes cost money."""
    scaling = config.autoscale
    is_bounded = all(one.max_nodes is not None for one in scaling.node_types.values())
    if scaling.mode == "act" and config.dataflow.report.max_gpus is None and not is_bounded:
        text = "mode act without a limit could start any number of nodes; set "
        text += "dataflow.report.max_gpus, or max_nodes of every node type"
        yield Contradiction(text=text, keys=(("autoscale", "mode"),))


def _lag_without_partner(config: RunSections) -> Iterator[Contradiction]:
    if config.dataflow.max_partner_lag is not None and len(config.trained) == 1:
        text = "max_partner_lag bounds the age of other policies' tokens, and this run trains one "
        text += "policy; remove it"
        yield Contradiction(text=text, keys=(("dataflow", "max_partner_lag"),))


def _groups_too_small(config: RunSections) -> Iterator[Contradiction]:
    """Settings without a learning signal if each task is attempted once."""
    for name, model in config.trained.items():
        policy = config.for_policy(name)
        num_generations = policy.algorithm.num_generations
        if num_generations > 1:
            continue
        at: KeyPath = ("models", name, "algorithm") if model.algorithm else ("algorithm",)
        text = ""
        if who := group_comparer(config, name):
            text = f"{who} needs at least two generations per group, got {num_generations}; "
            text += "set num_generations >= 2"
        elif _requires_reward_spread(policy):
            text = f"reward-spread needs at least two generations per group, got {num_generations}"
            text += "; set num_generations >= 2, or remove the rule (admit: all)"
        if text:
            keys = ((*at, "num_generations"), ("algorithm", "num_generations"))
            yield Contradiction(text=text, keys=keys)


def _requires_reward_spread(policy: PolicyConfig) -> bool:
    return any(rule.hook is Hook.ADMIT and rule.name == "reward-spread" for rule in policy.rules)


def _groups_that_cannot_close(config: RunSections) -> Iterator[Contradiction]:
    closing = config.dataflow.closing
    if not isinstance(closing, SurvivorsClosing):
        return
    at: KeyPath = ("dataflow", "closing")
    for name in config.trained:
        num_generations = config.for_policy(name).algorithm.num_generations
        if closing.survivors.min > num_generations:
            yield Contradiction(
                text=f"survivors min {closing.survivors.min} is more than the "
                f"{num_generations} members of a group of policy {name}; "
                f"set min <= {num_generations} or raise num_generations",
                keys=((*at, "survivors", "min"), at, ("algorithm", "num_generations")),
            )


def _unknown_pace_policy(config: RunSections) -> Iterator[Contradiction]:
    known = ("any", "all", *config.trained)
    if config.dataflow.pace not in known:
        yield _unknown("policy", config.dataflow.pace, known, ("dataflow", "pace"))


def _unknown(kind: str, name: str, known: Iterable[str], at: KeyPath) -> Contradiction:
    return Contradiction(text=unknown(kind, name, known), keys=(at, at[:-1]))


def _written_rules(config: RunSections) -> Iterator[tuple[KeyPath, RuleConfig]]:
    for index, rule in enumerate(config.dataflow.rules):
        yield ("dataflow", "rules", index), rule
    for name, model in config.models.items():
        for index, rule in enumerate(model.dataflow.rules if model.dataflow else ()):
            yield ("models", name, "dataflow", "rules", index), rule


def _unknown_names_in_rules(config: RunSections) -> Iterator[Contradiction]:
    """Unknown policies and sources in options of built-in rules."""
    sources = [source.name for source in config.sources]
    for at, rule in _written_rules(config):
        options = rule.options if rule.is_builtin else {}
        for name in options.get("difficulty") or ():
            if name not in sources:
                yield _unknown("source", name, sources, (*at, "difficulty", name))
        for option in ("roles", "turns_of"):
            for name in options.get(option, ()):
                if name not in config.models:
                    yield _unknown("policy", name, config.models, (*at, option, name))
        for trained, sampled in options.get("turns_of", {}).items():
            for index, name in enumerate(sampled):
                if name not in config.models:
                    place = (*at, "turns_of", trained, index)
                    yield _unknown("policy", name, config.models, place)


def _replay_without_staleness(config: RunSections) -> Iterator[Contradiction]:
    for name in config.trained:
        policy = config.for_policy(name)
        for rule in policy.rules:
            is_replay = rule.hook is Hook.REPLAY and rule.is_builtin
            if not is_replay or (rule.options["max_staleness"] or policy.training.max_staleness):
                continue
            at = next(path for path, written in _written_rules(config) if written == rule)
            yield Contradiction(
                text=f"policy {name} has max_staleness 0, so nothing can be replayed; "
                "set max_staleness >= 1 in training or in this rule, or delete the rule",
                keys=(at,),
            )


def _duplicate_reward(config: RunSections) -> Iterator[Contradiction]:
    used = next(filter(None, map(config.reward_of, config.sources)), config.reward_function)
    for at, stage in row_stages(config):
        if used is not None and "reward" in stage.writes and stage.name != SCORE_STAGE:
            yield Contradiction(
                text=f"stage {stage.name} writes reward, but the nodes already score with "
                f"{used}; set reward: null, or remove reward from writes",
                keys=((*at, "writes"), at, ("reward",)),
            )


def _missing_reward(config: RunSections) -> Iterator[Contradiction]:
    """Sources whose every attempt would fail, next to others with a reward: most built-in workflows
    give none themselves. `check` runs the workflow, and so finds a run without any."""
    if not any(source.reward for source in config.sources):
        return
    for index, source in enumerate(config.sources):
        name = config.workflow_name_of(source)
        is_unscored = name in WORKFLOWS and name not in SELF_SCORED and source.session is None
        if is_unscored and source.env is None and config.reward_of(source) is None:
            yield Contradiction(
                text=f"source {source.name} has no reward, and workflow {name} gives none itself; "
                "set reward: module:function for the run or for this source",
                keys=(("sources", index, "reward"), ("sources", index), ("reward",)),
            )


def _unscored_strangers(config: RunSections) -> Iterator[Contradiction]:
    """A reward that only the workflow knows is the node's own word."""
    if config.trust.accept_untrusted and config.is_scored_by_nodes and not config.has_score_stage:
        yield Contradiction(
            text="rewards of untrusted nodes are computed on the trusted side, and this run has no "
            "reward function; set reward: module:function, or accept_untrusted: false",
            keys=(("trust", "accept_untrusted"), ("reward",)),
        )


def _kept_kv(config: RunSections) -> Iterator[Contradiction]:
    """Log-probs under old keys and values cannot be computed again from the record."""
    for name, model in config.models.items():
        if model.kv == "drop":
            continue
        at: KeyPath = ("models", name, "kv")
        if config.trust.accept_untrusted:
            text = "answers of untrusted nodes are checked by computing them again, which kept "
            text += "keys and values prevent; set kv: drop, or accept_untrusted: false"
            yield Contradiction(text=text, keys=(at, ("trust", "accept_untrusted")))
        if config.deterministic:
            text = "with kept keys and values an answer depends on when weights were loaded; set "
            yield Contradiction(text=f"{text}kv: drop", keys=(at, ("deterministic",)))


def _prompts_to_count(config: RunSections) -> Iterator[Contradiction]:
    """`max_prompt_tokens` counts what single_turn renders; only its author knows what another
    workflow sends."""
    for index, source in enumerate(config.sources):
        is_counted = source.data is not None and source.data.max_prompt_tokens is not None
        if is_counted and config.workflow_name_of(source) != "single_turn":
            yield Contradiction(
                text="max_prompt_tokens counts the prompts of workflow single_turn, and source "
                f"{source.name} has another; remove it",
                keys=(("sources", index, "data", "max_prompt_tokens"),),
            )


def _unused_environments(config: RunSections) -> Iterator[Contradiction]:
    for index, source in enumerate(config.sources):
        if source.env is not None and config.workflow_of(source) == "single_turn":
            yield Contradiction(
                text=f"source {source.name} has an environment, and workflow single_turn never "
                "calls it; set workflow: env_loop, or a custom one that uses ctx.env",
                keys=(("sources", index, "workflow"), ("sources", index, "env"), ("workflow",)),
            )


def _sessions(config: RunSections) -> Iterator[Contradiction]:
    """Settings that do not work with sessions: groups of one with late, external rewards."""
    found = [i for i, source in enumerate(config.sources) if source.session is not None]
    if not found:
        return
    at: KeyPath = ("sources", found[0], "session")
    if len(found) > 1:
        yield Contradiction(
            text="a run can have one source of sessions; remove the others",
            keys=(("sources", found[1], "session"),),
        )
    yield from _session_groups(config, at)
    for name in ("schedule_to_start_s", "schedule_to_close_s"):
        if getattr(config.dataflow.lease, name) is not None:
            yield Contradiction(
                text=f"external agents start and end sessions at any time, so {name} would end "
                "sessions that are not late; set it to null",
                keys=(("dataflow", "lease", name), at),
            )
    for place, stage in row_stages(config):
        if "reward" in stage.writes:
            yield Contradiction(
                text=f"stage {stage.name} writes reward, but sessions get their reward through the "
                "gateway; remove reward from writes",
                keys=((*place, "writes"), at),
            )


def _session_groups(config: RunSections, at: KeyPath) -> Iterator[Contradiction]:
    """Settings that need groups of more than one."""
    for name in config.trained:
        policy = config.for_policy(name)
        if who := group_comparer(config, name):
            fix = "set algorithm.name: reinforce"
            if who.startswith("stage "):
                fix = f"give it fn: {STAGE_FUNCTIONS_MODULE}:batch_advantage"
            yield Contradiction(
                text=f"{who} compares the members of a group, but a session is a group of one: "
                f"policy {name} would not learn from it; {fix}",
                keys=(at, ("algorithm", "name")),
            )
        if _requires_reward_spread(policy):
            yield Contradiction(
                text=f"reward-spread drops groups with a uniform reward, but a session is a group "
                f"of one: policy {name} would never train on it; remove the rule",
                keys=(at,),
            )
    if isinstance(config.dataflow.closing, SurvivorsClosing):
        yield Contradiction(
            text="survivors needs several successful members, but a session is a group of one; "
            "set closing: complete",
            keys=(("dataflow", "closing"), at),
        )


def _router_replay(config: RunSections) -> Iterator[Contradiction]:
    """Only some engines record the experts that they chose."""
    for name, model in config.models.items():
        if config.for_policy(name).training.router_replay and not records_experts(model.engine):
            section = ("models", name, "training") if model.training else ("training",)
            yield Contradiction(
                text=f"engine {model.engine} does not record the experts that it chose, so there "
                "is nothing to replay; use hf or vllm, or set router_replay: false",
                keys=((*section, "router_replay"), ("models", name, "engine")),
            )


def _lora(config: RunSections) -> Iterator[Contradiction]:
    """Settings that do not work with an adapter."""
    for name, model in config.models.items():
        if model.lora is None:
            continue
        at: KeyPath = ("models", name, "lora")
        if not serves_adapters(model.engine):
            yield Contradiction(
                text=f"engine {model.engine} does not support adapters yet; use hf or vllm, or "
                "remove lora",
                keys=(("models", name, "engine"), at),
            )
