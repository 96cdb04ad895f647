# SPDX-License-Identifier: Apache-2.0
"""Settings of weights on their way from trainers to nodes."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from penstock.config.base import OBJECT_STORES, Section, is_url, one_of, quoted


def _read_mirror(value: object) -> object:
    if value == "" or (isinstance(value, str) and is_url(value, *OBJECT_STORES, "file")):
        return value
    raise ValueError(
        f"{quoted(value)} names no object store; write s3://bucket/run, gs://… or az://…"
    )


class WeightsConfig(Section):
    """How versions are kept and travel."""

    transfer: Annotated[Literal["auto", "delta", "full"], one_of("auto", "delta", "full")] = "auto"
    """What nodes fetch: auto takes what is there sooner by the measured speed of the link, delta
    what changed whenever that is smaller, full always whole files."""
    mirror: Annotated[str, BeforeValidator(_read_mirror)] = ""
    """Object storage that is kept equal to the store, for relays far away: s3://bucket/run, with a
    prefix for this run alone. Credentials come from the environment."""
    anchor_every: int = Field(default=25, ge=1, le=32)
    """So many versions apart the store keeps one whole; the others between are made from deltas."""
