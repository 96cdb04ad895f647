# SPDX-License-Identifier: Apache-2.0
"""Every metric, from `penstock.observe.metric_names`."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.reference_pages.markdown import entry, head

from penstock.observe.metric_names import PROMETHEUS, STEP_METRICS, Metric


def _entries(metrics: Iterable[Metric]) -> list[str]:
    return [
        entry(f"`{metric.name}`" + (f" ({metric.unit})" if metric.unit else ""), _lines(metric))
        for metric in metrics
    ]


def _lines(metric: Metric) -> list[str]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return [metric.meaning, f"Labels: {labels}." if labels else ""]


def page() -> str:
    return "\n".join(
        [
            head(
                "Metrics",
                "penstock keeps metrics in two places: a file in the run folder, and `/metrics` of "
                "its services. [Watch a run](../how-to/watch.md) shows how to plot them, "
                "[scrape metrics](../how-to/scrape-metrics.md) how to collect them.",
            ),
            "## metrics.jsonl { #file }\n",
            "One JSON object per committed batch, written by the trainer. A trainer that resumes "
            "repeats the lines after its checkpoint, under a higher `incarnation`. A figure that "
            "does not apply to the algorithm is absent.\n",
            *_entries(STEP_METRICS.values()),
            "## Prometheus { #prometheus }\n",
            "`GET /metrics` on the dataflow service, on weight servers and on relays. A counter's "
            "name ends with `_total` in the text format. Nodes and trainers "
            "listen on no port: the dataflow service serves their figures.\n",
            *_entries(PROMETHEUS.values()),
        ]
    )
