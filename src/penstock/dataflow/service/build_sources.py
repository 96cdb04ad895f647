# SPDX-License-Identifier: Apache-2.0
"""Builds the sources of a run from its config. Apart from `build`, so that `penstock check` imports
neither ledger nor server."""

from __future__ import annotations

import json

from penstock.config import RunConfig, SourceConfig
from penstock.config.harbor import HarborConfig
from penstock.config.sources import WORKFLOWS, WorkflowConfig
from penstock.dataflow.sources import DataSpec, Source, open_source, session_source
from penstock.dataflow.sources.harbor import HarborSpec, open_harbor


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
    return open_source(
        source.name,
        data_spec(config, source) or source.task or "",
        weight=source.weight,
        limit=source.limit,
        workflow="" if source.workflow is None else workflow_text(source.workflow),
    )


def harbor_spec(harbor: HarborConfig) -> HarborSpec:
    """The tasks of a source in the Harbor format."""
    return HarborSpec(**harbor.model_dump())


def data_spec(config: RunConfig, source: SourceConfig) -> DataSpec | None:
    """The data set of this source; None if it has none."""
    if source.rows is None:
        return None
    has_prompt = config.workflow_of(source) in WORKFLOWS
    return DataSpec(**source.rows.model_dump(), has_prompt=has_prompt)


def workflow_text(workflow: WorkflowConfig) -> str:
    """As tasks name it: a name, `module:function`, or a program as a JSON list of arguments."""
    return workflow if isinstance(workflow, str) else json.dumps(list(workflow.command))
