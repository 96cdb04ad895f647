# SPDX-License-Identifier: Apache-2.0
"""Decodes a streamed answer incrementally: emits only text and reasoning that later tokens cannot
change.

Holds back an incomplete character, a possible start of a stop string or tag, and white space that
may turn out to be trailing. The emitted text is always a prefix of the result of
`parsing.parse_answer` for the complete answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from penstock.gateway.generation import TokenChunk
from penstock.gateway.model_calls import Delta
from penstock.gateway.parsing import END_THINK, THINK, TOOL_CALL, AnswerFormat, ToolFormat
from penstock.gateway.renderer import Renderer

REPLACEMENT_CHAR = "\ufffd"
"""Result of decoding the bytes of an incomplete character."""
MAX_TRIES = 8
"""Tokens that together may make one character. What is then still incomplete is hardly ever
decoded again: bytes that never make one would cost the square of their number."""


class _Phase(Enum):
    OPENING = auto()
    REASONING = auto()
    TEXT = auto()
    DONE = auto()


class _TextDecoder:
    """Decodes ids to text, complete characters only."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._before: list[int] = []
        self._pending: list[int] = []
        self._num_tries = 0
        self._min_pending = 1
        """Decode when there are this many."""

    def add(self, ids: Sequence[int]) -> str:
        self._pending += self._renderer.strip_hidden(ids)
        if len(self._pending) < self._min_pending:
            return ""
        # Some decoders treat the first token differently, so put an already emitted one before.
        emitted = self._renderer.decode(self._before)
        text = self._renderer.decode([*self._before, *self._pending])
        if text.endswith(REPLACEMENT_CHAR) or not text.startswith(emitted):
            self._num_tries += 1
            if self._num_tries >= MAX_TRIES:
                self._min_pending = 2 * len(self._pending)
            return ""
        self._num_tries, self._min_pending = 0, 1
        self._before, self._pending = self._pending[-1:], []
        if self._renderer.decode(self._before).endswith(REPLACEMENT_CHAR):
            self._before = []
        return text[len(emitted) :]


class _StopFilter:
    """Passes text before the first stop string, holding back any possible start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._pending = ""

    def add(self, text: str) -> str:
        if not self._stop:
            return text
        self._pending += text
        found = [at for at in (self._pending.find(stop) for stop in self._stop) if at >= 0]
        safe = min([*found, *(_safe_length(self._pending, stop) for stop in self._stop)])
        emitted, self._pending = self._pending[:safe], self._pending[safe:]
        return emitted


class StreamDecoder:
    """Takes chunks from the engine in `feed` and passes deltas for the agent to `emit`."""

    def __init__(
        self,
        renderer: Renderer,
        answer_format: AnswerFormat,
        stop: Sequence[str],
        emit: Callable[[Delta], None],
    ) -> None:
        self._text_decoder = _TextDecoder(renderer)
        self._stop_filter = _StopFilter(stop)
        self._answer_format = answer_format
        self._emit = emit
        self._pending = ""
        has_opening = answer_format.has_thinking or answer_format.is_thinking
        self._phase = _Phase.OPENING if has_opening else _Phase.TEXT
        self._at_start = answer_format.tools is ToolFormat.LLAMA
        """Only white space so far, which may not belong to this part."""
        self._is_trimmed = False
        self._blanks: list[str] = []
        """White space that was held back and follows nothing else that was: whatever comes, it is
        not looked at again before there is more than white space."""

    def feed(self, chunk: TokenChunk) -> None:
        if self._phase is _Phase.DONE:
            return
        text = self._stop_filter.add(self._text_decoder.add(chunk.sampled_ids))
        if self._blanks and (not text or text.isspace()):
            self._blanks.append(text)
            return
        self._pending += "".join(self._blanks) + text
        self._blanks.clear()
        self._look()
        if self._pending.isspace():
            self._blanks.append(self._pending)
            self._pending = ""

    def _look(self) -> None:
        if self._phase is _Phase.OPENING:
            self._open()
        reasoning = self._emit_reasoning() if self._phase is _Phase.REASONING else ""
        text = self._emit_text() if self._phase is _Phase.TEXT else ""
        if reasoning or text:
            self._emit(Delta(text=text, reasoning=reasoning))

    def _open(self) -> None:
        stripped = self._pending.lstrip()
        if stripped.startswith(THINK):
            self._pending = stripped.removeprefix(THINK)
            self._enter_phase(_Phase.REASONING, is_trimmed=True)
        elif stripped and not THINK.startswith(stripped):
            if self._answer_format.is_thinking:
                self._enter_phase(_Phase.REASONING, is_trimmed=True)
            else:
                self._enter_phase(_Phase.TEXT, is_trimmed=False)

    def _enter_phase(self, phase: _Phase, *, is_trimmed: bool) -> None:
        self._phase = phase
        self._is_trimmed = is_trimmed
        self._at_start = True

    def _emit_reasoning(self) -> str:
        thought, is_closed, rest = self._pending.partition(END_THINK)
        if is_closed:
            emitted = self._trim(thought).rstrip()
            self._pending = rest
            self._enter_phase(_Phase.TEXT, is_trimmed=True)
            return emitted
        return self._emit_until(
            len(self._pending[: _safe_length(self._pending, END_THINK)].rstrip())
        )

    def _emit_text(self) -> str:
        tools = self._answer_format.tools
        if tools is None:
            return self._emit_until(len(self._pending))
        if tools is ToolFormat.LLAMA:
            stripped = self._pending.lstrip()
            if self._at_start and stripped.startswith("{"):
                self._phase = _Phase.DONE  # what becomes of it shows its end
                return ""
            if self._at_start and not stripped:
                return ""
            return self._emit_until(len(self._pending))
        before, is_call, _ = self._pending.partition(TOOL_CALL)
        if is_call:
            self._phase = _Phase.DONE
            return self._trim(before.rstrip())
        return self._emit_until(
            len(self._pending[: _safe_length(self._pending, TOOL_CALL)].rstrip())
        )

    def _emit_until(self, end: int) -> str:
        emitted, pending = self._pending[:end], self._pending[end:]
        emitted = self._trim(emitted)
        if emitted:
            self._at_start = False
        self._pending = pending
        return emitted

    def _trim(self, text: str) -> str:
        return text.lstrip() if self._is_trimmed and self._at_start else text


def _safe_length(text: str, target: str) -> int:
    """Length of the part of `text` that cannot be the start of `target`."""
    for size in range(min(len(target) - 1, len(text)), 0, -1):
        if text.endswith(target[:size]):
            return len(text) - size
    return len(text)
