# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, compiled so that it can only format messages, within MAX_RENDER_S and
MAX_MADE_BYTES.

Owns the sandbox: no attribute of Python objects, no change of values, a deadline that every loop
and macro checks, and a bound on all text and lists that one rendering makes, checked before they
are made. Refuses a template that does not compile. A chat template comes with a model, so it is a
program of the model's author.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.errors import WeightsError

MAX_RENDER_S = 5.0
"""CPU time of one rendering, of its thread; a long conversation takes milliseconds."""
MAX_PRODUCT = 1 << 20
"""Elements or bits that one multiplication or power may make."""
MAX_MADE_BYTES = 1 << 30
"""Of all that one rendering makes, whether it is kept or not."""
MAX_WIDTH = 4096
"""Of a column that text is padded to."""
_WIDTHS = frozenset(("center", "expandtabs", "indent", "ljust", "rjust", "wordwrap", "zfill"))
_UNBOUNDED = frozenset(("format_map", "translate"))
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|[0-9]{5,}|[0-9]*\.(?:\*|[0-9]{5,}))")
_WIDE_BRACE = re.compile(r"\{[^{}]*(?:\{|[:.][^{}]*[0-9]{5,})")
_OF_COLLECTIONS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "int", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    )
)
"""Filters that make no text of the collection that they get."""


class BoundedTemplate:
    def __init__(self, source: str, *, max_s: float = MAX_RENDER_S) -> None:
        self._environment = environment = _BoundedEnvironment()
        self._max_s = max_s
        environment.start(max_s)  # constants are computed now
        try:
            tree = environment.parse(source)
            _Joins().visit(tree)
            _add_checks(tree)
            code = environment.compile(tree)
        except TemplateError as error:
            raise WeightsError(f"the snapshot's chat template does not compile: {error}") from None
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, **values: Any) -> str:
        """Raises TemplateError when the template takes too long, or makes too much."""
        self._environment.start(self._max_s)
        try:
            return self._template.render(**values)
        except (RecursionError, MemoryError) as error:
            raise TemplateError(f"the template makes too much: {type(error).__name__}") from None


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
            finalize=self.finalized,
        )
        self.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
        for name, function in [*self.filters.items()]:
            self.filters[name] = self._bounded(name, function)
        functions = cast(dict[str, object], self.globals)
        functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del functions["lipsum"]
        self._limits = threading.local()

    def start(self, max_s: float) -> None:
        limits = self._limits
        limits.max_s, limits.at, limits.num_bytes = max_s, time.thread_time() + max_s, 0

    def check_deadline(self) -> None:
        """Called by every turn of a loop and every call of a macro."""
        if time.thread_time() > self._limits.at:
            raise TemplateError(f"the template ran for more than {self._limits.max_s:g} s")

    def charge(self, num_bytes: int) -> None:
        """Something of this size is about to be made."""
        self._limits.num_bytes += num_bytes
        if self._limits.num_bytes > MAX_MADE_BYTES:
            raise TemplateError(f"the template makes more than {MAX_MADE_BYTES >> 20} MiB")

    # --- where text and lists are made ------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list | tuple):
                self.charge(_num_bytes(left) + _num_bytes(right))
        elif operator == "%":
            if isinstance(left, str):
                values = cast(Sequence[Any], right) if isinstance(right, tuple) else (right,)
                self._check_format(left, "%", values)
        elif _size(operator, left, right) > MAX_PRODUCT:
            raise TemplateError(f"the template makes a value of more than {MAX_PRODUCT} elements")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            __self._check(method.__name__, text, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its arguments first."""
        first = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *others = (*args[first:], *kwargs.values())
            if name == "join" and not hasattr(value, "__len__"):
                value = [*value]
                args = (*args[:first], value, *args[first + 1 :])
            if any(_is_whole(one) and abs(one) > MAX_PRODUCT for one in others):
                raise TemplateError(f"a chat template may not give {name} such a number")
            if name == "tojson":
                indent = max((one for one in others if _is_whole(one)), default=0)
                self.charge(_text_bytes(value) * (1 + indent))
            elif name == "join":
                self._check("join", str(others[0]) if others else "", (value,))
            elif name == "format":
                self._check_format(str(value), "%", others)
            else:
                if name not in _OF_COLLECTIONS and not isinstance(value, str):
                    self.charge(_text_bytes(value))
                self._check(name, value, others)
            return function(*args, **kwargs)

        return bounded

    def _check(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Before a method of a text, or a filter of the same name."""
        if name in _UNBOUNDED:
            raise TemplateError(f"a chat template may not call {name}")
        if name in _WIDTHS and any(_width(one) > MAX_WIDTH for one in others):
            raise TemplateError(f"the template pads text to more than {MAX_WIDTH} columns")
        if name == "indent" and isinstance(value, str):
            width = max((_width(one) for one in others), default=4)
            self.charge(_num_bytes(value) + value.count("\n") * width)
        if name == "replace" and isinstance(value, str) and len(others) > 1:
            old, new = (str(one) for one in others[:2])
            self.charge(_num_bytes(value) + value.count(old) * _num_bytes(new))
        if name == "format":
            self._check_format(value, "{", others)
        if name == "join" and others and hasattr(others[0], "__len__"):
            parts = cast(Sequence[Any], others[0])
            self.charge(_text_bytes(parts) + len(parts) * _num_bytes(value))

    def _check_format(self, text: str, mark: str, values: Sequence[Any]) -> None:
        """Of a text with places for values: each may hold the longest of them."""
        is_percent = mark == "%"
        plain = text if is_percent else text.replace("{{", "").replace("}}", "")
        if (_WIDE_PERCENT if is_percent else _WIDE_BRACE).search(plain):
            raise TemplateError(f"the template pads text to more than {MAX_WIDTH} columns")
        longest = max(map(_text_bytes, values), default=0)
        self.charge(_num_bytes(text) + text.count(mark) * (longest + MAX_WIDTH))

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        self.charge(sum(map(_text_bytes, parts)))
        return "".join(map(str, parts))

    def finalized(self, value: Any) -> Any:
        """What is written: texts are counted when they are joined."""
        if not isinstance(value, str):
            self.charge(_text_bytes(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a block, a macro or the template."""
        made: list[str] = []
        for part in parts:
            self.charge(_num_bytes(part))
            made.append(part)
        return "".join(made)


class _Joins(NodeTransformer):
    """Makes the operator `~`, which no environment can intercept, a call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None).set_lineno(node.lineno)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _width(value: Any) -> int:
    return value if _is_whole(value) else len(value) if isinstance(value, str) else 0


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    return 8 * len(value) if hasattr(value, "__len__") else 8


def _text_bytes(value: Any) -> int:
    """Of its text: what stands in it twice is written twice, and made once."""
    known: dict[int, int] = {}

    def measure(one: Any) -> int:
        if isinstance(one, str):
            return 2 * _num_bytes(one) + 2
        if not isinstance(one, list | tuple | dict):
            return 64 if not isinstance(one, int) else 16 + one.bit_length() // 3
        found = known.get(id(cast(object, one)))
        if found is None:
            items = cast(Any, one)
            parts: Iterable[Any] = items.items() if isinstance(one, dict) else items
            found = 2 + sum(measure(part) + 4 for part in parts)
            known[id(cast(object, one))] = found
        return found

    return _num_bytes(value) if isinstance(value, str) else measure(value)


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
