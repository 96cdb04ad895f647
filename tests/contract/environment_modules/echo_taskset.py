# SPDX-License-Identifier: Apache-2.0
"""A verifiers taskset, as its authors would write one: say the letter."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class EchoData(vf.TaskData):
    answer: str = ""


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def says_it(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self) -> Iterable[EchoTask]:
        for letter in "abc":
            data = EchoData(prompt=letter, answer=letter)
            yield EchoTask(data, self.config.task)


__all__ = ["EchoTaskset"]
