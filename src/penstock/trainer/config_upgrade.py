# SPDX-License-Identifier: Apache-2.0
"""Upgrades configs that an older penstock recorded.

Owns the values of keys that did not exist then. Compares nothing."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, cast

from pydantic import ValidationError

from penstock.config import RunConfig, identity
from penstock.config.error_messages import path_text
from penstock.options import KeyPath

_NOTHING = object()


def upgrade_saved_config(saved: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """An older config with every missing key at today's default, as if its file were read again;
    over how many steps a learning rate decayed was not recorded."""
    today = identity(config)
    absent = today.keys() - saved.keys()
    defaults = _defaults(config, absent) if absent else {}
    schedules = {key: text for key, text in today.items() if _is_now(saved.get(key), text)}
    return {**{key: defaults[key] for key in absent & defaults.keys()}, **saved, **schedules}


def _is_now(saved: str | None, text: str) -> bool:
    return saved is not None and text.startswith(f"{saved} over ")


def _defaults(config: RunConfig, absent: Set[str]) -> dict[str, str]:
    """The config without these keys; empty if it is invalid without them."""
    try:
        rest = RunConfig.model_validate(_without(config.model_dump(mode="json"), (), absent))
    except ValidationError:
        return {}
    return identity(rest)


def _without(value: Any, path: KeyPath, absent: Set[str]) -> Any:
    """`_NOTHING` for a key that is absent, and for a section of which no key is left."""
    if isinstance(value, dict) and value:
        entries = cast(dict[str, Any], value).items()
        below = {key: _without(one, (*path, key), absent) for key, one in entries}
        return {key: one for key, one in below.items() if one is not _NOTHING} or _NOTHING
    if isinstance(value, list) and value:
        items = enumerate(cast(list[Any], value))
        listed = [_without(one, (*path, index), absent) for index, one in items]
        return [one for one in listed if one is not _NOTHING] or _NOTHING
    return _NOTHING if path_text(path) in absent else value
