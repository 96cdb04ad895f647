# SPDX-License-Identifier: Apache-2.0
"""`penstock plan capacity`: what a run of a given size needs, and what breaks first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.fleet.capacity import CapacityPlan


def capacity(
    *,
    gpus: Annotated[int, Parameter(required=True)],
    rollout_share: float = 0.75,
    tokens_per_gpu_s: float = 1500.0,
    trajectory_tokens: int = 8000,
    gpus_per_node: int = 8,
    model_gb: float = 16.0,
    version_s: float = 60.0,
    ttl_s: float = 12.0,
    cost_per_gpu_hour: float = 2.0,
    json: bool = False,
) -> int:
    """Show rates, partitions, relays and cost of a run of this size, and what breaks first.

    This is arithmetic from figures measured on two cores, not a measurement at this size; the page
    on growth explains each line.

    Args:
        gpus: GPUs of the run, for rollout and training.
        rollout_share: Share of them for rollout.
        tokens_per_gpu_s: Tokens that a rollout GPU samples per second.
        trajectory_tokens: Sampled tokens of a trajectory.
        gpus_per_node: GPUs of one node process.
        model_gb: Size of a version, in GB.
        version_s: Seconds between two versions.
        ttl_s: lease.ttl_s of the run.
        cost_per_gpu_hour: Price of one GPU for one hour, in any currency.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.errors import ConfigError
    from penstock.fleet.capacity import Workload, plan_capacity

    try:
        plan = plan_capacity(
            Workload(
                gpus=gpus,
                rollout_share=rollout_share,
                tokens_per_gpu_s=tokens_per_gpu_s,
                trajectory_tokens=trajectory_tokens,
                gpus_per_node=gpus_per_node,
                model_gb=model_gb,
                version_s=version_s,
                ttl_s=ttl_s,
                cost_per_gpu_hour=cost_per_gpu_hour,
            )
        )
    except ValueError as error:
        raise ConfigError(f"plan capacity: {error}") from None
    if json:
        print_json(plan)
    else:
        print_text("\n".join(_lines(plan)))
    return 0


def _lines(plan: CapacityPlan) -> Iterator[str]:
    load = plan.workload
    yield f"{load.gpus:,} GPUs: {plan.rollout_gpus:,} for rollout, {plan.train_gpus:,} to train"
    yield ""
    yield f"  {plan.tokens_per_s:,.0f} tokens/s sampled"
    yield (
        f"  {plan.trajectories_per_s:,.0f} trajectories/s of {load.trajectory_tokens:,} tokens, "
        f"{plan.payload_bytes_per_s / 1e6:,.0f} MB/s"
    )
    yield f"  {plan.nodes:,} nodes, {plan.heartbeats_per_s:,.0f} heartbeats/s at each partition"
    yield f"  {plan.partitions:,} partitions; {plan.relays:,} relays"
    yield (
        f"  {plan.fan_out_bytes / 1e9:,.0f} GB of deltas to all nodes per version; "
        f"{plan.origin_s:,.1f} s from one origin without relays"
    )
    yield f"  {plan.coordinator_bytes_per_s / 1e6:,.2f} MB/s through the coordinator"
    yield (
        f"  cost: {plan.cost_per_hour:,.0f} per hour, {plan.cost_per_million_tokens:,.2f} per "
        "million sampled tokens"
    )
    yield ""
    yield "what breaks, first comes first"
    for one in plan.limits:
        yield f"  {one.what}: load {one.load:.0%}, full at {one.at_gpus:,} GPUs; then {one.then}"
    yield ""
    yield "arithmetic from figures of two cores; no run of this size has taken place"
