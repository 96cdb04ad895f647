# SPDX-License-Identifier: Apache-2.0
"""Structured logs: JSON lines on stderr, a readable form when stderr is a terminal.

The only place that sets up structlog and the standard library's logging. Opens no files: the
launcher decides where stderr goes. No secret leaves: every line is searched for them. No line
steers a terminal that shows it: control characters of what others wrote are replaced.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from penstock.redaction import excerpt, hide_secrets, printable

NOISY_LOGGERS = (
    "uvicorn",
    "httpx",
    "httpcore",
    "httpx2",
    "httpcore2",
    "urllib3",
    "filelock",
    "asyncio",
)
"""Libraries that log every request at INFO; only their warnings are kept."""
KEPT_CHARS = (4000, 12_000)
"""Of a long field: the first and the last, where an exception says what it is."""


def configure(service: str, *, level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line of this process, ours and the libraries', to one stream in one format."""
    out = sys.stderr if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=_renderers(is_terminal=out.isatty()),
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)


def _renderers(*, is_terminal: bool) -> list[Processor]:
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    # Exceptions as text: other formatters show the values of local variables.
    safe = [clean, structlog.processors.format_exc_info, _hide_in_fields]
    if is_terminal:
        plain = structlog.dev.plain_traceback
        return [*safe, structlog.dev.ConsoleRenderer(exception_formatter=plain), _hide]
    return [
        *safe,
        structlog.processors.EventRenamer("msg"),
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
        _hide,
        _without_controls,
    ]


def _hide_in_fields(logger: WrappedLogger, method: str, fields: EventDict) -> EventDict:
    """Before colours and escapes are between a secret and what shows that it is one."""
    return {
        name: printable(excerpt(value, *KEPT_CHARS)) if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _hide(logger: WrappedLogger, method: str, line: Any) -> str:
    return hide_secrets(line)


def _without_controls(logger: WrappedLogger, method: str, line: Any) -> str:
    """Also inside of nested values; JSON itself uses none."""
    return printable(line)
