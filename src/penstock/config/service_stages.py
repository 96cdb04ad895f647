# SPDX-License-Identifier: Apache-2.0
"""Services of the pipeline as stages of the dataflow: one list, `dataflow.stages`, has them all.

Owns the completion of that list before the file is validated. An entry that the file gives under
`dataflow.stages` wins, so it can set deadlines. Reports no mistakes: an entry that is not valid is
left to the section that declares it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from penstock.config.dataflow import DataflowConfig
from penstock.config.pipeline import PipelineConfig
from penstock.config.stages import PipelineStageConfig, StageConfig


def with_service_stages(run_file: Mapping[str, Any]) -> dict[str, Any]:
    """The run file as written, with every service added to `dataflow.stages`."""
    completed = dict(run_file)
    section: object = run_file.get("dataflow", {})
    if not isinstance(section, Mapping | DataflowConfig):
        return completed  # not valid; the section says so
    dataflow = dict[str, Any](cast(Mapping[str, Any], section))
    if not isinstance(dataflow.get("stages", ()), list | tuple):
        return completed
    written = [*cast(Sequence[object], dataflow.get("stages", ()))]
    names = {_name(entry) for entry in written}
    services = [stage for stage in _services(run_file.get("pipeline")) if stage.name not in names]
    if services:
        completed["dataflow"] = {**dataflow, "stages": [*written, *services]}
    return completed


def _services(pipeline: object) -> Iterator[StageConfig]:
    stages: object = None
    if isinstance(pipeline, PipelineConfig):
        stages = pipeline.stages
    elif isinstance(pipeline, Mapping):
        stages = cast(Mapping[str, object], pipeline).get("stages")
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
