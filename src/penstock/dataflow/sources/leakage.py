# SPDX-License-Identifier: Apache-2.0
"""Finds training tasks that repeat evaluation questions: equal, contained, or lightly edited.

Pure: texts in, pairs out. Case, spacing, punctuation, accents and up to one word in ten may differ.
A question is identified by its numbers and their order, or by its names if it has none. Where these
differ it is another question, so tasks from one template are no alarm. Translations and free
paraphrases are not found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from penstock.scorers.marks import without_marks

NGRAM = 13
"""Words of a run that two independent texts do not share by chance."""
MIN_CONTAINED = 6
"""Shortest question, in words, that is searched inside of longer texts."""
CONTAINED_SHARE = 0.5
"""Share of a question's runs of words that a text must have to contain it."""
NEAR_SHARE = 0.6
"""Share of common pairs of words (Jaccard) from which two texts are nearly the same: one changed
word in ten leaves about two thirds."""
MAX_WORDS = 5_000
"""Of one text; the rest is not compared."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_NAME = re.compile(r"(?<![.!?:\n])(?<=\s)[A-Z][^\W\d_]+")
SENTENCE_ENDS = (".", "!", "?", ":")
_BEFORE_CAPITAL = re.compile(r"(?<!\s)(\s++)(?=[A-Z])")
"""Begins where blanks do, and so looks at each of them once."""

T = TypeVar("T")
Pair = tuple[str, str]
Run = tuple[str, ...]


class LeakKind(StrEnum):
    EXACT = "exact"
    """The same words in the same order."""
    CONTAINED = "contained"
    """The question stands inside of a longer text."""
    NEAR = "near"
    """The same but for a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    question: str
    """Id of the evaluation question."""
    kind: LeakKind
    share: float
    """How much of it agrees, from 0 to 1."""


def words_of(text: str) -> list[str]:
    """What is compared of a text: words without case and accents, and numbers."""
    return _WORD.findall(_THOUSANDS.sub("", without_marks(text)))[:MAX_WORDS]


def names_of(text: str) -> set[str]:
    """Words with a capital inside of a sentence, as `words_of` writes them."""
    starts = {
        blanks.end()
        for blanks in _BEFORE_CAPITAL.finditer(text)
        if "\n" in blanks[1] or text[max(0, blanks.start() - 1) : blanks.start()] in SENTENCE_ENDS
    }
    found = [match[0] for match in _NAME.finditer(text) if match.start() not in starts]
    return {word for name in found for word in words_of(name)}


def shared_frame(texts: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many words all texts begin and end with: the instruction around each question. Of fewer
    than three texts nothing is known."""
    if len(texts) < 3:
        return 0, 0
    shortest = min(len(words) for words in texts)
    first = texts[0]
    head = _shared(shortest, lambda at: all(words[at] == first[at] for words in texts))
    left = shortest - head
    tail = _shared(left, lambda at: all(words[-1 - at] == first[-1 - at] for words in texts))
    return (head, tail) if head + tail < shortest else (0, 0)


def _shared(most: int, is_same: Callable[[int], bool]) -> int:
    return next((at for at in range(most) if not is_same(at)), most)


def _numbers(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(_plain_number(word) for word in words if word[0].isdigit())


def _plain_number(word: str) -> str:
    return word.rstrip("0").rstrip(".") if "." in word else word


def _pairs(words: Sequence[str]) -> frozenset[Pair]:
    return frozenset(zip(("", *words), (*words, ""), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    id: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    names: frozenset[str]
    pairs: frozenset[Pair]
    runs: frozenset[Run]

    def has_names_in(self, words: Sequence[str]) -> bool:
        """Names may differ where numbers identify the question."""
        return bool(self.numbers) or self.names <= set(words)


class LeakFinder:
    """Questions of suites, indexed; compares one training text at a time with all of them."""

    def __init__(self, questions: Mapping[str, str]) -> None:
        """Text of each question, by its id."""
        split = {id: words_of(text) for id, text in questions.items()}
        head, tail = shared_frame(list(split.values()))
        self._questions: list[_Question] = []
        for id, text in questions.items():
            words = tuple(split[id][head : len(split[id]) - tail])
            if words:
                names = frozenset(names_of(text) & set(words))
                self._questions.append(
                    _Question(
                        id=id,
                        words=words,
                        numbers=_numbers(words),
                        names=names,
                        pairs=_pairs(words),
                        runs=frozenset(_runs(words, NGRAM)),
                    )
                )
        self._index()

    def _index(self) -> None:
        self._by_words = {one.words: one for one in reversed(self._questions)}
        self._by_run: dict[Run, list[int]] = defaultdict(list)
        self._by_start: dict[Run, list[int]] = defaultdict(list)
        self._by_pair: dict[tuple[Run, Pair], list[int]] = defaultdict(list)
        pair_counts = Counter(pair for one in self._questions for pair in one.pairs)
        run_counts = Counter(run for one in self._questions for run in one.runs)
        for number, one in enumerate(self._questions):
            for run in _rarest(one.runs, run_counts, CONTAINED_SHARE):
                self._by_run[run].append(number)
            if MIN_CONTAINED <= len(one.words) < NGRAM:
                self._by_start[one.words[:MIN_CONTAINED]].append(number)
            for pair in _rarest(one.pairs, pair_counts, NEAR_SHARE):
                self._by_pair[one.numbers, pair].append(number)

    def find(self, text: str | Sequence[str]) -> Leak | None:
        """The question that a training text repeats most; None if there is none. `text`: words, if
        the caller has removed what is around every task."""
        words = tuple(words_of(text) if isinstance(text, str) else text)
        if not words:
            return None
        if same := self._by_words.get(words):
            return Leak(question=same.id, kind=LeakKind.EXACT, share=1.0)
        found = [*self._contained(words), *self._near(words)]
        return max(found, key=lambda leak: leak.share, default=None)

    def _contained(self, words: tuple[str, ...]) -> Iterable[Leak]:
        runs = frozenset(_runs(words, NGRAM))
        candidates = {number for run in runs for number in self._by_run.get(run, ())}
        for start in _runs(words, MIN_CONTAINED):
            candidates.update(self._by_start.get(start, ()))
        numbers = _numbers(words)
        for number in candidates:
            one = self._questions[number]
            if one.runs:
                share = len(one.runs & runs) / len(one.runs)
            else:
                share = float(one.words in _runs(words, len(one.words)))
            is_identified = _are_in_order(one.numbers, numbers) and one.has_names_in(words)
            if share >= CONTAINED_SHARE and is_identified:
                yield Leak(question=one.id, kind=LeakKind.CONTAINED, share=share)

    def _near(self, words: tuple[str, ...]) -> Iterable[Leak]:
        pairs, numbers = _pairs(words), _numbers(words)
        candidates = {number for pair in pairs for number in self._by_pair.get((numbers, pair), ())}
        for number in candidates:
            one = self._questions[number]
            common = len(one.pairs & pairs)
            share = common / (len(one.pairs) + len(pairs) - common)
            if share >= NEAR_SHARE and one.has_names_in(words):
                yield Leak(question=one.id, kind=LeakKind.NEAR, share=share)


def _are_in_order(wanted: Sequence[str], found: Iterable[str]) -> bool:
    """Whether these stand among the others, in this order."""
    rest = iter(found)
    return all(one in rest for one in wanted)


def _rarest(parts: frozenset[T], counts: Mapping[T, int], share: float) -> list[T]:
    """Parts to look a question up by: a text that has this share of all has one of these."""
    rarest = sorted(parts, key=lambda part: counts[part])
    return rarest[: int((1 - share) * len(rarest)) + 1]


def _runs(words: tuple[str, ...], length: int) -> list[Run]:
    return [words[at : at + length] for at in range(len(words) - length + 1)]
