# SPDX-License-Identifier: Apache-2.0
"""Builds the sources of a run from its config. Apart from `build`, so that `penstock check` imports
neither ledger nor server."""

from __future__ import annotations

import json

from penstock.config import RunConfig, SourceConfig
from penstock.config.harbor import HarborConfig
from penstock.config.sources import NamedWorkflow, WorkflowConfig
from penstock.dataflow.sources import DataSpec, Source, numbered_source, open_source, session_source
from penstock.dataflow.sources.harbor import HarborSpec, open_harbor

PROMPT_WORKFLOWS = ("single_turn", "tool_loop", "solver_verifier", "planner")
"""Built-in workflows that need a `prompt` in every task."""


def build_source(config: RunConfig, source: SourceConfig) -> Source:
    """One source of a run, open."""
    if source.session is not None:
        return session_source(source.name, weight=source.weight, limit=source.limit)
    if source.harbor is not None:
        return open_harbor(
            source.name,
            harbor_spec(source.harbor),
            weight=source.weight,
            limit=source.limit,
            workflow=workflow_text(config.workflow_of(source)),
        )
    workflow = "" if source.workflow is None else workflow_text(source.workflow)
    if source.env is not None and source.task is None and source.data is None:
        return numbered_source(
            source.name,
            num_tasks=source.env.num_tasks,
            weight=source.weight,
            limit=source.limit,
            workflow=workflow,
        )
    return open_source(
        source.name,
        data_spec(config, source) or source.task or "",
        weight=source.weight,
        limit=source.limit,
        workflow=workflow,
    )


def harbor_spec(harbor: HarborConfig) -> HarborSpec:
    """The tasks of a source in the Harbor format."""
    return HarborSpec(**harbor.model_dump())


def data_spec(config: RunConfig, source: SourceConfig) -> DataSpec | None:
    """The data set of this source; None if it has none."""
    if source.rows is None:
        return None
    has_prompt = config.workflow_name_of(source) in PROMPT_WORKFLOWS
    return DataSpec(**source.rows.model_dump(), has_prompt=has_prompt)


def workflow_text(workflow: WorkflowConfig) -> str:
    """As tasks name it: a name, `module:function`, one of these with its options as a JSON object,
    or a program as a JSON list of arguments."""
    if isinstance(workflow, str):
        return workflow
    if isinstance(workflow, NamedWorkflow):
        return json.dumps({"name": workflow.name, **workflow.options})
    return json.dumps(list(workflow.command))
