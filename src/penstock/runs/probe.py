# SPDX-License-Identifier: Apache-2.0
"""The user's code, tried in a process of its own: what is asked of `probe`, and for how long."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.runs.probe_process import ProbeResult
    from penstock.runs.target import RunTarget
    from penstock.types import JsonObject

DEADLINE_S = 30.0
"""How long the user's modules may take to import and to answer once."""


def run_probe(target: RunTarget) -> ProbeResult:
    """The user's code, tried in a process of its own."""
    from penstock.runs.probe_process import ProbeRequest, ProbeResult
    from penstock.wire.codec import JSON, decode, encode_json

    config = target.config
    request = ProbeRequest(
        sources=[(s.name, s.task, s.limit) for s in config.sources if s.task],
        reward=config.reward or "",
        workflow=user_workflow(config.workflow),
        is_single_turn=config.workflow == "single_turn",
        stages=user_stages(config),
        seed=config.seed,
        python_path=[*target.python_path],
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.runs.probe_process"],
            input=encode_json(request),
            stdout=subprocess.PIPE,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(
            problems=[
                f"your task, reward, workflow or stages did not answer within {DEADLINE_S:.0f} s; "
                "a node would wait as long for each of them"
            ]
        )
    if done.returncode != 0:
        how = f"exit code {done.returncode}"
        return ProbeResult(
            problems=[f"your task, reward, workflow or stage ended its process ({how})"]
        )
    return decode(done.stdout, ProbeResult, media_type=JSON)


def user_stages(config: RunConfig) -> list[JsonObject]:
    """Stages of the user's pipeline that run a function, theirs or ours."""
    stages = config.pipeline.stages if config.pipeline else ()
    return [
        stage.model_dump(mode="json") for stage in stages if stage.fn or stage.type == "compute"
    ]


def user_workflow(workflow: object) -> str:
    """The user's own `module:function`; shipped workflows need no trying."""
    return workflow if isinstance(workflow, str) and ":" in workflow else ""
