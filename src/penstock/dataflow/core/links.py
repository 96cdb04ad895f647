# SPDX-License-Identifier: Apache-2.0
"""Numbered messages between the coordinator and a partition in another process: kept until
acknowledged, resent as often as needed, applied once. Pure.

A message is journaled in the same commit as its cause, and its receipt in the same commit as its
effect, so a message is neither lost nor applied twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.dataflow.core.messages import NumberedMessage, ToCoordinator, ToPartition
from penstock.dataflow.records import Deletion, Journal, LinkRecord, MessageRecord
from penstock.errors import BadRequest

Out = TypeVar("Out")
In = TypeVar("In")

MAX_MESSAGES = 512
"""Maximum per call; the rest follows in later calls."""


class Link(Generic[Out, In]):
    """One end of a link."""

    def __init__(
        self, out: str, back: str, incoming: msgspec.msgpack.Decoder[In], journal: Journal
    ):
        self._out = out
        self._back = back
        self._decoder = incoming
        self._journal = journal
        self._unacknowledged: deque[NumberedMessage] = deque()
        self.num_sent = 0
        self.num_received = 0

    # --- out ----------------------------------------------------------------------------------

    def send(self, message: Out) -> None:
        self.num_sent += 1
        body = msgspec.msgpack.encode(message)
        self._unacknowledged.append(NumberedMessage(number=self.num_sent, body=body))
        self._journal(MessageRecord(link=self._out, number=self.num_sent, body=body))

    @property
    def has_unacknowledged(self) -> bool:
        """Are any messages not acknowledged yet?"""
        return bool(self._unacknowledged)

    def unacknowledged(self, after: int) -> tuple[NumberedMessage, ...]:
        """Messages after number `after`, oldest first: those the other side has not received."""
        lacking = (message for message in self._unacknowledged if message.number > after)
        return tuple(message for message, _ in zip(lacking, range(MAX_MESSAGES), strict=False))

    def acknowledged(self, number: int) -> None:
        """The other side has durably applied all messages up to this number."""
        had = bool(self._unacknowledged) and self._unacknowledged[0].number <= number
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()
        if had:
            self._journal(LinkRecord(link=self._out, number=number))
            self._journal(
                Deletion(
                    kind=MessageRecord,
                    where="link = :link AND number <= :number",
                    values={"link": self._out, "number": number},
                )
            )

    # --- in -----------------------------------------------------------------------------------

    def receive(
        self, messages: Sequence[NumberedMessage], check: Callable[[In], None] = lambda _: None
    ) -> Iterable[In]:
        """The new messages, in order. A message after a gap is ignored; it will be resent. `check`
        raises for one that the other side may not send, which then counts as not received."""
        for message in messages:
            if message.number != self.num_received + 1:
                continue
            body = self._decode(message)
            check(body)
            self.num_received = message.number
            self._journal(LinkRecord(link=self._back, number=self.num_received))
            yield body

    def _decode(self, message: NumberedMessage) -> In:
        try:
            return self._decoder.decode(message.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            where = f"message {message.number} of link {self._back}"
            raise BadRequest(
                f"{where} is invalid: {error}; start both ends with the same version of penstock"
            ) from None

    # --- restart ------------------------------------------------------------------------------

    def restore(self, progress: Iterable[LinkRecord], kept: Iterable[MessageRecord]) -> None:
        reached = {record.link: record.number for record in progress}
        self.num_received = reached.get(self._back, 0)
        messages = [record for record in kept if record.link == self._out]
        self._unacknowledged = deque(
            NumberedMessage(number=record.number, body=record.body)
            for record in sorted(messages, key=lambda record: record.number)
        )
        newest = self._unacknowledged[-1].number if self._unacknowledged else 0
        self.num_sent = max(reached.get(self._out, 0), newest)


def link_to_partition(index: int, journal: Journal) -> Link[ToPartition, ToCoordinator]:
    decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
    return Link(f"coordinator>p{index}", f"p{index}>coordinator", decoder, journal)


def link_to_coordinator(index: int, journal: Journal) -> Link[ToCoordinator, ToPartition]:
    decoder: msgspec.msgpack.Decoder[ToPartition] = msgspec.msgpack.Decoder(ToPartition)
    return Link(f"p{index}>coordinator", f"coordinator>p{index}", decoder, journal)
