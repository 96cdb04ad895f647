# SPDX-License-Identifier: Apache-2.0
"""The built-in tool `search`: BM25 over the text files of a folder, without a network.

Owns the passages: paragraphs of .txt and .md files, and rows of .jsonl files. The index is built
once per process and shared by all attempts; nothing writes to it. Searches have separate
threads: one that was given up goes on to its end, and holds up nothing but searches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSpec

SUFFIXES = (".txt", ".md", ".jsonl")
TEXT_KEYS = ("title", "text", "contents", "content", "passage", "body")
PASSAGE_WORDS = 180
MAX_FILE_BYTES = 256 << 20
MAX_PASSAGES = 5_000_000
MAX_RESULTS = 20
MAX_QUERY_CHARS = 2_000
MAX_QUERY_WORDS = 64
"""Different ones: for each, every passage that has it is looked at."""
MAX_SEARCHES = 4
"""At the same time."""
SEARCH = ToolSpec(
    name="search",
    description="Search a collection of documents by keywords and return the best passages.",
    parameters={
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "description": f"Keywords, at most {MAX_QUERY_CHARS:,} characters; the first "
                f"{MAX_QUERY_WORDS} different words count.",
            },
            "k": {
                "type": "integer",
                "description": "How many passages.",
                "minimum": 1,
                "maximum": MAX_RESULTS,
                "default": 5,
            },
        },
        "required": ["query"],
    },
)


@dataclass(frozen=True, slots=True)
class Passage:
    source: str
    """The file, and the number of the passage or line in it."""
    text: str


@dataclass(slots=True)
class SearchSession:
    """A ToolSession, shared by all attempts of a node."""

    _folder: Path
    _index: Index | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_SEARCHES, thread_name_prefix="search")
    )

    async def list(self) -> Sequence[ToolSpec]:
        await self._built()
        return (SEARCH,)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        query = str(arguments["query"])
        if len(query) > MAX_QUERY_CHARS:
            return ToolResult(
                text=f"the query has {len(query):,} characters; search for at most "
                f"{MAX_QUERY_CHARS:,}, such as the words that matter most",
                is_error=True,
            )
        index = await self._built()
        k = min(int(arguments.get("k", 5)), MAX_RESULTS)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, index.search, query, k)
        lines = [f"[{n}] {one.source}\n{one.text}" for n, one in enumerate(found, start=1)]
        return ToolResult(text="\n\n".join(lines) or "nothing was found")

    async def recover(self) -> None:
        """A search that was given up ends by itself; one that waited does not begin."""

    async def close(self) -> None:
        """End the threads; the index ends with its process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _built(self) -> Index:
        async with self._lock:
            if self._index is None:
                self._index = await asyncio.to_thread(Index, self._folder)
            return self._index


class Index:
    """Raises ToolFailed if the folder has no text."""

    def __init__(self, folder: Path) -> None:
        import bm25s  # pyright: ignore[reportMissingTypeStubs] - it has none

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
        self._passages = list(_passages(folder))
        if not self._passages:
            raise ToolFailed(f"{folder} has no {', '.join(SUFFIXES)} file with text in it")
        self._bm25: Any = bm25s.BM25()
        self._bm25.index(self._tokens([one.text for one in self._passages]), show_progress=False)

    def search(self, query: str, k: int) -> list[Passage]:
        """The best passages; none that has no word of the query."""
        tokens = self._tokens([query])
        words = list(dict.fromkeys(tokens.ids[0]))[:MAX_QUERY_WORDS]
        if not words:
            return []
        k = min(k, len(self._passages))
        found, scores = self._bm25.retrieve(tokens._replace(ids=[words]), k=k, show_progress=False)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [self._passages[index] for index, score in pairs if score > 0]

    def _tokens(self, texts: list[str]) -> Any:
        import bm25s  # pyright: ignore[reportMissingTypeStubs] - it has none

        return cast(Any, bm25s).tokenize(texts, stopwords="en", show_progress=False)


def _passages(folder: Path) -> Iterator[Passage]:
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES)
    for path in files:
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            continue  # a link that leads out of the folder
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ToolFailed(f"{path} has more than {MAX_FILE_BYTES:,} bytes; split it")
        text = path.read_text(errors="replace")
        name = path.relative_to(folder).as_posix()
        pieces = _rows(text) if path.suffix == ".jsonl" else _pieces(text)
        for number, piece in enumerate(pieces, start=1):
            if piece.strip():
                yield Passage(f"{name}:{number}", piece.strip())


def _rows(text: str) -> Iterator[str]:
    for line in text.splitlines():
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = line
        if isinstance(row, dict):
            fields = cast("dict[str, Any]", row)
            yield "\n".join(fields[key] for key in TEXT_KEYS if isinstance(fields.get(key), str))
        else:
            yield str(row)


def _pieces(text: str) -> Iterator[str]:
    """Paragraphs, joined up to PASSAGE_WORDS and cut where one is longer."""
    held = list[str]()
    for paragraph in text.split("\n\n"):
        words = paragraph.split(" ")
        if held and len(held) + len(words) > PASSAGE_WORDS:
            yield " ".join(held)
            held = []
        held += [*words, "\n\n"] if words != [""] else []
        while len(held) > PASSAGE_WORDS:
            yield " ".join(held[:PASSAGE_WORDS])
            held = held[PASSAGE_WORDS:]
    yield " ".join(held)
