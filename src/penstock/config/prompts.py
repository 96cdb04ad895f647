# SPDX-License-Identifier: Apache-2.0
"""Prompt templates of the run file: a file for each name that workflows pass to `ctx.prompt`.

Owns the shape of `prompts`. Reads no file: a start of the run adds text and digest to its own copy
of the config, so that a resumed run and every node have the templates that it started with."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from penstock.config.base import Name, Section, non_blank


class PromptConfig(Section):
    """One template."""

    path: Annotated[str, AfterValidator(non_blank)]
    """A text file with placeholders like {question}; relative to the working directory. A brace of
    the text is written twice."""
    digest: str | None = None
    """BLAKE3 of the text; a start of the run sets it. A run does not resume with another one."""
    text: str | None = None
    """The text; a start of the run sets it."""


def _prompt(value: Any) -> Any:
    """Accept a path alone."""
    return {"path": value} if isinstance(value, str) else value


Prompts = Mapping[
    Name,
    Annotated[PromptConfig, BeforeValidator(_prompt, json_schema_input_type=str | PromptConfig)],
]
"""Template by name."""
