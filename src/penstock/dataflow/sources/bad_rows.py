# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a row of a data set, and the message that names it.

Owns the kinds and the wording around them. Reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from penstock.errors import ConfigError

NUM_LISTED = 20
"""Rows that one message lists."""


class BadRowKind(StrEnum):
    INVALID_UTF8 = "invalid_utf8"
    """Bytes that are not UTF-8 text."""
    INVALID_JSON = "invalid_json"
    """A line that is not JSON."""
    NOT_AN_OBJECT = "not_an_object"
    """A line that is JSON, but not an object."""
    TRUNCATED = "truncated"
    """The file ends inside the row."""
    INVALID_CSV = "invalid_csv"
    """Quotes that do not match."""
    FIELD_COUNT = "field_count"
    """More or fewer fields than the header has."""
    DUPLICATE_COLUMN = "duplicate_column"
    """The header has a name twice."""
    MISSING_COLUMN = "missing_column"
    """No such column in this row, or in the whole data set."""
    NULL_PROMPT = "null_prompt"
    """The prompt is null."""
    EMPTY_PROMPT = "empty_prompt"
    """The prompt has no text or no messages."""
    PROMPT_TYPE = "prompt_type"
    """The prompt is neither text nor a list."""
    CHAT_SHAPE = "chat_shape"
    """The prompt is a list of something else than messages."""
    LONG_PROMPT = "long_prompt"
    """The prompt has more than `max_prompt_tokens` tokens."""
    NOT_FINITE = "not_finite"
    """A number that JSON cannot represent: NaN or an infinity."""
    HUGE_INTEGER = "huge_integer"
    """An integer above 64 bits."""
    INVALID_TEXT = "invalid_text"
    """Text that cannot be encoded: half of a surrogate pair."""
    UNSUPPORTED_TYPE = "unsupported_type"
    """Bytes, dates and other values that JSON does not have."""


class BadRow(ConfigError):
    """One bad row: where it is, what is wrong, what to do."""

    def __init__(self, place: str, kind: BadRowKind, text: str, *, column: str = "") -> None:
        self.place = place
        """`train.jsonl:7` for line 7 of a text file, `train.parquet row 7` otherwise; from 1."""
        self.kind = kind
        self.column = column
        """The column of the task; empty if the whole row is bad."""
        where = f"{place}: {column}" if column else place
        super().__init__(f"{where}: {text}")


class BadRows(ConfigError):
    """All bad rows of one source that were found."""

    def __init__(self, source: str, rows: Sequence[BadRow], *, num_read: int, total: int) -> None:
        self.rows = tuple(rows)
        count = f"{len(rows):,} bad row{'s' * (len(rows) != 1)}"
        if num_read < total:
            count = f"{count} among the first {num_read:,} of {total:,} (the rest was not read)"
        lines = [f"source {source!r}: {count}", *(f"  {row}" for row in rows[:NUM_LISTED])]
        if len(rows) > NUM_LISTED:
            lines.append(f"  … and {len(rows) - NUM_LISTED:,} more")
        super().__init__("\n".join(lines))
