# SPDX-License-Identifier: Apache-2.0
"""The worker of a placed stage: rows of the ledger in, columns of a scorer out, row by row.

Owns one worker's loop. Unfinished rows are leased again, to this or another worker; columns are
write-once, so scoring twice changes nothing. Any number of workers may run at the same time.
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
from penstock.wire.held_token import Token

Scorer = Callable[..., Any]

_log = structlog.get_logger(__name__)


async def serve(
    url: str,
    token: Token,
    stage: PipelineStageConfig,
    terms: StageConfig,
    *,
    max_rows: int = 16,
    scorer: Scorer | None = None,
) -> None:
    """Score rows until cancelled, with the stage's function unless `scorer` is given.

    consumes: rows with the columns it reads · produces: the columns it writes
    waits for: the next row · ends: when cancelled"""
    scorer = scorer or find_function(stage)
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
    """Score one row; an exception, or a result that is not a column, costs the row an attempt."""
    given = {name: row[column] for name, column in keywords(stage).items()}
    subject = row.trajectory() if "turns" in stage.reads else None
    try:
        columns = _columns(await _call(partial(scorer, subject, **given, **stage.options)), stage)
    except Exception as error:  # it is user code
        why = f"{type(error).__name__}: {error}"
        _log.warning("scorer failed", stage=stage.id, row=row.key, why=why)
        await row.fail(why)
        return
    await row.write(**columns)


async def _call(call: partial[Any]) -> Any:
    """Call it in a thread, so that leases are renewed meanwhile; async scorers run in the loop."""
    if inspect.iscoroutinefunction(call.func):
        return await call()
    return await asyncio.to_thread(call)


def _columns(found: Any, stage: PipelineStageConfig) -> Mapping[str, ColumnValue]:
    """Exactly the columns that the stage writes, and any of them by version (`score@7`)."""
    names = {*found} if isinstance(found, Mapping) else set[str]()
    versions = {name for name in names - {*stage.writes} if name.partition("@")[0] in stage.writes}
    if names - versions != {*stage.writes}:
        raise ValueError(f"returned {found!r} instead of a mapping of {', '.join(stage.writes)}")
    values: dict[str, ColumnValue] = {}
    for name in (*stage.writes, *sorted(versions)):
        value: Any = found[name]
        values[name] = value if isinstance(value, bytes) else float(value)
    return values
