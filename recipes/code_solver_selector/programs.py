# SPDX-License-Identifier: Apache-2.0
"""Programs that the built-in model can write: it knows the letters a to j and `>`.

Owns the tasks, and the Python source around what a model wrote. A program is the name of one
function of LIBRARY. A real model writes Python in its place: change `program`.
"""

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
OUTPUTS = {
    "aa>": [2 * x for x in INPUTS],
    "bb>": [x // 2 for x in INPUTS],
    "cc>": [9 - x for x in INPUTS],
}
"""What the right program returns for INPUTS, by what it is asked for with."""


def make_task(ordinal: int, seed: int) -> dict[str, object]:
    prompt = tuple(OUTPUTS)[(ordinal + seed) % len(OUTPUTS)]
    return {"prompt": prompt, "outputs": OUTPUTS[prompt]}


def program(text: str) -> str:
    """Python source of what the solver wrote. It prints its outputs, and knows no right ones."""
    return f"{LIBRARY}\nprint([({text})(x) for x in range({len(INPUTS)})])\n"
