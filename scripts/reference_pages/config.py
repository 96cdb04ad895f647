# SPDX-License-Identifier: Apache-2.0
"""Every key of run.yaml, from the schemas in `penstock.config`."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from scripts.reference_pages.markdown import bounds_of, code, entry, flat, head, type_text

from penstock.config.algorithms import builtin_algorithms
from penstock.config.base import Section
from penstock.config.rules import builtin_rules
from penstock.config.run import RunConfig
from penstock.config.sources import WORKFLOWS
from penstock.options import Options, meanings
from penstock.rollout.workflows import builtin_options

UNITS_BY_ENDING = {
    "_s": "seconds",
    "_mb": "MB",
    "_gb": "GB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_gpus": "GPUs",
    "_steps": "steps",
    "_batches": "batches",
    "_share": "share",
}
UNITS = {
    "steps": "steps",
    "max_staleness": "versions",
    "groups_per_batch": "groups",
    "num_generations": "trajectories per group",
    "checkpoint_every": "steps",
    "anchor_every": "versions",
    "epochs": "passes over a batch",
    "minibatches": "updates per pass",
    "replicas": "nodes",
    "engines": "engines per node",
    "slots": "rollouts at a time",
    "partitions": "processes",
    "max_attempts": "attempts",
    "window": "versions",
    "limit": "tasks",
    "dp": "ranks",
    "tp": "ranks",
    "count": "hosts",
    "max_paused": "share of engines",
    "torch_threads": "threads",
}
"""Units of keys whose name does not end with one; other numbers have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the run file."""

    path: str
    field: FieldInfo
    meaning: str
    nested: type[Options] | None
    """Its section, if it is a mapping with keys of its own."""
    is_repeated: bool = False
    """Whether that section is documented elsewhere."""


def sections_in(annotation: Any) -> Iterator[tuple[str, type[Options]]]:
    """Sections inside a type, with what to add to the path of their keys."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from sections_in(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from sections_in(argument)
    elif origin is tuple:
        yield from ((f"[]{more}", found) for more, found in sections_in(arguments[0]))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ((f".NAME{more}", found) for more, found in sections_in(arguments[1]))
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield "", annotation


def sections() -> dict[str, tuple[type[Options], list[Key]]]:
    """Path of each section, its class and its keys, in the order of the file."""
    found: dict[str, tuple[type[Options], list[Key]]] = {}
    shared = {
        kind: name
        for name, field in RunConfig.model_fields.items()
        for more, kind in sections_in(field.annotation)
        if not more
    }

    def visit(path: str, kind: type[Options], label: str = "") -> None:
        keys: list[Key] = []
        found[path + label] = (kind, keys)
        for name, field in kind.model_fields.items():
            at = f"{path}.{name}" if path else name
            inner, *others = [*sections_in(field.annotation)] or [None]
            is_repeated = inner is not None and shared.get(inner[1], at) != at
            nested = inner[1] if inner else None
            meaning = meanings(kind).get(name, "")
            keys.append(
                Key(path=at, field=field, meaning=meaning, nested=nested, is_repeated=is_repeated)
            )
            if inner and not is_repeated and nested is not None:
                visit(at + inner[0], nested)
                for more, other in filter(None, others):
                    visit(at + more, other, f" ({next(iter(other.model_fields))})")

    visit("", RunConfig)
    return found


def all_keys() -> list[str]:
    """Every dotted key, with NAME for a name that the user chooses and [] for an entry."""
    return [key.path for _, keys in sections().values() for key in keys]


def unit_of(path: str) -> str:
    name = path.rpartition(".")[2]
    ending = next((unit for end, unit in UNITS_BY_ENDING.items() if name.endswith(end)), "")
    return UNITS.get(name, ending)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Options):
        return ""
    return f"default {code(value)}"


def _facts(key: Key) -> str:
    field = key.field
    kind = type_text(field.annotation)
    bounds = bounds_of(field.metadata)
    number = "integer" in kind or "number" in kind
    unit = unit_of(key.path) if number else ""
    return " · ".join(filter(None, [f"{kind} {bounds}".strip(), unit, default_of(field)]))


def _entry(key: Key, paths: Mapping[type[Options], str]) -> str:
    where = ""
    if key.nested is not None:
        path = paths[key.nested]
        where = f"Keys: [`{path}`](#{anchor(path)})."
    return entry(f"`{key.path}` {_facts(key)}", [flat(key.meaning), where])


def anchor(path: str) -> str:
    plain = path.replace("[]", "").replace(" (", "-").removesuffix(")")
    return plain.lower() or "top"


def page() -> str:
    found = sections()
    paths = {kind: path for path, (kind, _) in reversed(found.items())}
    parts = [
        head(
            "Config keys",
            "Every key of `run.yaml`. `NAME` is a name you choose, `[]` an entry of a list. "
            "An override on the command line uses the same path: "
            "`penstock run run.yaml training.steps=20`.",
            "[The JSON schema](../run.schema.json) of the same keys lets an editor complete them."
            if (has_schema())
            else "An unknown key is an error that names the file, the line and the closest key.",
        )
    ]
    for path, (kind, keys) in found.items():
        title = f"`{path}`" if path else "Top level"
        parts.append(f"## {title} {{ #{anchor(path)} }}\n")
        if path:
            parts.append(flat(kind.__doc__) + "\n")
        parts += [_entry(key, paths) for key in keys]
    return "\n".join([*parts, _workflows(), _rules(), _algorithms()])


def has_schema() -> bool:
    from scripts.reference import DOCS

    return (DOCS / "run.schema.json").exists()


def _workflows() -> str:
    parts = [
        "## Built-in workflows { #workflows }\n",
        "Options beside the `name` of a workflow. "
        "[Built-in workflows](../how-to/sub-agents.md#built-in-workflows) says what they do.\n",
    ]
    for name in WORKFLOWS:
        parts.append(entry(f"`{name}`", [*_options(builtin_options(name))] or ["No options."]))
    return "\n".join(parts)


def _options(kind: type[Options]) -> Iterator[str]:
    for option, field in kind.model_fields.items():
        facts = f"{type_text(field.annotation)} {bounds_of(field.metadata)}".strip()
        meaning = flat(meanings(kind).get(option))
        yield f"`{option}`: {facts}, {default_of(field)}. {meaning}".rstrip()


def _rules() -> str:
    parts = [
        "## Built-in rules { #rules }\n",
        "Options of the rules under `dataflow.rules`. "
        "[Choose rules](../how-to/choose-rules.md) says which to take.\n",
    ]
    for hook, rules in builtin_rules().items():
        parts.append(f"### `{hook.value}` {{ #rule-{hook.value} }}\n")
        for name, kind in rules.items():
            parts.append(entry(f"`{name}`", [flat(kind.__doc__) or "–", *_options(kind)]))
    return "\n".join(parts)


def _algorithms() -> str:
    parts = [
        "## Algorithms { #algorithms }\n",
        "Values of `algorithm.name`, and the defaults that a name changes.\n",
        "| name | changed defaults | mini-batches | further keys |",
        "|---|---|---|---|",
    ]
    for name, algorithm in sorted(builtin_algorithms().items()):
        preset = ", ".join(f"`{key}: {value}`" for key, value in algorithm.preset.items()) or "–"
        keys = ", ".join(f"`{key}`" for key in sorted(algorithm.keys)) or "–"
        parts.append(f"| `{name}` | {preset} | {algorithm.minibatches} | {keys} |")
    return "\n".join([*parts, ""])
