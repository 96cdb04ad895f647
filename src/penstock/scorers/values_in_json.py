# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON and back: tuples, sets, mappings with any keys, bytes, infinities.

Goes as source text into both sandboxes of the scorer `code`, so it imports nothing but the standard
library. Trusts nothing it reads: it makes plain values only."""

import json
import math
from typing import Any, cast


def pack(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold; TypeError names the type that it cannot."""
    if depth > 50:
        raise TypeError("nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, list):
        return [pack(one, depth + 1) for one in cast("list[Any]", value)]
    for kind, name in ((tuple, "tuple"), (set, "set"), (frozenset, "frozenset")):
        if isinstance(value, kind):
            return {name: [pack(one, depth + 1) for one in cast("list[Any]", value)]}
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {"dict": [[pack(k, depth + 1), pack(v, depth + 1)] for k, v in pairs]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [pack(value.real), pack(value.imag)]}
    raise TypeError(f"a value of type {type(value).__name__} cannot leave the sandbox")


def unpack(value: Any) -> Any:
    """The value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = cast("dict[str, Any]", value).items()
    if kind == "float":
        return float(inside)
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "complex":
        return complex(unpack(inside[0]), unpack(inside[1]))
    if kind == "dict":
        return {unpack(k): unpack(v) for k, v in inside}
    kinds: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind](unpack(one) for one in inside)


def called_by_name(names: dict[str, Any], path: str, arguments: str) -> str:
    """In the sandbox of the solution: call the function, or the method as `Class.method`."""
    owner, _, name = path.rpartition(".")
    target = names[owner]() if owner else None
    function = getattr(target, name) if owner else names[name]
    positional, named = unpack(json.loads(arguments))
    return json.dumps(pack(function(*positional, **named)))


def candidate(solution: Any, path: str) -> Any:
    """In the sandbox of the tests: the function of the solution, as an ordinary function."""

    def call(*positional: Any, **named: Any) -> Any:
        arguments = json.dumps(pack([list(positional), named]))
        return unpack(json.loads(solution.call("penstock_call", path, arguments)))

    return call
