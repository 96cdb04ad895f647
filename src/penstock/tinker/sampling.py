# SPDX-License-Identifier: Apache-2.0
"""Answers the sampling requests of all clients, from the weights of their sampling sessions.

Owns how many run at a time, and the log-probs of prompts. Requests are independent of each other:
knows no order and writes no results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.config import LoraConfig
from penstock.errors import BadRequest, NotFound
from penstock.gateway.fair_queue import FairQueue
from penstock.tinker.journal import Journal, Request
from penstock.tinker.models import AdaptedModel, BaseModel
from penstock.tinker.protocol import Floats, Sample, read_sample, write_samples
from penstock.tinker.samplers import Question, Samplers, question_of
from penstock.types import view_ids
from penstock.weights.manifest import ADAPTER_CONFIG

MAX_SAMPLING = 256
"""Sampling requests at a time; the others wait, and clients take turns."""
Score = Callable[[str, Callable[[], Floats]], Awaitable[Floats]]
"""Runs a pass of the trainer's model for an owner, where their passes take turns."""


class Sampling:
    def __init__(
        self, folder: Path, journal: Journal, base: BaseModel, samplers: Samplers, score: Score
    ) -> None:
        """folder: of the server."""
        self._folder = folder
        self._journal = journal
        self._base = base
        self._samplers = samplers
        self._score = score
        self._room = FairQueue(MAX_SAMPLING)
        self._scorers: dict[str, AdaptedModel] = {}

    async def close(self) -> None:
        await self._samplers.close()

    def read(self, content: bytes) -> Sample:
        """A request that the model can answer; raises BadRequest. From any thread."""
        body = read_sample(content, self._base.window)
        self._question(body)
        return body

    def _question(self, body: Sample) -> Question:
        return question_of(body, self._base.window, self._base.vocab_size)

    async def answer(self, request: Request) -> bytes:
        """Protobuf. Raises what is wrong with the request, and EngineError."""
        async with self._room.place(request.owner):
            asked = await asyncio.to_thread(self._stored, request)
            folder = self._folder / self.session(request.lane, request.owner)[0]
            if not folder.exists():
                raise BadRequest("the weights of this sampling client are gone; save them again")
            found = await self._samplers.sample(request.id, request.owner, folder, asked)
            scores = None
            if asked.scores_from is not None:
                ids = view_ids(asked.prompt)
                scores = await self._score(
                    request.owner, lambda: self._scorer(folder).prompt_logprobs(ids)
                )
                scores[: asked.scores_from] = np.nan
            return write_samples(found, scores)

    def _stored(self, request: Request) -> Question:
        body = read_sample(self._journal.body(request), self._base.window)
        return self._question(body)

    def session(self, id: str, owner: str) -> tuple[str, str]:
        """Folder and path of a sampling session's weights; raises NotFound."""
        query = "SELECT owner, folder, path FROM samplers WHERE id = :id"
        found = self._journal.rows(query, id=id)
        if not found or found[0][0] != owner:
            raise NotFound(f"no sampling session {id} of this credential")
        return found[0][1], found[0][2]

    def _scorer(self, folder: Path) -> AdaptedModel:
        """The trainer's model with a sampling client's weights; only the newest is kept."""
        found = self._scorers.get(folder.name)
        if found is None:
            config = LoraConfig(**_read_shape(folder))
            self._scorers.clear()
            found = self._scorers[folder.name] = AdaptedModel(self._base, folder, config)
        return found


def _read_shape(folder: Path) -> dict[str, Any]:
    found = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes())
    return {
        "rank": found["r"],
        "alpha": found["lora_alpha"],
        "targets": tuple(found["target_modules"]),
    }
