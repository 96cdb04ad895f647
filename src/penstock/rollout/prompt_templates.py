# SPDX-License-Identifier: Apache-2.0
"""Prompts as text with named placeholders: `Solve: {question}`.

Owns the syntax: a placeholder is a name in braces, and a brace of the text is written twice.
Refuses what `str.format` also takes (attributes, indexes, conversions, format specs), so that a
template is data and never code. Every placeholder gets a value, and every value has a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from penstock.errors import ConfigError, WorkflowError
from penstock.plugins import unknown


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template of the run, parsed."""

    name: str
    parts: tuple[tuple[str, str | None], ...]
    """Literal texts, each with the placeholder after it; None after the last."""

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(name for _, name in self.parts if name is not None)

    def fill(self, values: Mapping[str, object]) -> str:
        """The text with these values. They may contain braces: nothing in them is read again."""
        if missing := sorted(self.placeholders - values.keys()):
            raise WorkflowError(
                f"prompt {self.name} has the placeholder {{{missing[0]}}}, which got no value; "
                f"pass {missing[0]}=… to ctx.prompt, or remove it from the template"
            )
        if unused := sorted(values.keys() - self.placeholders):
            known = ", ".join(sorted(self.placeholders)) or "none"
            raise WorkflowError(
                f"prompt {self.name} has no placeholder {{{unused[0]}}} (it has: {known}); add it "
                "to the template, or do not pass it to ctx.prompt"
            )
        return "".join(
            text if name is None else f"{text}{values[name]}" for text, name in self.parts
        )


def parse_prompt(name: str, text: str) -> PromptTemplate:
    """Parse a template; ConfigError says what is wrong with it."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"prompt {name} is not a template: {error}; write {{name}} for a placeholder, and {{{{ "
            "or }} for a brace"
        ) from None
    return PromptTemplate(name, tuple(_part(name, *part) for part in parsed))


def find_prompt(
    prompts: Mapping[str, PromptTemplate], name: str, default: str | None
) -> PromptTemplate:
    """The template of this name, or else the default."""
    if name in prompts:
        return prompts[name]
    if default is None:
        raise WorkflowError(
            f"{unknown('prompt', name, prompts)}; name its file under `prompts` in the run file"
        )
    return parse_prompt(name, default)


def _part(
    template: str, text: str, name: str | None, spec: str | None, conversion: str | None
) -> tuple[str, str | None]:
    if name is not None and (spec or conversion or not name.isidentifier()):
        written = f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
        raise ConfigError(
            f"prompt {template} has {written}, which is not a plain name; write {{name}} for a "
            "placeholder, and {{ or }} for a brace"
        )
    return text, name
