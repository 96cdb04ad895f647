# SPDX-License-Identifier: Apache-2.0
"""The config of a run of somebody else: a short text costs who reads it little, in every reader."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tests.attacks.test_foreign_folders import foreign_folder

from penstock import load_config
from penstock.audit.config import read_config
from penstock.config import demo_config, loader
from penstock.config.prompts import PromptConfig
from penstock.errors import ConfigError, StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.listing import list_runs
from penstock.runs.simulate import with_rules

MERGES = "a: &a {k: 1}\n" + "".join(
    f"b{at}: &b{at} {{<<: [{','.join([f'*b{at - 1}' if at else '*a'] * 9)}]}}\n" for at in range(9)
)
LONG = "model: &a " + "x" * 1000 + "\nb: [" + "*a," * 5000 + "]"
TEXTS = {
    "many": ('model: "' + "${a}" * 1000 + '"', "is for run files"),
    "nested": ('model: "' + "${" * 500 + "a" + "}" * 500 + '"', "is for run files"),
    "aliases": (LONG, "too deep or too large"),
    "merges": (MERGES, "too deep or too large"),
    "nodes": ("model: [" + "x," * 20_000 + "]", "too deep or too large"),
    "hexadecimal": ("seed: 0x" + "f" * 100_000, "a number of 100002 characters"),
    "sexagesimal": ("seed: 1" + ":59" * 3000, "a number of 9001 characters"),
    "long": ("#" * (1 << 20), "longer than"),
}


@pytest.fixture
def interpolations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that OmegaConf parsed; each takes milliseconds for every `${}` in it."""
    seen: list[str] = []

    def record(text: str, *arguments: Any, **options: Any) -> Any:
        seen.append(text)
        return parse(text, *arguments, **options)

    parse: Any = import_module("omegaconf.grammar_parser").parse
    for module in ("omegaconf.base", "omegaconf._utils"):
        monkeypatch.setattr(f"{module}.parse", record)
    return seen


@pytest.mark.parametrize("what", TEXTS)
def test_a_stored_config_is_refused_by_its_text(
    tmp_path: Path, interpolations: list[str], what: str
) -> None:
    text, why = TEXTS[what]
    folder = foreign_folder(tmp_path / "evil")
    folder.config_file.write_text(f"name: x\n{text}\n")
    with pytest.raises(ConfigError, match=why):
        folder.read_config()
    [found] = list_runs(tmp_path)
    assert found.state == "unreadable" and why in found.why
    assert not interpolations


HOSTS = "{h: {memory_gb: 1, address: '" + "a" * 100_000 + "[0-4095]'}}"
PIPELINE = "[" + ",".join(f"{{id: s{at}, type: compute, role: r}}" for at in range(65)) + "]"
STAGES = "[" + ",".join(f"{{name: s{at}, reads: [a], writes: [b]}}" for at in range(129)) + "]"
LARGE = {
    "address": (f"hosts={HOSTS}", "has more than 253 characters"),
    "hosts": ("hosts={'a[0-4095]': {memory_gb: 1}, 'b[0-4095]': {memory_gb: 1}}", "8,192 hosts"),
    "training": ("training.hosts=['a[0-4095]','b[0-4095]','c[0-4095]']", "12,288 hosts"),
    "models": (
        "models={" + ",".join(f"p{at}: {{init: 'builtin:tiny'}}" for at in range(129)) + "}",
        "has 129 entries; at most 128",
    ),
    "stages": (f"dataflow.stages={STAGES}", "has 129 entries; at most 128"),
    "pipeline": (f"pipeline.stages={PIPELINE}", "has 65 entries; at most 64"),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_is_compared_with_each_other_is_counted_first(tmp_path: Path, what: str) -> None:
    """A range repeated an address of 1 MB 4,096 times; 600 bytes of ranges named 200,000 hosts,
    each counted among all; stages were compared for each policy: `ls` took half an hour."""
    setting, why = LARGE[what]
    folder = foreign_folder(tmp_path / "evil")
    section, _, value = setting.partition("=")
    tree: Any = OmegaConf.create(folder.config_file.read_text())
    OmegaConf.update(tree, section, OmegaConf.create(f"value: {value}").value, merge=False)
    folder.config_file.write_text(OmegaConf.to_yaml(tree))
    with pytest.raises(ConfigError, match=why):
        folder.read_config()


def test_an_escaped_text_is_not_parsed(tmp_path: Path, interpolations: list[str]) -> None:
    """It is what a template in JavaScript looks like."""
    text = r"`${a}` \${b} \\${c} " * 100 + "\\" * 1000
    prompts = {"one": PromptConfig(path="a.txt", text=text)}
    config = demo_config(0).model_copy(update={"prompts": prompts})
    interpolations.clear()
    folder = RunFolder(tmp_path / "run")
    folder.write_config(config)
    assert folder.read_config() == config
    assert not [found for found in interpolations if "`" in found]


def test_what_could_not_be_read_again_is_not_stored(tmp_path: Path) -> None:
    prompts = {"one": PromptConfig(path="a.txt", text="x" * loader.MAX_FILE_BYTES)}
    config = demo_config(0).model_copy(update={"prompts": prompts})
    with pytest.raises(ConfigError, match="shorten the templates"):
        RunFolder(tmp_path / "run").write_config(config)
    assert not (tmp_path / "run").exists()


def test_a_text_that_is_too_deep_is_a_mistake_of_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('name: "' + "${" * 500 + "a" + "}" * 500 + '"\n')
    with pytest.raises(ConfigError, match=r"run.yaml:1: refers to itself, or is too deep"):
        load_config(path)


@pytest.mark.parametrize("what", ["aliases", "merges", "nodes", "long"])
def test_other_readers_refuse_it_too(tmp_path: Path, what: str) -> None:
    text, why = TEXTS[what]
    path = tmp_path / "config.yaml"
    path.write_text(f"name: x\n{text}\n")
    with pytest.raises(StoreError, match=why):
        read_config(path)
    if what != "long":
        with pytest.raises(ConfigError, match=why):
            with_rules(demo_config(0), path)
