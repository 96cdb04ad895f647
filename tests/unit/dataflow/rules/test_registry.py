# SPDX-License-Identifier: Apache-2.0
"""Rules by name: discovery, one declaration of options, and messages for rules that do not fit."""

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel
from tests.unit.dataflow.rules.rule_inputs import Assigned, judged
from tests.unit.dataflow.rules.user_rules import AnyOptions, OnlyLong

import penstock.config
from penstock.config import RuleConfig
from penstock.config.rules import builtin_rules as rules_of_config
from penstock.dataflow.rules import LearningRule, builtin_rules, make_rule
from penstock.dataflow.rules.registry import METHODS
from penstock.errors import ConfigError
from penstock.options import meanings
from penstock.types import DropReason, Hook

BUILTIN = [(hook, name) for hook, rules in builtin_rules().items() for name in rules]
GUIDES = Path(__file__).parents[4] / "docs" / "how-to"
CUSTOM = "tests.unit.dataflow.rules.user_rules"
NEEDED: dict[str, dict[str, Any]] = {
    "by-role": {"roles": {"a": ["r"]}},
    "shared": {"turns_of": {"a": ["b"]}},
    "reward-range": {"low": 0.0},
}


def defaults(kind: type[BaseModel]) -> dict[str, Any]:
    fields = kind.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields}


def config_classes() -> set[type[BaseModel]]:
    names = [module.name for module in pkgutil.iter_modules(penstock.config.__path__)]
    modules = [importlib.import_module(f"penstock.config.{name}") for name in names]
    found = [value for module in modules for value in vars(module).values()]
    return {kind for kind in found if inspect.isclass(kind) and issubclass(kind, BaseModel)}


def test_rules_are_found_by_their_files() -> None:
    folder = Path(inspect.getfile(make_rule)).parent
    files = [
        path for path in folder.glob("*.py") if "\nRULE = " in path.read_text(encoding="utf-8")
    ]
    assert len(BUILTIN) == len(files)
    assert rules_of_config() is builtin_rules()
    assert list(METHODS) == list(Hook)


@pytest.mark.parametrize(("hook", "name"), BUILTIN)
def test_options_are_declared_once(hook: Hook, name: str) -> None:
    """The rule declares them, config resolves them from there, and no section repeats them."""
    kind = builtin_rules()[hook][name]
    entry = RuleConfig.model_validate({hook.value: name, **NEEDED.get(name, {})})
    assert list(entry.options) == list(kind.model_fields)
    assert type(make_rule(hook, name, entry.options, Assigned())) is kind
    assert meanings(kind).keys() >= kind.model_fields.keys()
    own = defaults(kind).items()
    copies = [other for other in config_classes() if own and own <= defaults(other).items()]
    assert copies == []


def test_each_rule_is_one_small_file_without_io() -> None:
    allowed = {
        "__future__", "bisect", "collections", "itertools", "math", "pydantic", "statistics",
        "typing",
    }  # fmt: skip
    ours = {
        "penstock.types",
        "penstock.options",
        "penstock.dataflow.rules.rule",
        "penstock.dataflow.rules.replay",
    }
    for kind in {kind for rules in builtin_rules().values() for kind in rules.values()}:
        path = Path(cast(str, inspect.getsourcefile(kind)))
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120, path
        tree = ast.parse(text)
        assert sum(isinstance(node, ast.ClassDef) for node in tree.body) == 1, path
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Import), path
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                assert module in ours or module.split(".")[0] in allowed, path


def test_who_learns() -> None:
    learning = {
        name
        for hook, name in BUILTIN
        if isinstance(make_rule(hook, name, NEEDED.get(name, {}), Assigned()), LearningRule)
    }
    assert learning == {"curriculum", "solved-filter", "greso", "dedup"}


def test_a_users_rule() -> None:
    rule = make_rule("admit", f"{CUSTOM}:OnlyLong", {"min_rows": 3, "unit": "rows"}, Assigned())
    assert isinstance(rule, OnlyLong) and rule.min_rows == 3
    free = make_rule("admit", f"{CUSTOM}:AnyOptions", {"a": 1}, Assigned())
    assert isinstance(free, AnyOptions) and free.options == {"a": 1}


@pytest.mark.parametrize(
    ("hook", "name", "options", "says"),
    [
        ("admit", "reward_spread", {}, 'did you mean "reward-spread"?'),
        ("select", "zzz", {}, "use edf | fifo | freshest | length-balanced | priority | module:Cl"),
        ("admit", "dedup", {"windw": 3}, 'option "windw" of Dedup; did you mean "window"?'),
        ("admit", "dedup", {"window": 0}, "window: Input should be greater than 0"),
        ("admit", "reward-range", {}, "so nothing is refused; set one of them"),
        ("select", "edf", {"zzz": 3}, 'unknown option "zzz" of EarliestDeadline; remove it'),
        ("route", "shared", {}, "Shared needs the option 'turns_of'"),
        ("admit", "no.such:Rule", {}, "cannot import 'no.such': ModuleNotFoundError"),
        ("admit", f"{CUSTOM}:OnlyLon", {}, "has no class 'OnlyLon'"),
        ("admit", f"{CUSTOM}:OnlyLon", {}, 'did you mean "OnlyLong"?'),
        ("admit", f"{CUSTOM}:Sequence", {}, "Sequence needs `def judge(self, group)`"),
        ("admit", f"{CUSTOM}:OnlyLong", {"unit": "x", "min_row": 1}, 'did you mean "min_rows"?'),
        ("admit", f"{CUSTOM}:OnlyLong", {}, "OnlyLong needs the option 'unit'"),
        (
            "admit",
            f"{CUSTOM}:OnlyLong",
            {"unit": "x", "min_rows": -1},
            "not be negative; change",
        ),
        (
            "select",
            f"{CUSTOM}:OnlyLong",
            {},
            "needs `def choose(self, ready, count)`",
        ),
        ("admit", f"{CUSTOM}:WrongArguments", {}, "needs `def judge(self, group)`"),
        ("admit", f"{CUSTOM}:NoState", {}, "write `def __init__(self, state, *, option=default)`"),
        ("replay", f"{CUSTOM}:Again", {"ratio": 1.0}, "set self.ratio to a value between 0 and 1"),
        ("replay", f"{CUSTOM}:Again", {"max_uses": 1}, "set self.max_uses to 2 or more"),
        ("replay", f"{CUSTOM}:Again", {"max_staleness": 0}, "set self.max_staleness to 1 or more"),
    ],
)
def test_messages_name_the_problem_and_the_fix(
    hook: str, name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rule(hook, name, options, Assigned())
    assert str(caught.value).startswith(f"rule {hook}: {name}: ")
    assert says in str(caught.value)


def test_the_example_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (GUIDES / "add-rule.md").read_text(encoding="utf-8")
    code = page.partition('```python title="my_rules.py"\n')[2].partition("```")[0]
    (tmp_path / "my_rules.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    state = Assigned()
    verdicts: list[DropReason | None] = []
    for issue, number in enumerate([0, 0, 0, 1, 1, 1]):
        rule = make_rule("admit", "my_rules:FewPerVersion", {"most": 2}, state)
        group = judged(f"p0-{issue}", (0.0, 1.0), number=number)
        verdicts.append(rule.judge(group))
        assert isinstance(rule, LearningRule)
        rule.learn(group, verdicts[-1])
    assert verdicts == [None, None, DropReason.RULE] * 2


def test_the_documents_list_every_rule() -> None:
    page = (GUIDES / "choose-rules.md").read_text(encoding="utf-8")
    assert [name for _, name in BUILTIN if f"| `{name}` |" not in page] == []
