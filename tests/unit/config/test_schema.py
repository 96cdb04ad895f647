# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of run files: it accepts every shipped one and refuses what it can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf
from tests.unit.config import test_rejects
from tests.unit.config.conftest import EXAMPLE

from penstock.config import RunConfig, demo_config, dump
from penstock.config.schema import EDITOR_LINE, run_schema, schema_text

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(
    [
        *ROOT.glob("src/penstock/cli/templates/*/run.yaml"),
        *ROOT.glob("src/penstock/config/*.yaml"),
        *ROOT.glob("recipes/**/*.yaml"),
    ]
)
_BLOCK = re.compile(r"^( *)```ya?ml[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@cache
def validator(*, is_whole: bool = True) -> jsonschema.Draft202012Validator:
    schema = run_schema()
    if not is_whole:
        del schema["required"]
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(text: str, *, is_whole: bool = True) -> list[str]:
    """What the schema says of the values that the loader reads in this text."""
    values = OmegaConf.to_container(OmegaConf.create(text))
    check: Any = validator(is_whole=is_whole)
    found = check.iter_errors(_restore_on(values))
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


def _restore_on(value: Any) -> Any:
    """YAML 1.1 reads the key `on` as true; editors read YAML 1.2, and the loader restores it."""
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value).items()
        return {"on" if key is True else key: _restore_on(child) for key, child in pairs}
    if isinstance(value, list):
        return [_restore_on(child) for child in cast(list[Any], value)]
    return value


def documented() -> Iterator[Any]:
    """Blocks of the documents that are run files or sections of one."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]:
        for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            text = block[2]
            if _is_config(text):
                yield pytest.param(text, id=f"{page.relative_to(ROOT)}:{number}")


def _is_config(text: str) -> bool:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    keys = set(cast(dict[str, Any], values)) if isinstance(values, dict) else set[str]()
    return bool(keys) and keys <= RunConfig.model_fields.keys() and "..." not in text


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_is_accepted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert problems(text.replace("{{name}}", "my-run")) == []


def test_all_shipped_configs_are_found() -> None:
    assert len(SHIPPED) >= 7


@pytest.mark.parametrize("text", list(documented()))
def test_every_documented_config_is_accepted(text: str) -> None:
    assert problems(text, is_whole=False) == []


def test_what_a_run_stores_is_accepted() -> None:
    assert problems(dump(demo_config(0))) == []


ACCEPTED = [
    "models: {policy: {init: Qwen/Qwen3-0.6B, training: {epochs: 2}}}",
    "models: {policy: {init: ./folder, engine: my-plugin, algorithm: {name: ppo}}}",
    "dataflow: {closing: survivors(4)}",
    "dataflow: {closing: {survivors: {min: 4}}}",
    "dataflow: {rules: [{admit: 'mine:Rule', any_option: 1}, {replay: newest, ratio: 0.3}]}",
    "dataflow: {store: 'postgresql://user@host/database', payload: 's3://bucket/prefix'}",
    "dataflow: {payload: 'mine.store:Store', lease: {ttl_s: 12}}",
    "workflow: {command: [python, agent.py]}",
    "sampling: {temperature: 1}",
    "weights: {mirror: ''}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_other_forms_are_accepted(text: str) -> None:
    assert problems(text, is_whole=False) == []


REFUSED = [
    *test_rejects.UNKNOWN,
    *test_rejects.MISSING,
    *test_rejects.TYPES,
    *test_rejects.RANGES,
    *test_rejects.CHOICES,
    *test_rejects.NOT_SUPPORTED,
    *test_rejects.RULE_OPTIONS,
]
LEFT_TO_CHECK = {
    "learning_rate: .nan",
    # a plug-in may have this name
    "engine: hff",
    "report_to: [wandbb]",
    "workflow: single_trun",
    "workflow: mine.py",
    "reward: penstock.tasks.reverse",
    "admit: reward_spread",
    "select: lifo",
    "replay: newst",
    "replay: ratio}",
    # a matter of several keys
    "engines: 2, vllm",
    "engine: sglang",
    "p_min: 0.6",
    "hard_to: 0.6",
    "{admit: reward-range}",
    "low: 2, high: 1",
    "suites: [a",
    "polici",
    "turns_of: {policy: [teacher]}",
    "difficulty: {trains: 1}",
    "{replay: newest}, {replay: uniform}",
    "{route: by-policy}, {route: by-policy}",
    "- {name: train} #@",
}
"""Parts of broken files that the schema accepts: `penstock check` says what is wrong."""
PATHS = {"sources[0].task", "sources[0].data.path"}
"""Keys of paths, whose form only `penstock check` knows."""


@pytest.mark.parametrize("broken", REFUSED, ids=lambda broken: broken.new[:50] or "removed")
def test_broken_files_are_refused(broken: test_rejects.Case) -> None:
    assert broken.old in EXAMPLE
    is_path = broken.key in PATHS and "missing" not in broken.expected_text
    is_left = is_path or any(part in broken.new for part in LEFT_TO_CHECK)
    assert bool(problems(EXAMPLE.replace(broken.old, broken.new))) is not is_left


def test_every_key_has_a_description() -> None:
    schema = run_schema()
    sections = {"RunConfig": schema, **schema["$defs"]}
    missing = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, about in section.get("properties", {}).items()
        if not {**sections.get(about.get("$ref", "").split("/")[-1], {}), **about}["description"]
    ]
    for chosen in schema["$defs"]["RuleConfig"]["allOf"]:
        options = chosen["then"]["properties"]
        missing += [key for key, about in options.items() if not about.get("description")]
    assert missing == []
    assert sum(len(section.get("properties", ())) for section in sections.values()) > 150


def test_the_published_schema_is_current() -> None:
    published = (ROOT / "docs" / "run.schema.json").read_text(encoding="utf-8")
    assert published == schema_text(), "run scripts/write_schema.py"


def test_the_template_names_the_schema_that_init_writes() -> None:
    template = ROOT / "src/penstock/cli/templates/single-turn/run.yaml"
    assert template.read_text(encoding="utf-8").startswith(EDITOR_LINE)
