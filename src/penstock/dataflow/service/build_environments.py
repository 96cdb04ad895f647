# SPDX-License-Identifier: Apache-2.0
"""From `env:` of a source to what its nodes get. Owns what a bridge gets as its settings."""

from __future__ import annotations

from penstock.config.environments import EnvironmentConfig
from penstock.dataflow.service.nodes.messages import EnvironmentInfo


def environment_info(config: EnvironmentConfig | None) -> EnvironmentInfo | None:
    """What a node needs to know; None if there is none."""
    if config is None:
        return None
    return EnvironmentInfo(
        library=config.library,
        settings={
            "name": getattr(config, config.library) if config.library else "",
            "path": config.path,
            "options": dict(config.options),
            "actions": dict(config.actions),
            "action_field": config.action_field or "",
        },
        command=config.command or (),
        python=config.python or "",
        calls_model=config.calls_model or config.library == "verifiers",
        max_episodes=config.max_episodes,
        start_timeout_s=config.start_timeout_s,
        reset_timeout_s=config.reset_timeout_s,
        step_timeout_s=config.step_timeout_s,
        lease_s=config.lease_s,
        before_step=config.before_step or "",
        after_step=config.after_step or "",
    )
