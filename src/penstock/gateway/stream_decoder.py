# SPDX-License-Identifier: Apache-2.0
"""An answer in the making: tokens in, and out what is already certain of its text and reasoning.

Holds back what later tokens may still change: half a character, the beginning of a stop string or
of a tag, white space that may turn out to stand at an end. All that it tells is the beginning of
what `parsing.read` says of the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from penstock.gateway.generation import Piece
from penstock.gateway.model_calls import Delta
from penstock.gateway.parsing import END_THINK, THINK, TOOL_CALL, Form, ToolFormat
from penstock.gateway.renderer import Renderer

HALF = "\ufffd"
"""What decoding makes of the bytes of an unfinished character."""


class _Phase(Enum):
    OPENING = auto()
    REASONING = auto()
    TEXT = auto()
    OVER = auto()


class _Letters:
    """Ids to text, whole characters only."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        self._held += self._renderer.without_hidden(ids)
        if not self._held:
            return ""
        # Some decoders treat the first token otherwise, so one that was told stands before.
        told = self._renderer.decode(self._before)
        text = self._renderer.decode([*self._before, *self._held])
        if text.endswith(HALF) or not text.startswith(told):
            return ""
        self._before, self._held = self._held[-1:], []
        if self._renderer.decode(self._before).endswith(HALF):
            self._before = []
        return text[len(told) :]


class _Stops:
    """Text before the first stop string, and nothing that may still be part of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""

    def add(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        found = [at for at in (self._held.find(word) for word in self._stop) if at >= 0]
        sure = min([*found, *(_sure(self._held, word) for word in self._stop)])
        told, self._held = self._held[:sure], self._held[sure:]
        return told


class Growing:
    """`hear` is the engine's listener; `tell` is the agent's."""

    def __init__(
        self,
        renderer: Renderer,
        form: Form,
        stop: Sequence[str],
        tell: Callable[[Delta], None],
    ) -> None:
        self._letters = _Letters(renderer)
        self._stops = _Stops(stop)
        self._form = form
        self._tell = tell
        self._held = ""
        has_opening = form.has_thinking or form.is_thinking
        self._phase = _Phase.OPENING if has_opening else _Phase.TEXT
        self._at_start = form.tools is ToolFormat.LLAMA
        """Nothing but white space so far, which may not belong to the part."""
        self._is_trimmed = False

    def hear(self, piece: Piece) -> None:
        if self._phase is _Phase.OVER:
            return
        self._held += self._stops.add(self._letters.add(piece.sampled_ids))
        if self._phase is _Phase.OPENING:
            self._open()
        reasoning = self._reason() if self._phase is _Phase.REASONING else ""
        text = self._write() if self._phase is _Phase.TEXT else ""
        if reasoning or text:
            self._tell(Delta(text=text, reasoning=reasoning))

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held = begun.removeprefix(THINK)
            self._begin(_Phase.REASONING, is_trimmed=True)
        elif begun and not THINK.startswith(begun):
            if self._form.is_thinking:
                self._begin(_Phase.REASONING, is_trimmed=True)
            else:
                self._begin(_Phase.TEXT, is_trimmed=False)

    def _begin(self, phase: _Phase, *, is_trimmed: bool) -> None:
        self._phase = phase
        self._is_trimmed = is_trimmed
        self._at_start = True

    def _reason(self) -> str:
        thought, is_closed, rest = self._held.partition(END_THINK)
        if is_closed:
            told = self._trim(thought).rstrip()
            self._held = rest
            self._begin(_Phase.TEXT, is_trimmed=True)
            return told
        return self._tell_until(len(self._held[: _sure(self._held, END_THINK)].rstrip()))

    def _write(self) -> str:
        tools = self._form.tools
        if tools is None:
            return self._tell_until(len(self._held))
        if tools is ToolFormat.LLAMA:
            begun = self._held.lstrip()
            if self._at_start and (not begun or begun.startswith("{")):
                return ""
            return self._tell_until(len(self._held))
        before, is_call, _ = self._held.partition(TOOL_CALL)
        if is_call:
            self._phase = _Phase.OVER
            return self._trim(before.rstrip())
        return self._tell_until(len(self._held[: _sure(self._held, TOOL_CALL)].rstrip()))

    def _tell_until(self, end: int) -> str:
        told, held = self._held[:end], self._held[end:]
        told = self._trim(told)
        if told:
            self._at_start = False
        self._held = held
        return told

    def _trim(self, text: str) -> str:
        return text.lstrip() if self._is_trimmed and self._at_start else text


def _sure(text: str, word: str) -> int:
    """How much of `text` cannot become part of `word`, wherever that ends."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return len(text) - size
    return len(text)
