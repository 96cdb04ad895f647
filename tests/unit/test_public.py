# SPDX-License-Identifier: Apache-2.0
"""What the package promises to everybody: documented and typed names, no torch, quick to import."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any, cast

import pytest

import penstock

CORE = (
    "penstock.cli.main",
    "penstock.config",
    "penstock.dataflow.client.dataflow",
    "penstock.dataflow.service.server",
    "penstock.weights.client",
    "penstock.weights.serving.server",
    "penstock.fleet.launchers.local",
    "penstock.fleet.launchers.ray_cluster",
    "penstock.audit",
    "penstock.conformance",
    "penstock.observe",
)
HEAVY = ("torch", "transformers", "tokenizers", "jinja2", "safetensors", "vllm", "ray")
NAMES = [name for name in penstock.__all__ if not name.startswith("_")]


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_members(value: object) -> Iterator[tuple[str, Any]]:
    """A public function, or the public methods and properties that a public class defines."""
    if not inspect.isclass(value):
        yield value.__name__ if inspect.isfunction(value) else "", value
        return
    homes = [kind for kind in value.__mro__ if kind.__module__.startswith("penstock.")]
    for name, member in ((n, m) for home in homes for n, m in vars(home).items()):
        is_ours = not name.startswith("_") or name in ("__init__", "__call__")
        found: Any = getattr(member, "__func__", getattr(member, "fget", member))
        if is_ours and inspect.isfunction(found) and found.__module__.startswith("penstock."):
            yield f"{value.__name__}.{name}", found


def test_a_name_is_where_the_editor_looks_and_where_python_looks() -> None:
    """The three lists agree: what editors import, what Python imports, what is announced."""
    tree = ast.parse(Path(penstock.__file__).read_text())
    for_editors = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = cast(dict[str, tuple[str, ...]], vars(penstock)["_HOMES"])
    assert for_editors == {(module, name) for module, names in homes.items() for name in names}
    assert sorted(name for names in homes.values() for name in names) == sorted(NAMES)
    assert dir(penstock) == sorted(penstock.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "Tasks"
    with pytest.raises(AttributeError, match="no attribute 'Tasks'"):
        getattr(penstock, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    value: Any = getattr(penstock, name)
    assert value.__module__.startswith("penstock."), "a name of ours, not of a library"
    doc: str | None = value.__doc__
    assert doc and not doc.startswith(f"{name}("), "written, and not made by a dataclass"
    for where, function in own_members(value):
        signature = inspect.signature(function)
        unnamed = [
            parameter.name
            for at, parameter in enumerate(signature.parameters.values())
            if parameter.annotation is parameter.empty
            and not (at == 0 and parameter.name in ("self", "cls"))
        ]
        assert not unnamed, f"{where}: no type for {', '.join(unnamed)}"
        assert signature.return_annotation is not signature.empty, f"{where}: no return type"
        is_explained_by_its_class = where.endswith((".__init__", ".__call__"))
        if not is_explained_by_its_class:
            assert function.__doc__, f"{where} has no docstring"


def test_importing_loads_nothing_else_and_costs_nothing() -> None:
    def best_of_five(program: str) -> float:
        """Processor time: a busy machine does not add to it."""
        took: list[float] = []
        for _ in range(5):
            before = os.times()
            run_python(program)
            after = os.times()
            children_s = after.children_user - before.children_user
            took.append(children_s + after.children_system - before.children_system)
        return min(took)

    loaded = run_python(
        "import sys; before = set(sys.modules); import penstock, json\n"
        "print(json.dumps(sorted(n for n in set(sys.modules) - before if 'penstock' in n)))"
    )
    assert json.loads(loaded) == ["penstock"]
    # At most 0.15 s on an ordinary machine, and this one may have two fifths of its speed.
    assert best_of_five("import penstock") - best_of_five("pass") <= 0.15 / 0.4


def test_no_public_name_needs_anything_heavy() -> None:
    """A module that is None in sys.modules cannot be imported, as if it were not there."""
    program = (
        f"import sys, penstock\n"
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
        f"for name in penstock.__all__: getattr(penstock, name)\n"
    )
    run_python(program)


def test_the_core_names_no_heavy_dependency() -> None:
    core = [line for line in requires("penstock-rl") or [] if "extra ==" not in line]
    assert core and not [line for line in core if line.lower().startswith(HEAVY)]


def test_the_core_runs_where_nothing_heavy_is_installed() -> None:
    program = (
        f"import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
        f"for name in {CORE!r}: importlib.import_module(name)\n"
    )
    run_python(program)
