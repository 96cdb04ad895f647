# SPDX-License-Identifier: Apache-2.0
"""`harbor:` of a source: a folder of tasks in the Harbor format.

Owns its shape, and the name of the workflow that runs an agent inside a task. Reads no task."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from penstock.config.base import Section, non_blank

PathText = Annotated[str, AfterValidator(non_blank)]


class HarborConfig(Section):
    """Tasks in the Harbor format. The verifier of a task is its reward."""

    path: PathText
    """A folder of tasks, or one task; relative to the working directory."""
    roots: Mapping[str, PathText] = Field(default_factory=dict[str, str])
    """Root file systems that were made beforehand, for RUN and for other images than debian,
    ubuntu and python: name of a task, digest of its environment, or image, to a folder."""
    agent_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that an agent gets at most, where task.toml gives more; the verifier judges what it
    has done until then. null: as task.toml says."""
    verifier_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that a verifier gets at most, where task.toml gives more."""


def _harbor(value: Any) -> Any:
    """Accept a path alone."""
    return {"path": value} if isinstance(value, str) else value


AnyHarbor = Annotated[
    HarborConfig, BeforeValidator(_harbor, json_schema_input_type=str | HarborConfig)
]


def harbor_workflow(argv: Sequence[str] = ()) -> str:
    """How a task names the agent that runs inside it; without arguments, the built-in one."""
    return json.dumps({"harbor": list(argv)})
