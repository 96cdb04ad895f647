# SPDX-License-Identifier: Apache-2.0
"""Which policies the sources call, and which of them are trained: contradictions between the two.

Owns the checks of `sources[].policies`, `models.*.frozen` and versions of this run as `init`. Sets
no default."""

from collections.abc import Iterator

from penstock.config.models import own_version
from penstock.config.run_sections import RunSections
from penstock.options import Contradiction
from penstock.plugins import unknown


def policy_contradictions(config: RunSections) -> Iterator[Contradiction]:
    """Runs without anything to train, and policies that no source, or no run, has."""
    if not config.trained:
        text = "every policy is frozen, so there is nothing to train; remove frozen from one"
        yield Contradiction(text=text, keys=(("models", next(iter(config.models)), "frozen"),))
        return
    for index, source in enumerate(config.sources):
        for position, policy in enumerate(source.policies or ()):
            if policy not in config.models:
                text = unknown("policy", policy, config.models)
                yield Contradiction(text=text, keys=(("sources", index, "policies", position),))
        if not config.trained.keys() & {*config.policies_of(source)}:
            text = f"source {source.name} has no policy in training; add one of "
            text += f"{', '.join(config.trained)} to policies"
            yield Contradiction(text=text, keys=(("sources", index, "policies"),))
    for policy, model in config.models.items():
        if (own := own_version(model.init)) and own[0] not in config.trained:
            text = unknown("policy in training", own[0], config.trained)
            yield Contradiction(text=text, keys=(("models", policy, "init"),))
    called = {policy for source in config.sources for policy in config.policies_of(source)}
    for policy in config.models.keys() - called:
        text = f"no source has policy {policy} under policies, so nothing would call it; add "
        text += "it to one, or remove the policy"
        yield Contradiction(text=text, keys=(("models", policy),))
