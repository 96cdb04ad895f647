# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, compiled so that it can only format messages, within MAX_RENDER_S.

Owns the sandbox: no attribute of Python objects, no change of values, a deadline that every loop
and macro checks, and a bound on what multiplication makes. Refuses a template that does not
compile. A chat template comes with a model, so it is a program of the model's author.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import WeightsError

MAX_RENDER_S = 5.0
"""CPU time of one rendering, of its thread; a long conversation takes milliseconds."""
MAX_PRODUCT = 1 << 20
"""Elements or bits that one multiplication or power may make."""


class BoundedTemplate:
    def __init__(self, source: str, *, max_s: float = MAX_RENDER_S) -> None:
        self._environment = environment = _BoundedEnvironment()
        self._max_s = max_s
        try:
            tree = environment.parse(source)
            _add_checks(tree)
            code = environment.compile(tree)
        except TemplateError as error:
            raise WeightsError(f"the snapshot's chat template does not compile: {error}") from None
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, **values: Any) -> str:
        """Raises TemplateError when the template takes too long."""
        self._environment.start(self._max_s)
        return self._template.render(**values)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
        functions = cast(dict[str, object], self.globals)
        functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._deadlines = threading.local()

    def start(self, max_s: float) -> None:
        self._deadlines.max_s, self._deadlines.at = max_s, time.thread_time() + max_s

    def check_deadline(self) -> None:
        """Called by every turn of a loop and every call of a macro."""
        if time.thread_time() > self._deadlines.at:
            raise TemplateError(f"the template ran for more than {self._deadlines.max_s:g} s")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_PRODUCT:
            raise TemplateError(f"the template makes a value of more than {MAX_PRODUCT} elements")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> float:
    """Elements of a repeated text or list, bits of a number."""
    if operator == "**":
        is_whole = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * abs(right) if is_whole else 0
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int):
            return len(sequence) * times
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return 0


def _add_checks(tree: nodes.Template) -> None:
    """At the start of each loop's and macro's body: no name of the template can replace it."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        check = nodes.EnvironmentAttribute("check_deadline")
        call = nodes.ExprStmt(nodes.Call(check, [], [], None, None))
        node.body.insert(0, call.set_lineno(node.lineno))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern[:100])


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
