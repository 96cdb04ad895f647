# SPDX-License-Identifier: Apache-2.0
"""Where tasks come from: task modules, files of rows, Hugging Face data sets, agent sessions.

Owns positions, task keys, seeds, formats, and messages that name bad rows. Knows nothing about
groups. pyarrow and datasets load only when a source needs them."""

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind, BadRows
from penstock.dataflow.sources.opening import DataSpec, open_data, open_source
from penstock.dataflow.sources.source import (
    NUM_SAMPLED_TASKS,
    Source,
    are_same_tasks,
    derive_seed,
    numbered_source,
    preferred_digest,
    session_source,
    slot_seeds,
)

__all__ = [
    "NUM_SAMPLED_TASKS",
    "BadRow",
    "BadRowKind",
    "BadRows",
    "DataSpec",
    "Source",
    "are_same_tasks",
    "derive_seed",
    "numbered_source",
    "open_data",
    "open_source",
    "preferred_digest",
    "session_source",
    "slot_seeds",
]
