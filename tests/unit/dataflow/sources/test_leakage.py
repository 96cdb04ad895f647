# SPDX-License-Identifier: Apache-2.0
"""Planted duplicates are found, and tasks from the same templates are no alarm."""

from __future__ import annotations

import random

import pytest
from tests.unit.dataflow.sources.word_problems import edit_lightly, make_text

from penstock.dataflow.sources.leakage import LeakFinder, LeakKind, names_of, shared_frame, words_of

PROBLEM = (
    "Mia has 12 apples and buys 7 more at the market. Then Mia gives 5 of them to Tom. How many "
    "apples does Mia have now?"
)
QUESTION = "Which river flows through the largest city of Peru and ends in the sea?"
FINDER = LeakFinder({"problem": PROBLEM, "question": QUESTION, "short": "Who wrote Hamlet?"})


def test_fifty_planted_duplicates_among_ten_thousand_rows() -> None:
    rng = random.Random(20)
    questions = {f"q{number}": make_text(rng) for number in range(1_000)}
    known, rows = {*questions.values()}, list[str]()
    while len(rows) < 10_000:
        text = make_text(rng)
        if text not in known:  # by chance, it would be a duplicate
            rows.append(text)
    planted = rng.sample(sorted(questions), 50)
    places = rng.sample(range(len(rows)), 50)
    for number, (id, place) in enumerate(zip(planted, places, strict=True)):
        text = questions[id]
        rows[place] = text if number < 10 else edit_lightly(text, rng)
        if number >= 40:
            rows[place] = f"Solve this with care. {text} Write the result on the last line, please."
    finder = LeakFinder(questions)
    found = {place: leak for place, row in enumerate(rows) if (leak := finder.find(row))}
    assert [places[at] for at in range(50) if places[at] not in found] == []
    false_alarms = found.keys() - {*places}
    assert len(false_alarms) <= 0.01 * len(rows)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PROBLEM, LeakKind.EXACT),
        (PROBLEM.upper().replace(".", " !  "), LeakKind.EXACT),
        (f"Here is a task for you: {PROBLEM} Think before you reply.", LeakKind.CONTAINED),
        (PROBLEM.replace("Mia", "Ana"), LeakKind.NEAR),
        (PROBLEM.replace("market", "shop").replace("now", "left"), LeakKind.NEAR),
        (QUESTION.lower(), LeakKind.EXACT),
        (QUESTION.replace("ends", "finally ends"), LeakKind.NEAR),
        ("Who wrote  “Hamlet”", LeakKind.EXACT),
    ],
)
def test_light_edits_are_found(text: str, kind: LeakKind) -> None:
    leak = FINDER.find(text)
    assert leak is not None and leak.kind is kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        PROBLEM.replace("12", "13"),
        PROBLEM.replace("12", "x").replace("7", "12").replace("x", "7"),
        f"Task: {PROBLEM.replace('12', '13')} Reply.",
        QUESTION.replace("Peru", "Kenya"),
        "Who wrote Faust?",
        "Tom has 12 pens and 7 cups. He sells 5 of them. How much is left at the market?",
        "Which river is the longest?",
    ],
)
def test_other_numbers_and_other_names_make_another_question(text: str) -> None:
    assert FINDER.find(text) is None


def test_the_instruction_around_every_question_does_not_count() -> None:
    ending = " Think step by step, and put your final answer in a box. This matters a lot to us."
    questions = ["How many legs has a cow?", "Name the largest sea.", "What is red and round?"]
    finder = LeakFinder({text: text + ending for text in questions})
    leak = finder.find(questions[0])
    assert leak is not None and leak.kind is LeakKind.EXACT
    assert finder.find("Is it warm today?" + ending) is None
    assert shared_frame([["a", "b", "z"], ["a", "c", "z"], ["a", "d", "z"]]) == (1, 1)
    assert shared_frame([["a", "b"], ["a", "c"]]) == (0, 0)
    assert shared_frame([["a", "b"]] * 3) == (0, 0)


def test_words_and_names() -> None:
    assert words_of("Café: 1,200 ×2.50, a_b") == ["cafe", "1200", "2.50", "a", "b"]
    assert names_of("Where is Lima? The city of New York. Ask Ana") == {
        "lima",
        "new",
        "york",
        "ana",
    }
