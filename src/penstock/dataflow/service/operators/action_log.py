# SPDX-License-Identifier: Apache-2.0
"""Writes what operators and trainers did through this service to the run's log of actions, and the
end of that log to the ledger: who cuts or deletes the file must forge the ledger, too."""

from __future__ import annotations

import asyncio

import structlog

from penstock.dataflow.records import MetaRecord
from penstock.dataflow.service.process import Process
from penstock.observe.admin_log import AdminAction, AdminLog, LogHead
from penstock.wire.routes import Call

log = structlog.get_logger(__name__)
ADMIN_LOG_KEY = "admin_log"
"""Key in the ledger of the number and hash of the last line at that time."""

LOGGED = ("add", "remove", "why")
"""Parameters of a call that stand in the log; others could have the name of a field."""


class ActionLog:
    def __init__(self, process: Process, log: AdminLog) -> None:
        self._process = process
        self._log = log
        self._anchor(log.head())

    async def on_call(self, action: str, call: Call) -> None:
        """A call of an audited route has succeeded."""
        who = f"{call.credential.role} {call.credential.subject}".strip()
        said = {name: call.query[name] for name in LOGGED if name in call.query}
        details = {**said, **call.path, "token": call.credential.id}
        await self._append(AdminAction(action), who, details)

    async def on_quarantine(self, subject: str, policy: str, why: str) -> None:
        who = f"trainer of {policy}" if policy else "spot checks"
        await self._append(AdminAction.QUARANTINED, who, {"subject": subject, "why": why})

    async def _append(self, action: AdminAction, who: str, details: dict[str, str]) -> None:
        try:
            head = await asyncio.to_thread(self._log.append, action, who=who, **details)
        except OSError as error:  # it was done; a full disk must not end the caller, too
            log.error("action not in admin.jsonl", action=action, who=who, error=str(error))
            return
        self._anchor(head)

    def _anchor(self, head: LogHead) -> None:
        """Durable with the next command."""
        if head.number:
            self._process.journal(MetaRecord(key=ADMIN_LOG_KEY, value=str(head)))
