# SPDX-License-Identifier: Apache-2.0
"""Programs and tests that the built-in model can write: it knows the letters a to j and `>`.

Owns the tasks, and the Python source around what a model wrote. A program is the name of one
function of LIBRARY; a test is an input and an expected output, with letters as digits. A real model
writes Python in place of both: change `program` and `test`.
"""

DIGITS = "abcdefghij"
INPUTS = range(10)
LIBRARY = """
a = lambda x: x
b = lambda x: x + 1
c = lambda x: x - 1
d = lambda x: 2 * x
e = lambda x: x * x
f = lambda x: -x
g = lambda x: x // 2
h = lambda x: x % 3
i = lambda x: 9 - x
j = lambda x: min(x, 4)
"""
TASKS = (
    # Double it; the wrong program squares it.
    {"prompt": "aa>", "right": "d", "wrong": "e", "outputs": [2 * x for x in INPUTS]},
    # Halve it; the wrong program takes the rest of a division by 3.
    {"prompt": "bb>", "right": "g", "wrong": "h", "outputs": [x // 2 for x in INPUTS]},
)


def make_task(ordinal: int, seed: int) -> dict[str, object]:
    return TASKS[(ordinal + seed) % len(TASKS)]


def program(text: str) -> str:
    """Python source of what the solver wrote."""
    return f"{LIBRARY}\ndef solve(x):\n    return ({text})(x)\n"


def test(text: str) -> str:
    """Python source of what the tester wrote; without an input and an output it always fails."""
    numbers = [DIGITS.find(letter) for letter in text]
    if len(numbers) != 2 or -1 in numbers:
        return "raise SystemExit(1)\n"
    return f"assert solve({numbers[0]}) == {numbers[1]}\n"


def prints() -> str:
    """Python source that prints the outputs of a program; it knows no right ones."""
    return f"print([solve(x) for x in range({len(INPUTS)})])\n"
