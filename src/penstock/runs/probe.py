# SPDX-License-Identifier: Apache-2.0
"""Runs the user's code once in a separate process, with a time limit."""

from __future__ import annotations

import subprocess
import sys

from penstock.config import RunConfig, SourceConfig
from penstock.dataflow.service.build_sources import data_spec
from penstock.runs.probe_process import ProbeRequest, ProbeResult, ProbeSource
from penstock.runs.target import RunTarget
from penstock.types import JsonObject
from penstock.wire.codec import JSON, decode, encode_json

DEADLINE_S = 30.0
"""Time limit for importing the user's modules and calling each once."""


def run_probe(target: RunTarget) -> ProbeResult:
    """Run the user's task, reward and workflow once and collect the problems."""
    config = target.config
    workflows = dict.fromkeys([config.workflow, *map(config.workflow_of, config.sources)])
    request = ProbeRequest(
        sources=[_source(config, source) for source in config.sources if source.session is None],
        workflows=[*filter(None, map(user_workflow, workflows))],
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
                f"your task, reward, workflow and stages took longer than {DEADLINE_S:.0f} s to "
                "import and run once; make them faster, since every node imports them too"
            ]
        )
    if done.returncode != 0:
        return ProbeResult(
            problems=[
                "your task, reward, workflow or stage ended its process (exit code "
                f"{done.returncode}); remove calls such as sys.exit()"
            ]
        )
    return decode(done.stdout, ProbeResult, media_type=JSON)


def _source(config: RunConfig, source: SourceConfig) -> ProbeSource:
    return ProbeSource(
        name=source.name,
        where=data_spec(config, source) or source.task or "",
        limit=source.limit,
        reward=config.reward_of(source) or "",
        is_single_turn=config.workflow_of(source) == "single_turn",
    )


def user_stages(config: RunConfig) -> list[JsonObject]:
    """Stages of the config's pipeline that run a function, built-in or custom."""
    stages = config.pipeline.stages if config.pipeline else ()
    return [
        stage.model_dump(mode="json") for stage in stages if stage.fn or stage.type == "compute"
    ]


def user_workflow(workflow: object) -> str:
    """The `module:function` of a custom workflow; empty for a built-in one."""
    return workflow if isinstance(workflow, str) and ":" in workflow else ""
