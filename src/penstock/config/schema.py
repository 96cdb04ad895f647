# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of a run file, for editors: completion, descriptions and mistakes while typing.

Made from the sections themselves, with what their validators accept or refuse beyond types. Names
that a plug-in can add stay open, and the built-in ones are suggested. What depends on several keys,
and `${...}`, is left to `penstock check`: an editor never refuses a file that runs, except that it
does not know `${...}` in place of a number.

`python -m penstock.config.schema > run.schema.json` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from penstock.config.algorithms import builtin_algorithms
from penstock.config.base import COLUMN, NAME, OBJECT_STORES
from penstock.config.models import BUILTIN_MODELS, ENGINES_PACKAGE
from penstock.config.rules import builtin_rules
from penstock.config.run import RunConfig
from penstock.config.sources import WORKFLOWS
from penstock.config.trackers import TRACKERS_PACKAGE
from penstock.options import Options, meanings
from penstock.plugins import builtin_names

FILE_NAME = "run.schema.json"
"""What `penstock init` calls it, beside run.yaml."""
EDITOR_LINE = f"# yaml-language-server: $schema={FILE_NAME}\n"
"""First line of a run file beside which the schema lies; editors with a YAML language server read
it."""

Schema = dict[str, Any]


def run_schema() -> Schema:
    """The schema, as draft 2020-12."""
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    sections: dict[str, Schema] = {"RunConfig": schema, **schema["$defs"]}
    for section in sections.values():
        section.pop("title", None)
    _add_known_names(sections)
    _add_patterns(sections)
    _add_written_forms(sections, schema["$defs"])
    _add_rules(sections["RuleConfig"], schema["$defs"])
    _reflow_descriptions(schema)
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": "run.yaml of penstock"}
    return {**head, **schema}


def schema_text() -> str:
    """The schema as it is written to files."""
    return json.dumps(run_schema(), indent=2, ensure_ascii=False) + "\n"


class _Generator(GenerateJsonSchema):
    """With what the source says of each key; without titles, which repeat the names of keys, and
    without defaults of whole sections."""

    def model_schema(self, schema: Any) -> Schema:
        made = super().model_schema(schema)
        said = meanings(schema["cls"])
        for name, about in made.get("properties", {}).items():
            if name in said:
                about["description"] = said[name]
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> Schema:
        made = super().default_schema(schema)
        if isinstance(made.get("default"), dict):
            del made["default"]
        return made


def _add_known_names(sections: Mapping[str, Schema]) -> None:
    """Built-in names are suggested; those that only penstock can add are the only ones."""
    model, run = sections["ModelConfig"]["properties"], sections["RunConfig"]["properties"]
    _text_form(model["engine"]).update(_suggest(builtin_names(ENGINES_PACKAGE)))
    model["init"] |= {
        "examples": ["Qwen/Qwen3-0.6B", *BUILTIN_MODELS],
        "anyOf": [{"enum": list(BUILTIN_MODELS)}, {"pattern": r"^(?!builtin:)\s*\S"}],
    }
    run["report_to"]["items"] |= _suggest(builtin_names(TRACKERS_PACKAGE))
    _text_form(run["workflow"]).update(_suggest(WORKFLOWS))
    sections["AlgorithmConfig"]["properties"]["name"]["enum"] = list(builtin_algorithms())


def _text_form(schema: Schema) -> Schema:
    """The alternative of a schema that is text."""
    forms: list[Schema] = schema.get("oneOf") or schema.get("anyOf") or [schema]
    return next(form for form in forms if form.get("type") == "string")


def _suggest(names: tuple[str, ...]) -> Schema:
    return {"anyOf": [{"enum": list(names)}, {"type": "string"}]}


def _add_patterns(sections: Mapping[str, Schema]) -> None:
    """Text whose form is checked by a validator."""
    run = sections["RunConfig"]["properties"]
    part = NAME.pattern
    run["name"] |= {"pattern": rf"^{part}(\.{part})*$", "maxLength": 100}
    run["output_dir"]["pattern"] = r"\S"
    run["models"] |= {"propertyNames": _full(NAME), "minProperties": 1}
    run["hosts"]["propertyNames"] = {"pattern": r"^[A-Za-z0-9][\w-]*(\[[0-9,-]+\][\w-]*)?$"}
    run["roles"] |= {"propertyNames": _full(NAME), "additionalProperties": _full(NAME)}
    for name in ("SourceConfig", "SpaceConfig", "StageConfig"):
        sections[name]["properties"]["name"] |= _full(NAME)
    for key in ("id", "role"):
        sections["PipelineStageConfig"]["properties"][key] |= _full(NAME)
    for name in ("StageConfig", "PipelineStageConfig"):
        for key in ("reads", "writes"):
            sections[name]["properties"][key]["items"] |= _full(COLUMN)
    dataflow = sections["DataflowConfig"]["properties"]
    dataflow["store"]["pattern"] = r"^(sqlite|postgresql://.+/.+)$"
    stores = "|".join(OBJECT_STORES)
    dataflow["payload"]["pattern"] = rf"^(segments|memory|({stores}|file)://.+|[^/]+:[^/]+)$"
    mirror = sections["WeightsConfig"]["properties"]["mirror"]
    mirror["pattern"] = rf"^(({stores}|file)://.+)?$"


def _full(pattern: re.Pattern[str]) -> Schema:
    return {"pattern": f"^{pattern.pattern}$"}


def _add_written_forms(sections: Mapping[str, Schema], defs: dict[str, Schema]) -> None:
    """What a file may leave out or write shorter."""
    if data := sections["SourceConfig"]["properties"].get("data"):
        data["anyOf"].append({"type": "string"})  # a path alone
    closing = sections["DataflowConfig"]["properties"]["closing"]
    short = {"type": "string", "pattern": r"^survivors\(\s*(min\s*=\s*)?([2-9]|\d\d+)\s*\)$"}
    closing["oneOf"].append(short)
    own = {key: value for key, value in defs["TrainingConfig"].items() if key != "required"}
    defs["PolicyTrainingConfig"] = own
    training = sections["ModelConfig"]["properties"]["training"]
    training["anyOf"][0] = {"$ref": "#/$defs/PolicyTrainingConfig"}


def _add_rules(entry: Schema, defs: dict[str, Schema]) -> None:
    """One hook per entry; a built-in rule takes the options that it declares."""
    hooks = builtin_rules()
    entry["oneOf"] = [{"required": [hook.value]} for hook in hooks]
    entry["allOf"] = []
    for hook, rules in hooks.items():
        about = entry["properties"][hook.value]
        entry["properties"][hook.value] = {
            "description": about["description"],
            "type": "string",
            **_suggest(tuple(rules)),
        }
        entry["allOf"] += [_builtin_rule(hook.value, *rule, defs) for rule in rules.items()]


def _builtin_rule(hook: str, name: str, rule: type[Options], defs: dict[str, Schema]) -> Schema:
    options = rule.model_json_schema(schema_generator=_Generator)
    defs |= options.get("$defs", {})
    chosen: Schema = {"properties": {hook: {"const": name}}, "required": [hook]}
    then: Schema = {
        "properties": {hook: {"description": rule.__doc__}, **options.get("properties", {})},
        "additionalProperties": False,
    }
    if "required" in options:
        then["required"] = options["required"]
    return {"if": chosen, "then": then}


def _reflow_descriptions(schema: Any) -> None:
    """One line per paragraph, however the source wraps it."""
    if isinstance(schema, list):
        for child in schema:  # pyright: ignore[reportUnknownVariableType]
            _reflow_descriptions(child)
    elif isinstance(schema, dict):
        for key, child in schema.items():  # pyright: ignore[reportUnknownVariableType]
            if key == "description" and isinstance(child, str):
                paragraphs = (" ".join(text.split()) for text in child.split("\n\n"))
                schema[key] = "\n\n".join(paragraphs)
            else:
                _reflow_descriptions(child)


if __name__ == "__main__":
    print(schema_text(), end="")
