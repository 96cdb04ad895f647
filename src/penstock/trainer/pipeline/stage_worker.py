# SPDX-License-Identifier: Apache-2.0
"""A stage placed elsewhere: rows of the ledger in, the columns of a scorer out, row by row.

Owns one worker's loop. Rows it did not finish come again, to it or to another worker; columns are
write-once, so scoring twice changes nothing. Any number of workers may run beside each other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from penstock.config import StageConfig
from penstock.config.pipeline import PipelineStageConfig
from penstock.dataflow.client.row_stream import ColumnValue, Row
from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.columns.row_leases import RowTrigger
from penstock.errors import ConfigError
from penstock.trainer.pipeline.functions import find_function, keywords

Scorer = Callable[..., Any]

_log = structlog.get_logger(__name__)


async def serve(
    url: str, token: str, stage: PipelineStageConfig, terms: StageConfig, *, max_rows: int = 16
) -> None:
    """Score rows until cancelled.

    consumes: rows with the columns it reads · produces: the columns it writes
    waits for: the next row · ends: never by itself"""
    scorer = find_function(stage)
    if scorer is None:
        raise ConfigError(f"stage {stage.id} has no scorer; give fn: module:function")
    async with RowsClient(url, token) as client:
        reader = await client.reader(
            terms.name,
            reads=terms.reads,
            writes=terms.writes,
            on=RowTrigger(terms.on),
            deadline_s=terms.deadline_s,
            ttl_s=terms.ttl_s,
            max_attempts=terms.max_attempts,
        )
        async for row in reader.stream(max_rows=max_rows):
            await score(row, scorer, stage)


async def score(row: Row, scorer: Scorer, stage: PipelineStageConfig) -> None:
    """One row; what the scorer raises, or gives that is no column, costs the row an attempt."""
    given = {name: row[column] for name, column in keywords(stage).items()}
    subject = row.trajectory() if "turns" in stage.reads else None
    try:
        columns = _columns(await _call(partial(scorer, subject, **given, **stage.options)), stage)
    except Exception as error:  # anything at all: it is other people's code
        why = f"{type(error).__name__}: {error}"
        _log.warning("a scorer failed", stage=stage.id, row=row.key, why=why)
        await row.fail(why)
        return
    await row.write(**columns)


async def _call(call: partial[Any]) -> Any:
    """In a thread, so that leases are kept alive meanwhile; async scorers in the loop itself."""
    if inspect.iscoroutinefunction(call.func):
        return await call()
    return await asyncio.to_thread(call)


def _columns(found: Any, stage: PipelineStageConfig) -> Mapping[str, ColumnValue]:
    if not isinstance(found, Mapping) or {*found} != {*stage.writes}:
        raise ValueError(f"gave {found!r}, not a mapping of {', '.join(stage.writes)}")
    values: dict[str, ColumnValue] = {}
    for name in stage.writes:
        value: Any = found[name]
        values[name] = value if isinstance(value, bytes) else float(value)
    return values
