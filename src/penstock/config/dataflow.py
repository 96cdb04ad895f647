# SPDX-License-Identifier: Apache-2.0
"""Settings of the dataflow service: stores, bounds, leases, closing of groups, stages, rules,
balance report.

Owns their defaults and the contradictions inside the section. Builds nothing."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from penstock.config.base import FUNCTION, OBJECT_STORES, Name, Section, is_url, repeated_names
from penstock.config.rules import SHARED_HOOKS, Rules, rule_contradictions
from penstock.config.stages import MAX_STAGES, StageConfig, Tags
from penstock.options import Contradiction, at_most, unknown_choice
from penstock.plugins import quoted


class LeaseConfig(Section):
    """How long work may be held."""

    ttl_s: float = Field(default=12.0, gt=0)
    """Seconds a node may hold a slot without a heartbeat."""
    max_attempts: PositiveInt = 3
    """Attempts at one slot before it ends as failed."""
    start_to_close_s: float = Field(default=600.0, gt=0)
    """Seconds one attempt may run before it is truncated."""
    schedule_to_start_s: float | None = Field(default=None, gt=0)
    """Seconds a slot may wait for a node; null for no limit."""
    schedule_to_close_s: float | None = Field(default=None, gt=0)
    """Seconds from issue in which a slot must end, including all attempts; null for no limit."""


class SurvivorsConfig(Section):
    """When a group with failed members still counts."""

    min: int = Field(ge=2)
    """Smallest number of successful members for a group to be kept; at least two to compare."""


class SurvivorsClosing(Section):
    """Keep a group with few failed members, and compare the others."""

    survivors: SurvivorsConfig
    """Written `{survivors: {min: 4}}` or, shorter, `survivors(4)`."""


_SURVIVORS_CALL = re.compile(r"survivors\(\s*(?:min\s*=\s*)?([0-9]{1,9})\s*\)")


def _read_closing(value: object) -> object:
    if not isinstance(value, str):
        return value
    if match := _SURVIVORS_CALL.fullmatch(value):
        return {"survivors": {"min": int(match[1])}}
    if value in ("complete", "drop"):
        return value
    raise unknown_choice(value, ("complete", "drop", "survivors(4)"))


def _closing_kind(value: object) -> str:
    return "<mapping>" if isinstance(value, Mapping | SurvivorsClosing) else "<word>"


ClosingConfig = Annotated[
    Annotated[Literal["complete", "drop"], Tag("<word>")]
    | Annotated[SurvivorsClosing, Tag("<mapping>")],
    Discriminator(_closing_kind),
    BeforeValidator(_read_closing),
]
"""How a group closes once all its slots are terminal; `<…>` tags never appear in messages."""


def _read_store(value: object) -> object:
    if value == "sqlite":
        return value
    if isinstance(value, str) and value.startswith("postgres"):
        if is_url(value, "postgresql") and urlsplit(value).path.strip("/"):
            return value
        raise ValueError(
            f"{quoted(value)} does not name a database; write postgresql://host/database"
        )
    raise unknown_choice(value, ("sqlite", "postgresql://host/database"))


_PAYLOADS = ("segments", "memory", "s3://bucket/prefix", "file:///folder", "module:Class")


def _read_payload(value: object) -> object:
    if not isinstance(value, str) or "/" not in value:
        is_class = isinstance(value, str) and FUNCTION.fullmatch(value)
        if is_class or value in ("segments", "memory"):
            return value
        raise unknown_choice(value, _PAYLOADS)
    if not is_url(value, *OBJECT_STORES, "file"):
        raise ValueError(f"{quoted(value)} does not name a store; use {' | '.join(_PAYLOADS)}")
    return value


class BoundsConfig(Section):
    """Memory and disk the service may use before it refuses work."""

    memory_mb: PositiveInt = 2048
    """Memory of one process; above it, new leases are refused."""
    disk_free_mb: PositiveInt = 1024
    """Free disk below which new leases are refused."""
    disk_reserve_mb: PositiveInt = 64
    """Free disk below which deliveries are refused too, with status 507."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.disk_reserve_mb >= self.disk_free_mb:
            text = (
                f"disk_reserve_mb {self.disk_reserve_mb} is not below disk_free_mb "
                f"{self.disk_free_mb}, so leased work could not be delivered; set it lower"
            )
            yield Contradiction(text=text, keys=(("disk_reserve_mb",), ("disk_free_mb",)))


Share = Annotated[float, Field(gt=0, lt=1)]


class ReportConfig(Section):
    """When the balance report recommends another size of the rollout pool."""

    tau_low: Share = 0.02
    """Trainers that wait less than this share of their time need fewer GPUs."""
    tau_high: Share = 0.05
    """Trainers that wait more than this share of their time need more GPUs."""
    rho: float = Field(default=1.10, ge=1, le=10)
    """Headroom: a new size is this multiple of what the trainers need."""
    window: PositiveInt = 10
    """Versions that some policy trains between two decisions."""
    min_gpus: PositiveInt = 1
    """Never recommend fewer GPUs."""
    max_gpus: PositiveInt | None = None
    """Never recommend more GPUs; null for no limit."""
    node_start_s: float = Field(default=0.0, ge=0)
    """Seconds from requesting a node to its first lease, if longer than measured from its join; the
    cool-down after a decision lasts at least 1.5 times as long."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.tau_low >= self.tau_high:
            yield Contradiction(
                text=f"tau_low {self.tau_low} leaves no zone below tau_high {self.tau_high}; "
                "set tau_low < tau_high",
                keys=(("tau_low",), ("tau_high",)),
            )
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            yield Contradiction(
                text=f"max_gpus {self.max_gpus} is below min_gpus {self.min_gpus}; "
                "set max_gpus >= min_gpus",
                keys=(("max_gpus",), ("min_gpus",)),
            )


class SpaceConfig(Section):
    """Rows kept separate from all others, and cleared separately."""

    name: Name
    """Names the space, such as eval."""
    quota_mb: PositiveInt | None = None
    """Largest payload it may hold; null for no separate limit."""


_SAMPLE_CALL = re.compile(r"sample\(\s*(?:share\s*=\s*)?([0-9.eE+-]{1,24})\s*\)")
_KEEPS = ("all", "sample(0.1)", "window")


def sample_share(keep: str) -> float:
    """The share in `sample(share)`; 1 for the other words."""
    match = _SAMPLE_CALL.fullmatch(keep)
    return float(match[1]) if match else 1.0


def _read_keep(value: object) -> object:
    if not isinstance(value, str) or not (value in _KEEPS or _SAMPLE_CALL.fullmatch(value)):
        raise unknown_choice(value, _KEEPS)
    try:
        is_share = 0 < sample_share(value) <= 1
    except ValueError:
        is_share = False
    if not is_share:
        raise ValueError(f"{quoted(value)}: the share is above 0 and at most 1; use sample(0.1)")
    return value


class SharingConfig(Section):
    """Resources that roll out and train: nodes with the tag `train`."""

    batches: PositiveInt = 1
    """Complete batches that must wait before such nodes pause and the trainer starts. More of them
    mean fewer changes, and data that is older by as many versions."""
    timeout_s: PositiveFloat = 60.0
    """Seconds of rollout after which one batch is enough."""


class DataflowConfig(Section):
    """The dataflow service of a run."""

    store: Annotated[str, BeforeValidator(_read_store)] = "sqlite"
    """Where the ledger's metadata is: sqlite, or a postgresql:// URL."""
    payload: Annotated[str, BeforeValidator(_read_payload)] = "segments"
    """Where trajectories are: segments (files on this disk), memory (lost with the process), a URL
    of an object store or shared folder, or `module:Class`."""
    partitions: PositiveInt = 1
    """Processes that hold slots, leases and payload."""
    place: Tags | None = None
    """Tags that the host of the service and its partitions must have. They run beside the launcher,
    which refuses to start on another host; null: none."""
    lease: LeaseConfig = LeaseConfig()
    """How long work may be held, and how often it is tried."""
    closing: ClosingConfig = "complete"
    """How a group closes once all its slots are terminal: complete | drop | survivors(min)."""
    pace: str = "any"
    """Whose free capacity starts work: any policy, all policies, or one policy by name."""
    max_partner_lag: NonNegativeInt | None = None
    """Versions that tokens of the other policies in a trajectory may be behind the newest version
    of their policy when a batch is sealed; groups beyond are dropped. Null for no limit."""
    rules: Rules = ()
    """Data decisions; a hook without a rule uses its default."""
    stages: Annotated[tuple[StageConfig, ...], Field(strict=False), at_most(2 * MAX_STAGES)] = ()
    """Workers that add columns to rows; services of the pipeline are added to this list."""
    spaces: Annotated[tuple[SpaceConfig, ...], Field(strict=False)] = ()
    """Named spaces with quotas."""
    bounds: BoundsConfig = BoundsConfig()
    """Memory and disk the service may use before it refuses work."""
    report: ReportConfig = ReportConfig()
    """When the balance report recommends another size of the rollout pool."""
    sharing: SharingConfig = SharingConfig()
    """When resources that roll out and train change over."""
    retain_batches: PositiveInt = 8
    """Number of last batches whose rows are kept until a trainer names a checkpoint."""
    keep: Annotated[str, BeforeValidator(_read_keep)] = "all"
    """Which trajectories stay on disk for reading after training: all, sample(share) of the groups,
    or the window of the newest. Above keep_mb, all and sample(share) keep every second group."""
    keep_mb: PositiveInt = 1024
    """Payload of trajectories that training needs no longer. Its files take up to twice that, plus
    two segments of a quarter of it each (at least 16 MB, at most 256 MB)."""

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from rule_contradictions(self.rules)
        yield from self._mixed_durability()
        yield from repeated_names("space", [space.name for space in self.spaces], "spaces")

    def _mixed_durability(self) -> Iterator[Contradiction]:
        """To survive the loss of a host, metadata and payload must both be elsewhere."""
        is_remote_store = self.store != "sqlite" and not _is_local(self.store)
        is_local_payload = self.payload in ("segments", "memory")
        if is_remote_store and is_local_payload:
            text = (
                f"payload {self.payload} is local but the metadata is in PostgreSQL: losing this "
                "machine would lose the trajectories; set payload to s3://bucket/prefix or a "
                "shared file:///folder, or store: sqlite"
            )
        elif self.store == "sqlite" and urlsplit(self.payload).scheme in OBJECT_STORES:
            text = (
                "sqlite is local but the payload is in object storage: losing this machine would "
                "make it unreadable; set store to postgresql://host/database, or payload: segments"
            )
        else:
            return
        yield Contradiction(text=text, keys=(("payload",), ("store",)))


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in (None, "localhost", "127.0.0.1", "::1")


class PolicyDataflowConfig(Section):
    """Dataflow settings that may differ by policy."""

    rules: Rules = ()
    """Take priority over the shared rules, hook by hook."""

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from rule_contradictions(self.rules)
        for index, rule in enumerate(self.rules):
            if rule.hook in SHARED_HOOKS:
                yield Contradiction(
                    text=f"{rule.hook} decides before the policy is known; "
                    "move this entry to dataflow.rules",
                    keys=(("rules", index), ("rules",)),
                )
