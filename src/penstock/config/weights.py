# SPDX-License-Identifier: Apache-2.0
"""Settings of weight transfer from trainers to nodes."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.config.base import OBJECT_STORES, Section, is_url
from penstock.config.stages import Tags
from penstock.plugins import quoted


def _read_mirror(value: object) -> object:
    if value == "" or (isinstance(value, str) and is_url(value, *OBJECT_STORES, "file")):
        return value
    raise ValueError(
        f"{quoted(value)} does not name an object store; write s3://bucket/run, gs://… or az://…"
    )


class WeightsConfig(Section):
    """How versions are stored and transferred."""

    transfer: Literal["auto", "delta", "full"] = "auto"
    """What nodes fetch: auto picks the faster one by the measured speed of the link, delta fetches
    changes whenever they are smaller, full always fetches complete files."""
    mirror: Annotated[str, BeforeValidator(_read_mirror)] = ""
    """Object storage that mirrors the store, for remote relays: s3://bucket/run, with a prefix for
    this run only. Credentials come from the environment."""
    anchor_every: int = Field(default=25, ge=1, le=32)
    """The store keeps one complete version in this many; the others are rebuilt from deltas."""
    place: Tags | None = None
    """Tags that the host of the weight server must have. It runs beside the launcher, which refuses
    to start on another host; null: none."""
