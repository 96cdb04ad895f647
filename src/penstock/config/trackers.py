# SPDX-License-Identifier: Apache-2.0
"""Names of trackers, as `report_to` and `penstock track --to` take them. Imports none of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from penstock.config.base import is_custom
from penstock.plugins import TRACKER_GROUP, builtin_names, plugin_names, unknown

TRACKERS_PACKAGE = "penstock.observe.trackers"
"""Its modules are the built-in trackers."""


def check_tracker(name: str) -> str:
    """The name of a tracker, or ValueError."""
    builtin = builtin_names(TRACKERS_PACKAGE)
    if name in builtin or is_custom(name, TRACKER_GROUP):
        return name
    known = (*builtin, *plugin_names(TRACKER_GROUP))
    raise ValueError(unknown("tracker", name, known, also="module:Class"))


TrackerName = Annotated[str, AfterValidator(check_tracker)]
"""A built-in tracker, one that an installed package offers, or `module:Class`."""
