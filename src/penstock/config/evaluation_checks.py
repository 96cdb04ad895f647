# SPDX-License-Identifier: Apache-2.0
"""Contradictions between `eval` and the other sections of the run file. Changes no value."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.run_sections import RunSections
from penstock.options import Contradiction
from penstock.plugins import unknown

SERVED = ("vllm", "sglang")
"""Engines whose server fills its accelerator with one version."""


def evaluation_checks(config: RunSections) -> Iterator[Contradiction]:
    if config.eval is None:
        return
    policy = config.eval.policy
    if policy is not None and policy not in config.trained:
        what = f"policy {policy} is frozen; " if policy in config.models else ""
        text = what + unknown("trained policy", policy, config.trained)
        yield Contradiction(text=text, keys=(("eval", "policy"),))
        return
    if policy is None and len(config.trained) > 1:
        names = ", ".join(config.trained)
        text = f"this run trains {names}; name the one to evaluate with eval.policy"
        yield Contradiction(text=text, keys=(("eval",),))
        return
    yield from _source(config)
    yield from _engines(config)


def _source(config: RunSections) -> Iterator[Contradiction]:
    evaluated = config.eval and (config.eval.policy or next(iter(config.trained), None))
    callers = [s for s in config.sources if evaluated in config.policies_of(s)]
    if callers and all(source.session is not None for source in callers):
        text = "external agents attempt every task of this policy, so no workflow can answer the "
        text += "questions of a suite; evaluate it from outside, or add a source with tasks"
        yield Contradiction(text=text, keys=(("eval",),))


def _engines(config: RunSections) -> Iterator[Contradiction]:
    """An evaluation loads its version beside the newest one."""
    assert config.eval is not None
    for name, model in config.models.items():
        if model.engine_urls:
            text = f"the engine server of {name} holds one version, and an evaluation needs one "
            text += "beside the newest; let penstock start the engine, or remove eval"
            yield Contradiction(text=text, keys=(("eval",), ("models", name)))
        elif model.engine in SERVED and not config.eval.nodes:
            text = f"{model.engine} fills its accelerator with one version of {name}; start "
            text += "a separate node for evaluations with nodes: 1"
            yield Contradiction(text=text, keys=(("eval", "nodes"), ("eval",)))
