# SPDX-License-Identifier: Apache-2.0
"""Environments that the workflow of a source plays against, each behind a bridge process.

Owns the shape of `env:` on a source. Starts no process and imports no library."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt

from penstock.config.base import FUNCTION, Section, matching, non_blank
from penstock.options import Contradiction, non_empty

LIBRARIES = ("gymnasium", "openenv", "verifiers", "reasoning_gym")
"""Libraries with a bridge of ours. Each runs in a separate virtual environment."""

HookName = Annotated[
    str, AfterValidator(matching(FUNCTION, "write module:function, like my_env:shorten"))
]
_Text = Annotated[str, AfterValidator(non_blank)]


class EnvironmentConfig(Section):
    """An environment: exactly one of gymnasium, openenv, verifiers, reasoning_gym and command."""

    gymnasium: _Text | None = None
    """Id of a registered environment, such as FrozenLake-v1."""
    openenv: _Text | None = None
    """`module:app` of an OpenEnv server, which is started beside its client."""
    verifiers: _Text | None = None
    """Id of a taskset: a module with a Taskset. It plays by itself."""
    reasoning_gym: _Text | None = None
    """Name of a procedural data set, such as leg_counting."""
    command: Annotated[tuple[str, ...], Field(strict=False), non_empty()] | None = None
    """Your own bridge: a program that speaks the protocol on its standard input and output."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the environment, such as {is_slippery: false}."""
    actions: Mapping[str, int] = Field(default_factory=dict[str, int])
    """gymnasium: words of the model to numbers of actions, such as {left: 0}; empty: the model
    writes the number."""
    action_field: _Text | None = None
    """openenv: the field of an action that the model's text fills; null: the text is JSON."""
    num_tasks: PositiveInt | None = None
    """Distinct tasks where the source has no `task` or `data`; null: every task is new."""
    path: _Text = "."
    """Folder of your modules, relative to the working directory."""
    python: _Text | None = None
    """Interpreter of the library's virtual environment; null: the one of `make setup-envs`."""
    calls_model: bool = False
    """command: the environment plays by itself, and calls the model over HTTP."""
    max_episodes: PositiveInt = 32
    """Episodes at the same time, on each node; further attempts wait."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Most seconds from the start of the bridge to its first answer."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """Most seconds of `reset`; of the whole episode where the environment plays by itself."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Most seconds of `step` and of `score`."""
    lease_s: float = Field(default=60.0, gt=0)
    """The bridge ends an episode after `lease_s` seconds without renewal by its node."""
    before_step: HookName | None = None
    """`module:function` of (action, task): returns the action to take."""
    after_step: HookName | None = None
    """`module:function` of (observation, task): returns the observation to show."""

    @property
    def library(self) -> str:
        """Its library; empty for a command."""
        return next((name for name in LIBRARIES if getattr(self, name) is not None), "")

    def _contradictions(self) -> Iterator[Contradiction]:
        kinds = [key for key in (*LIBRARIES, "command") if getattr(self, key) is not None]
        if len(kinds) != 1:
            text = f"env needs exactly one of {', '.join(LIBRARIES)} and command; "
            text += f"remove all but one of {', '.join(kinds)}" if kinds else "add one"
            yield Contradiction(text=text, keys=tuple((kind,) for kind in kinds[1:]) or ((),))
            return
        for key, owner in _ONLY_OF.items():
            if getattr(self, key) and owner not in kinds:
                text = f"{key} belongs to {owner}, and this environment is {kinds[0]}; remove it"
                yield Contradiction(text=text, keys=((key,),))
        if self.python is not None and self.command is not None:
            text = "python belongs to a library; name the interpreter first in command"
            yield Contradiction(text=text, keys=(("python",), ("command",)))


_ONLY_OF = {"actions": "gymnasium", "action_field": "openenv", "calls_model": "command"}
