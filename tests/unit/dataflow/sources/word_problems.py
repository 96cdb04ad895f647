# SPDX-License-Identifier: Apache-2.0
"""Word problems and short questions as data sets have them: many of few templates, with other
numbers and names in each."""

from __future__ import annotations

import random

NAMES = (
    "Mia",
    "Tom",
    "Ana",
    "Raj",
    "Lena",
    "Omar",
    "Zoe",
    "Ivan",
    "Ruth",
    "Kofi",
    "Elif",
    "Hugo",
    "Nina",
    "Paul",
    "Sara",
    "Yuki",
)
THINGS = (
    "apples",
    "pens",
    "stickers",
    "marbles",
    "books",
    "cards",
    "shells",
    "coins",
    "candles",
    "buttons",
    "ribbons",
    "cups",
)
PLACES = (
    "market",
    "school",
    "library",
    "station",
    "harbour",
    "museum",
    "bakery",
    "garden",
    "stadium",
    "theatre",
)
COUNTRIES = (
    "France",
    "Spain",
    "Kenya",
    "Peru",
    "Japan",
    "Norway",
    "Chile",
    "Ghana",
    "India",
    "Egypt",
    "Cuba",
    "Laos",
    "Nepal",
    "Malta",
    "Togo",
    "Poland",
    "Greece",
    "Oman",
    "Qatar",
    "Fiji",
)
TEMPLATES = (
    "{N} has {a} {t} and buys {b} more at the {p}. Then {N} gives {c} of them to {M}. How "
    "many {t} does {N} have now?",
    "A train leaves the station at {a} km per hour and travels for {b} hours before it "
    "stops for {c} minutes. It then goes on for {d} hours at the same speed. How far does "
    "it travel in all?",
    "The {p} sells {t} for ${a} each. On Monday it sold {b} of them, and on Tuesday {c} "
    "more than on Monday. How much money did the {p} earn in these two days?",
    "{N} reads {a} pages of a book every day and {M} reads {b} pages of it every day. The "
    "book has {c} pages. How many days earlier than the slower reader does the faster one "
    "finish the book?",
    "There are {a} rows of chairs in the {p} with {b} chairs in each row. If {c} chairs "
    "are broken and {d} people already sit there, how many more people can find a chair?",
    "{N} saves ${a} every week. After {b} weeks {N} spends ${c} on {t}. What share of the "
    "savings, in percent, is left after that, rounded to the nearest whole number?",
    "In a class of {a} students, {b} play football, {c} play chess and {d} play both. How "
    "many students of the class play neither football nor chess?",
    "A rectangle has a length of {a} cm and a width of {b} cm. {N} cuts a square with a "
    "side of {c} cm out of one of its corners. What is the area of the shape that is "
    "left, in square centimetres?",
    "{N} and {M} share {a} {t} in the ratio {b} to {c}. How many more {t} does the one "
    "with the larger share get than the other one?",
    "Find the remainder when the number {a}{b} is divided by {c}, and then add {d} to "
    "what you found.",
)
QUESTIONS = (
    "What is the capital city of the country that borders {C} in the north and once ruled it?",
    "Who was the first person from {C} to win a medal at the winter games?",
    "Which river flows through the largest city of {C} and ends in the sea?",
    "In which year did {N} the painter leave {C} for the last time?",
)


def make_text(rng: random.Random) -> str:
    """One problem, or one question without numbers in ten."""
    is_short = rng.random() < 0.1
    template = rng.choice(QUESTIONS if is_short else TEMPLATES)
    first, second = rng.sample(NAMES, 2)
    numbers = {key: rng.randint(2, 99) for key in "abcd"}
    return template.format(
        N=first,
        M=second,
        t=rng.choice(THINGS),
        p=rng.choice(PLACES),
        C=" ".join(rng.sample(COUNTRIES, 2)),
        **numbers,
    )


def edit_lightly(text: str, rng: random.Random) -> str:
    """Other case, spacing and punctuation, and up to one word in ten replaced; never a number."""
    words = text.split()
    plain = [at for at, word in enumerate(words) if word.isalpha() and word.islower()]
    for at in rng.sample(plain, min(len(plain), len(words) // 10)):
        words[at] = rng.choice(["really", "exactly", "then", "item", "whole"])
    joined = rng.choice([" ", "  "]).join(words)
    joined = rng.choice([str.upper, str.lower, str])(joined)
    return rng.choice(
        [joined, joined.replace(",", ""), f"- {joined}\n", joined.replace("?", " ??")]
    )
