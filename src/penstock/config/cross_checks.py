# SPDX-License-Identifier: Apache-2.0
"""Contradictions between sections of the run file, and names that point at nothing.

Owns what no section can see alone. Holds no default and changes no value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.config.base import Contradiction, KeyPath, did_you_mean, shown
from penstock.config.builtin_stages import CREDITS
from penstock.config.dataflow import SurvivorsClosing
from penstock.config.lora import lora_crossings
from penstock.config.pipeline_cross_checks import compared_by, ledger_stages, pipeline_crossings
from penstock.config.rule_options import Hook
from penstock.config.rules import RuleConfig

if TYPE_CHECKING:
    from penstock.config.run import PolicyConfig, RunConfig


def crossings(config: RunConfig) -> Iterator[Contradiction]:
    """Everything that two sections cannot say together."""
    yield from dict.fromkeys(_nothing_to_compare(config))
    yield from _groups_that_cannot_close(config)
    yield from _unknown_pace(config)
    yield from _unknown_names_in_rules(config)
    yield from _replay_of_nothing(config)
    yield from _two_rewards(config)
    yield from _sessions(config)
    yield from _determinism(config)
    yield from lora_crossings(config)
    yield from pipeline_crossings(config)


def _determinism(config: RunConfig) -> Iterator[Contradiction]:
    """What would make a deterministic run depend on who is fast."""
    if not config.deterministic:
        return
    at: KeyPath = ("deterministic",)
    for name, model in config.models.items():
        if model.engine not in ("hf", "scripted"):
            text = f"engine {model.engine} of {name} promises no bits; use hf or scripted"
            yield Contradiction(text=text, keys=(("models", name, "engine"), at))
    if len(config.models) > 1 or config.dataflow.partitions > 1:
        text = "a deterministic run has one policy and one partition; leave deterministic out"
        yield Contradiction(text=text, keys=(at,))
    if config.session_source is not None:
        text = "agents from outside come when they like; leave deterministic out"
        yield Contradiction(text=text, keys=(at,))
    for name in config.models:
        for rule in config.for_policy(name).rules:
            if rule.hook in (Hook.ADMIT, Hook.CURATE, Hook.REPLAY) and rule.name != "all":
                text = f"{rule.hook} {rule.name} decides by what came so far; leave it out"
                yield Contradiction(text=text, keys=(at,))


def _nothing_to_compare(config: RunConfig) -> Iterator[Contradiction]:
    """What teaches nothing where each task is attempted once."""
    for name, model in config.models.items():
        policy = config.for_policy(name)
        num_generations = policy.algorithm.num_generations
        if num_generations > 1:
            continue
        at: KeyPath = ("models", name, "algorithm") if model.algorithm else ("algorithm",)
        text = ""
        if who := compared_by(config, name):
            text = f"{who} compares the members of a group, and a group of {num_generations} has "
            text += "none to compare; set num_generations >= 2"
        elif _drops_without_spread(policy):
            text = f"reward-spread drops every group without spread, and one of {num_generations} "
            text += "has none; set num_generations >= 2, or take the rule out (admit: all)"
        if text:
            keys = ((*at, "num_generations"), ("algorithm", "num_generations"))
            yield Contradiction(text=text, keys=keys)


def _drops_without_spread(policy: PolicyConfig) -> bool:
    return any(rule.hook is Hook.ADMIT and rule.name == "reward-spread" for rule in policy.rules)


def _groups_that_cannot_close(config: RunConfig) -> Iterator[Contradiction]:
    closing = config.dataflow.closing
    if not isinstance(closing, SurvivorsClosing):
        return
    at: KeyPath = ("dataflow", "closing")
    for name in config.models:
        num_generations = config.for_policy(name).algorithm.num_generations
        if closing.survivors.min > num_generations:
            yield Contradiction(
                text=f"survivors min {closing.survivors.min} is more than the "
                f"{num_generations} members of a group of policy {name}; "
                f"set min <= {num_generations} or raise num_generations",
                keys=((*at, "survivors", "min"), at, ("algorithm", "num_generations")),
            )


def _unknown_pace(config: RunConfig) -> Iterator[Contradiction]:
    known = ("any", "all", *config.models)
    if config.dataflow.pace not in known:
        yield _unknown("policy", config.dataflow.pace, known, ("dataflow", "pace"))


def _unknown(kind: str, name: str, known: Iterable[str], at: KeyPath) -> Contradiction:
    listed = tuple(known)
    near = did_you_mean(name, listed)
    cure = f'did you mean "{near}"?' if near else f"use {' | '.join(listed)}"
    return Contradiction(text=f"there is no {kind} {shown(name)}; {cure}", keys=(at, at[:-1]))


def _written_rules(config: RunConfig) -> Iterator[tuple[KeyPath, RuleConfig]]:
    for index, rule in enumerate(config.dataflow.rules):
        yield ("dataflow", "rules", index), rule
    for name, model in config.models.items():
        for index, rule in enumerate(model.dataflow.rules if model.dataflow else ()):
            yield ("models", name, "dataflow", "rules", index), rule


def _unknown_names_in_rules(config: RunConfig) -> Iterator[Contradiction]:
    """Policies and sources that options of shipped rules speak of."""
    sources = [source.name for source in config.sources]
    for at, rule in _written_rules(config):
        options = rule.options if rule.is_shipped else {}
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


def _replay_of_nothing(config: RunConfig) -> Iterator[Contradiction]:
    for name in config.models:
        policy = config.for_policy(name)
        for rule in policy.rules:
            is_replay = rule.hook is Hook.REPLAY and rule.is_shipped
            if not is_replay or (rule.options["max_staleness"] or policy.training.max_staleness):
                continue
            at = next(path for path, written in _written_rules(config) if written == rule)
            yield Contradiction(
                text=f"policy {name} has max_staleness 0, so nothing it trained on may be served "
                "again; set max_staleness >= 1 in training or beside this rule, "
                "or delete the rule",
                keys=(at,),
            )


def _two_rewards(config: RunConfig) -> Iterator[Contradiction]:
    for at, stage in ledger_stages(config):
        if config.reward is not None and "reward" in stage.writes:
            yield Contradiction(
                text=f"stage {stage.name} writes reward, and the nodes score with "
                f"{config.reward} already; set reward: null, or take reward out of writes",
                keys=((*at, "writes"), at, ("reward",)),
            )


def _sessions(config: RunConfig) -> Iterator[Contradiction]:
    """What groups of one, whose reward comes from outside and late, cannot go with."""
    found = [i for i, source in enumerate(config.sources) if source.session is not None]
    if not found:
        return
    at: KeyPath = ("sources", found[0], "session")
    if len(found) > 1:
        yield Contradiction(
            text="a run has one source of sessions; take the others out",
            keys=(("sources", found[1], "session"),),
        )
    yield from _groups_of_one(config, at)
    for name in ("schedule_to_start_s", "schedule_to_close_s"):
        if getattr(config.dataflow.lease, name) is not None:
            yield Contradiction(
                text=f"sessions begin and end when their agents like, so {name} would end what "
                "nobody is late with; leave it null",
                keys=(("dataflow", "lease", name), at),
            )
    for place, stage in ledger_stages(config):
        if "reward" in stage.writes:
            yield Contradiction(
                text=f"stage {stage.name} writes reward, and that of a session comes through the "
                "gateway; take reward out of writes",
                keys=((*place, "writes"), at),
            )


def _groups_of_one(config: RunConfig, at: KeyPath) -> Iterator[Contradiction]:
    """A session has no fellows in its group."""
    for name in config.models:
        policy = config.for_policy(name)
        if who := compared_by(config, name):
            cure = "set algorithm.name: reinforce"
            if who.startswith("stage "):
                cure = f"give it fn: {CREDITS}:batch_advantage"
            yield Contradiction(
                text=f"{who} compares the members of a group, and a session is a group of one: "
                f"policy {name} would learn nothing from it; {cure}",
                keys=(at, ("algorithm", "name")),
            )
        if _drops_without_spread(policy):
            yield Contradiction(
                text=f"reward-spread drops every group without spread, and a session is a group "
                f"of one: policy {name} would never see it; take the rule out",
                keys=(at,),
            )
    if isinstance(config.dataflow.closing, SurvivorsClosing):
        yield Contradiction(
            text="survivors wants several good members, and a session is a group of one; "
            "set closing: complete",
            keys=(("dataflow", "closing"), at),
        )
