# SPDX-License-Identifier: Apache-2.0
"""Rules by name: all shipped ones agree with the config, and what does not fit is told."""

import ast
import inspect
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.dataflow.rules.rule_inputs import Assigned, judged
from tests.unit.dataflow.rules.user_rules import AnyOptions, OnlyLong

from penstock.config.rule_options import RULE_OPTIONS
from penstock.dataflow.rules import RULES, LearningRule, make_rule
from penstock.dataflow.rules.registry import METHODS
from penstock.errors import ConfigError
from penstock.types import DropReason

SHIPPED = [(hook, name) for hook, rules in RULES.items() for name in rules]
OWN = "tests.unit.dataflow.rules.user_rules"
NEEDED: dict[str, dict[str, Any]] = {
    "by-role": {"roles": {"a": ["r"]}},
    "shared": {"turns_of": {"a": ["b"]}},
    "reward-range": {"low": 0.0},
}


def test_config_and_code_know_the_same_rules() -> None:
    in_config = [(str(hook), name) for hook, rules in RULE_OPTIONS.items() for name in rules]
    assert in_config == SHIPPED
    assert list(METHODS) == list(RULES)


@pytest.mark.parametrize(("hook", "name"), SHIPPED)
def test_config_and_code_know_the_same_options(hook: str, name: str) -> None:
    options = dict(RULE_OPTIONS)[next(h for h in RULE_OPTIONS if h == hook)][name]
    in_config = {
        key: inspect.Parameter.empty if field.is_required() else field.default
        for key, field in options.model_fields.items()
    }
    parameters = [*inspect.signature(RULES[hook][name]).parameters.values()][1:]
    assert in_config == {p.name: p.default for p in parameters}
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    resolved = options.model_validate(NEEDED.get(name, {})).model_dump(mode="json")
    assert type(make_rule(hook, name, resolved, Assigned())) is RULES[hook][name]


def test_each_rule_is_one_small_file_of_types_only() -> None:
    allowed = {
        "__future__", "bisect", "collections", "itertools", "math", "statistics", "typing",
    }  # fmt: skip
    for kind in {kind for rules in RULES.values() for kind in rules.values()}:
        path = Path(cast(str, inspect.getsourcefile(kind)))
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80, path
        tree = ast.parse(text)
        assert sum(isinstance(node, ast.ClassDef) for node in tree.body) == 1, path
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Import), path
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                assert module == "penstock.types" or module.split(".")[0] in allowed, path


def test_who_learns() -> None:
    learning = {
        name
        for hook, name in SHIPPED
        if isinstance(make_rule(hook, name, NEEDED.get(name, {}), Assigned()), LearningRule)
    }
    assert learning == {"curriculum", "solved-filter", "greso", "dedup"}


def test_a_users_rule() -> None:
    rule = make_rule("admit", f"{OWN}:OnlyLong", {"min_rows": 3, "unit": "rows"}, Assigned())
    assert isinstance(rule, OnlyLong) and rule.min_rows == 3
    free = make_rule("admit", f"{OWN}:AnyOptions", {"a": 1}, Assigned())
    assert isinstance(free, AnyOptions) and free.options == {"a": 1}


@pytest.mark.parametrize(
    ("hook", "name", "options", "says"),
    [
        ("admit", "reward_spread", {}, 'did you mean "reward-spread"?'),
        ("admit", "zzz", {}, "use all | reward-spread | overlong"),
        ("admit", "dedup", {"windw": 3}, "Dedup has no option 'windw'; did you mean \"window\"?"),
        ("select", "edf", {"zzz": 3}, "it takes none; delete it"),
        ("route", "shared", {}, "Shared needs the option 'turns_of'"),
        ("admit", "no.such:Rule", {}, "cannot import no.such: ModuleNotFoundError"),
        ("admit", f"{OWN}:OnlyLon", {}, 'did you mean "OnlyLong"?'),
        ("admit", f"{OWN}:Sequence", {}, "Sequence has no `def judge(self, group)`"),
        ("admit", f"{OWN}:OnlyLong", {"unit": "x", "min_row": 1}, 'did you mean "min_rows"?'),
        ("admit", f"{OWN}:OnlyLong", {}, "OnlyLong needs the option 'unit'"),
        ("admit", f"{OWN}:OnlyLong", {"unit": "x", "min_rows": -1}, "must not be negative; change"),
        ("select", f"{OWN}:OnlyLong", {}, "has no `def choose(self, ready, count)`; a select rule"),
        ("admit", f"{OWN}:WrongArguments", {}, "has no `def judge(self, group)`"),
        ("admit", f"{OWN}:NoState", {}, "write `def __init__(self, state, *, option=default)`"),
        ("replay", f"{OWN}:Again", {"ratio": 1.0}, "set self.ratio between 0 and 1"),
        ("replay", f"{OWN}:Again", {"max_uses": 1}, "set self.max_uses to 2 or more"),
        ("replay", f"{OWN}:Again", {"max_staleness": 0}, "set self.max_staleness to 1 or more"),
    ],
)
def test_what_does_not_fit_is_told_with_its_cure(
    hook: str, name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rule(hook, name, options, Assigned())
    assert str(caught.value).startswith(f"rule {hook}: {name}: ")
    assert says in str(caught.value)


def test_the_example_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[4].joinpath("docs/parts/rules.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
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
    page = Path(__file__).parents[4].joinpath("docs/parts/rules.md").read_text(encoding="utf-8")
    assert [name for _, name in SHIPPED if f"| `{name}` |" not in page] == []
