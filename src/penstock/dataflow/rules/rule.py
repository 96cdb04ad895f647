# SPDX-License-Identifier: Apache-2.0
"""The base class of rules: fields are the options, `_state` is the memory.

Owns how a rule declares its hook, its name in configs and its options, once. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr

from penstock.options import Options
from penstock.types import Hook

State = MutableMapping[str, Any]


class Rule(Options):
    """A rule at one hook. A subclass sets `hook` and `name`, and each field is an option."""

    hook: ClassVar[Hook]
    """Where it decides."""
    name: ClassVar[str]
    """Its name in configs."""

    _state: State = PrivateAttr(default_factory=dict[str, Any])

    @classmethod
    def build(cls, state: State, options: Mapping[str, Any]) -> Self:
        """The rule with these options and this memory."""
        rule = cls.model_validate(dict(options))
        rule._state = state
        rule._load_state()
        return rule

    def _load_state(self) -> None:
        """Derive indexes from the memory; called once, before the first decision."""
