# SPDX-License-Identifier: Apache-2.0
"""What every metric means: the table behind docs/reference/metrics.md and Prometheus' help texts.

Owns names, units and meanings. Measures nothing: a trainer computes the figures of a step, the
dataflow and weight servers measure themselves. A test compares the table with the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family of them where its name has a part in braces."""

    name: str
    unit: str
    """What one unit counts: s, tokens, versions, share (0 to 1), and so on; empty for text."""
    meaning: str
    labels: tuple[str, ...] = ()
    """Prometheus only."""
    kind: str = "gauge"
    """Prometheus only: gauge, counter or histogram."""


def _rows(*rows: tuple[str, str, str]) -> Mapping[str, Metric]:
    return {name: Metric(name=name, unit=unit, meaning=text) for name, unit, text in rows}


STEP_METRICS = _rows(
    ("time", "s", "When the line was written, in seconds since 1970."),
    ("policy", "", "The policy that was trained."),
    ("number", "versions", "Number of the version after this batch."),
    ("seq", "batches", "Number of the batch, counted from 1."),
    ("incarnation", "", "Which start of the trainer wrote the line; higher is newer."),
    ("skipped", "", "Why the batch changed no weights; empty if it was trained."),
    (
        "alarm",
        "",
        "What an operator should do now, a line each; absent if all is well.",
    ),
    ("reward/mean", "reward", "Mean reward of the batch's trajectories."),
    (
        "reward/role/{role}",
        "reward",
        "The same of one role, where roles have names; `(others)`: of all but the 256 that have "
        "the most tokens. A run has these of the roles in its file, and of the first 256 others.",
    ),
    ("tokens/role/{role}", "tokens", "Sampled tokens of that role in the batch."),
    ("completions/mean_length", "tokens", "Trained tokens per trajectory, all turns together."),
    ("tokens/trained", "tokens", "Tokens in the loss."),
    ("rows/excluded", "trajectories", "Trajectories that a stage masked."),
    ("advantage/zero_share", "share", "Trajectories without any credit."),
    ("staleness/mean", "versions", "Age of the batch's trajectories when they were trained."),
    ("staleness/max", "versions", "Age of the oldest one."),
    ("loss", "", "The loss, averaged over updates. It need not fall while the reward rises."),
    ("entropy", "nats", "Entropy of the policy per trained token; near 0 it explores no more."),
    ("kl", "nats", "Divergence (k3) of the policy from the one that sampled, per token."),
    ("reference_kl", "nats", "Divergence (k3) from the reference model, per token; needs `beta`."),
    ("teacher_kl", "nats", "Log-prob of the policy minus the teacher's, per token; `opd`."),
    ("ratio", "", "Mean ratio of new to sampling probability; 1 on fresh data."),
    ("ratio/square", "", "Mean squared ratio."),
    ("ratio/beyond", "share", "Tokens whose ratio is outside the clip bounds."),
    ("ratio/log_{quantile}", "nats", "Quantiles of the log ratio: q001, q01, q50, q99, q999."),
    ("clip_ratio", "share", "Tokens whose gradient the clip removed."),
    ("clip_ratio/low", "share", "The same, at the lower bound."),
    ("clip_ratio/high", "share", "The same, at the upper bound."),
    ("mismatch", "nats", "Mean |log ratio| of engine and trainer on fresh tokens."),
    ("mismatch/weight", "", "Mean weight that `correction` gives a token."),
    ("mismatch/rejected", "share", "Tokens that `correction` rejects."),
    ("mismatch/k3", "nats", "Divergence (k3) between engine and trainer, per token."),
    ("m2po/harmful", "share", "Tokens whose ratio moves against their advantage; `m2po`."),
    ("m2po/all_dropped", "share", "Updates in which no harmful token was within the budget."),
    ("m2po/second_moment", "nats²", "Mean squared log ratio, all tokens."),
    ("m2po/second_moment_kept", "nats²", "The same, with dropped tokens as 0."),
    ("m2po/second_moment_fresh", "nats²", "The same, with stale tokens as 0."),
    ("m2po/fresh", "share", "Tokens of the newest version."),
    ("m2po/radius", "nats", "Harmful tokens beyond this |log ratio| are dropped."),
    ("weight", "", "Mean weight of a token against stale data; `decoupled`."),
    ("weight/at_bound", "share", "Tokens whose weight is at its bound."),
    ("value", "reward", "Mean value that the critic predicts; `ppo`."),
    ("value/error", "", "Mean squared error of the critic."),
    ("value/clip_ratio", "share", "Tokens whose value was clipped."),
    (
        "{role}/{metric}",
        "",
        "The same figures of another trained stage, by its role: `critic/loss`.",
    ),
    ("signal/informative_groups", "share", "Groups whose trajectories differ in reward."),
    ("signal/effective_samples", "tokens", "Effective sample size under the ratio's weights."),
    ("signal/effective_share", "share", "The same, per trained token."),
    ("signal/clipped", "share", "Tokens with an advantage that were outside their clip bound."),
    ("signal/clipped_up", "share", "The same, of tokens with an advantage above 0."),
    ("signal/clipped_down", "share", "The same, of tokens with an advantage below 0."),
    ("process/rows", "rows", "Trajectories with step scores and an outcome."),
    ("process/score", "", "Mean step score of these trajectories; with process rewards."),
    ("process/score_std", "", "Standard deviation of their mean step scores."),
    ("process/outcome", "reward", "Mean reward of these trajectories."),
    ("process/outcome_std", "reward", "Standard deviation of their rewards."),
    ("process/correlation", "", "Correlation of step scores and rewards; 0 if either is constant."),
    ("gap/mean", "nats", "Mean |log ratio| of engine and trainer, over the freshest tokens."),
    ("gap/k3", "nats", "Divergence (k3) of engine and trainer, over the same tokens."),
    ("gap/max", "nats", "Largest |log ratio| among them."),
    ("gap/staleness", "versions", "Age of those tokens."),
    ("learning_rate", "", "Learning rate of the step."),
    ("grad_norm", "", "Norm of the gradient before clipping, averaged over updates."),
    ("updates", "updates", "Optimizer calls that were applied."),
    ("updates/non_finite", "updates", "Optimizer calls skipped: the gradient was not finite."),
    ("memory/peak_mb", "MiB", "Peak memory of the largest rank, since its start."),
    ("seconds", "s", "Reading the batch and training on it."),
    ("seconds/wait", "s", "Waiting for the batch."),
    ("seconds/read", "s", "Fetching its rows."),
    ("seconds/train", "s", "The training step."),
    ("seconds/publish", "s", "Handing over the weights of the version before."),
    ("seconds/eval", "s", "Evaluation, where a trainer reports it; penstock's own does not."),
    ("seconds/stage/{stage}", "s", "One stage of the pipeline."),
)
"""Keys of metrics.jsonl, one line per committed batch. A loss may add its own."""


PROMETHEUS = {
    metric.name: metric
    for metric in (
        Metric(
            name="penstock_trajectories_stored",
            unit="trajectories",
            meaning="Trajectories stored since the start of the dataflow service.",
            kind="counter",
        ),
        Metric(
            name="penstock_sampled_tokens",
            unit="tokens",
            meaning="Sampled tokens in those trajectories.",
            kind="counter",
        ),
        Metric(
            name="penstock_tokens_per_second",
            unit="tokens/s",
            meaning="Sampled tokens per second, recently.",
        ),
        Metric(name="penstock_nodes", unit="nodes", meaning="Registered rollout nodes."),
        Metric(
            name="penstock_node_tokens",
            unit="tokens",
            meaning="Tokens that a node's engines sampled and delivered, since it registered: the "
            "rate is the speed of its engines.",
            labels=("node",),
            kind="counter",
        ),
        Metric(
            name="penstock_node_leases",
            unit="leases",
            meaning="Slots that a node works on.",
            labels=("node",),
        ),
        Metric(
            name="penstock_node_silent_seconds",
            unit="s",
            meaning="Since the last call of a node.",
            labels=("node",),
        ),
        Metric(
            name="penstock_node_versions_behind",
            unit="versions",
            meaning="Published versions that the engines of a node have not loaded yet.",
            labels=("node", "policy"),
        ),
        Metric(
            name="penstock_training",
            unit="",
            meaning="Every figure of the newest step, as its trainer reported it: `metric` is the "
            "name in metrics.jsonl, such as `reward/mean` and `loss`.",
            labels=("policy", "metric"),
        ),
        Metric(
            name="penstock_skipped_batches",
            unit="batches",
            meaning="Batches that a trainer did not train.",
            labels=("policy",),
        ),
        Metric(
            name="penstock_reward",
            unit="reward",
            meaning="Rewards of the trajectories sealed into batches, since the start of the "
            "dataflow service.",
            labels=("policy",),
            kind="histogram",
        ),
        Metric(
            name="penstock_staleness",
            unit="versions",
            meaning="Staleness of the same trajectories.",
            labels=("policy",),
            kind="histogram",
        ),
        Metric(
            name="penstock_checked_rows",
            unit="rows",
            meaning="Rows of an untrusted credential that were generated again: all, and those "
            "with different tokens.",
            labels=("subject", "result"),
        ),
        Metric(
            name="penstock_checked_tokens",
            unit="tokens",
            meaning="Tokens generated to check an untrusted credential.",
            labels=("subject",),
        ),
        Metric(
            name="penstock_checked_seconds",
            unit="s",
            meaning="Time spent to check an untrusted credential.",
            labels=("subject",),
        ),
        Metric(
            name="penstock_queue_depth",
            unit="groups",
            meaning="Groups of a policy: issued (not judged yet), ready (admitted, waiting for a "
            "batch), sealed (in a batch that is not committed).",
            labels=("policy", "state"),
        ),
        Metric(
            name="penstock_weight_version",
            unit="versions",
            meaning="Number of the last committed version.",
            labels=("policy",),
        ),
        Metric(
            name="penstock_wasted_tokens",
            unit="tokens",
            meaning="Tokens that were sampled and will never be trained, by reason.",
            labels=("reason",),
            kind="counter",
        ),
        Metric(
            name="penstock_role_reward",
            unit="reward",
            meaning="Mean reward of a role of a policy in the judged groups of a source, since the "
            "start of the dataflow service.",
            labels=("policy", "role", "source"),
        ),
        Metric(
            name="penstock_role_tokens",
            unit="tokens",
            meaning="Sampled tokens of that role in those groups.",
            labels=("policy", "role", "source"),
        ),
        Metric(
            name="penstock_role_dropped_groups",
            unit="groups",
            meaning="Groups of that role and source that were dropped, by reason.",
            labels=("policy", "role", "source", "reason"),
        ),
        Metric(
            name="penstock_partner_lag_rows",
            unit="rows",
            meaning="Rows sealed for a policy, by how many versions the oldest token of another "
            "policy in them was behind.",
            labels=("policy", "partner", "versions"),
        ),
        Metric(
            name="penstock_weights_requests",
            unit="requests",
            meaning="Reads that a weight server answered, by kind and role.",
            labels=("kind", "role"),
            kind="counter",
        ),
        Metric(
            name="penstock_weights_sent_bytes",
            unit="bytes",
            meaning="Blob bytes that a weight server sent.",
            kind="counter",
        ),
        Metric(
            name="penstock_partition_trajectories_stored",
            unit="trajectories",
            meaning="Trajectories that an additional data partition stored since it started; "
            "`penstock_trajectories_stored` of the dataflow includes them.",
            labels=("partition",),
            kind="counter",
        ),
        Metric(
            name="penstock_partition_sampled_tokens",
            unit="tokens",
            meaning="Sampled tokens in those trajectories.",
            labels=("partition",),
            kind="counter",
        ),
        Metric(
            name="penstock_partition_open_groups",
            unit="groups",
            meaning="Groups of an additional data partition that nodes have not finished.",
            labels=("partition",),
        ),
        Metric(
            name="penstock_gateway_sessions",
            unit="sessions",
            meaning="Sessions of a gateway since it started, by what happened to them.",
            labels=("event",),
            kind="counter",
        ),
        Metric(
            name="penstock_gateway_open_sessions",
            unit="sessions",
            meaning="Sessions of a gateway that are open, or wait for their reward.",
        ),
        Metric(
            name="penstock_info",
            unit="",
            meaning="Always 1; its labels name the service and the run. Weight servers only.",
            labels=("service", "run"),
        ),
    )
}
"""Metrics of `/metrics` on the dataflow, its additional partitions, weight servers, relays and
gateways. Weight servers add the `process_` and `python_info` metrics of prometheus_client."""


def family_of(name: str) -> Metric | None:
    """The entry for this key of metrics.jsonl; None if the table lacks it."""
    if name in STEP_METRICS:
        return STEP_METRICS[name]
    return next((STEP_METRICS[found] for found in _families(name)), None)


def _families(name: str) -> Iterator[str]:
    """Families that this name may belong to."""
    if name.startswith("ratio/log_"):
        yield "ratio/log_{quantile}"
    for prefix in ("reward/role/", "tokens/role/"):
        if name.startswith(prefix):
            yield f"{prefix}{{role}}"
    if name.startswith("seconds/stage/"):
        yield "seconds/stage/{stage}"
    _, _, rest = name.partition("/")
    if rest in STEP_METRICS:
        yield "{role}/{metric}"
