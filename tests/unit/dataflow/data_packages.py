# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra `data`, which have no types of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

pyarrow: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
arrow_csv: Any = import_module("pyarrow.csv")


def import_datasets() -> Any:
    """Takes seconds, so it is left to the tests that need it."""
    return import_module("datasets")
