# SPDX-License-Identifier: Apache-2.0
"""One row of a suite's data set, and how rows of the usual suites become questions.

Each function takes a row and returns {"prompt", "answer", …}; None leaves the row out. Reads no
file. A missing column is named with its place."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind
from penstock.scorers.choice import LETTERS
from penstock.scorers.code import assert_tests, check_tests, output_tests
from penstock.types import JsonObject

IN_A_BOX = "{question}\n\nThink step by step, and put your final answer in \\boxed{{}}."
ONE_OPTION = (
    "{question}\n\n{options}\n\nThink step by step, and end with the letter of the right option in "
    'the form "Answer: X".'
)
SHORT_ANSWER = '{question}\n\nEnd with a short answer in the form "Answer: …".'
A_PROGRAM = "{question}\n\nReply with the whole program in one block of Python code."
MAX_TESTS_BYTES = 1 << 20
"""Hidden tests of one question travel with every lease."""
MAX_UNPACKED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """One row as it is stored."""

    values: Mapping[str, Any]
    place: str

    def value(self, *columns: str) -> Any:
        """The value of the first of these columns that the row has."""
        for column in columns:
            if self.values.get(column) is not None:
                return self.values[column]
        raise self.bad(
            f"the suite needs the column {' or '.join(columns)}, and the row has: "
            f"{', '.join(self.values) or 'nothing'}; name a file with the columns of the original "
            "data set",
            BadRowKind.MISSING_COLUMN,
        )

    def text(self, *columns: str) -> str:
        return str(self.value(*columns)).strip()

    def bad(self, text: str, kind: BadRowKind = BadRowKind.UNSUPPORTED_TYPE) -> BadRow:
        return BadRow(self.place, kind, text)


Convert = Callable[[SuiteRow], "JsonObject | None"]


def maths(row: SuiteRow) -> JsonObject:
    """A problem with its answer."""
    question = row.text("problem", "question", "Problem")
    answer = row.text("answer", "expected_answer", "Answer")
    return {"prompt": IN_A_BOX.format(question=question), "answer": answer}


def gsm8k(row: SuiteRow) -> JsonObject:
    """The answer follows `####` at the end of the solution."""
    solution, mark, answer = row.text("answer").rpartition("####")
    if not mark or not answer.strip():
        raise row.bad(f"the answer {solution[-60:]!r} has no part after ####; name a file that has")
    question = IN_A_BOX.format(question=row.text("question"))
    return {"prompt": question, "answer": answer.strip().replace(",", "")}


def olympiadbench(row: SuiteRow) -> JsonObject | None:
    """Problems without images; several final answers are one set."""
    if any(name.startswith("image") and row.values[name] for name in row.values):
        return None
    found = row.value("final_answer", "answer")
    answers = [str(one) for one in found] if isinstance(found, list) else [str(found)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    context = str(row.values.get("context") or "").strip()
    question = f"{context}\n\n{row.text('question')}".strip()
    answer = ", ".join(one.replace("$", "").strip() for one in answers)
    return {"prompt": IN_A_BOX.format(question=question), "answer": answer}


def _choice(question: str, choices: Sequence[str], right: int) -> JsonObject:
    lines = [f"{LETTERS[at]}. {choice}" for at, choice in enumerate(choices)]
    prompt = ONE_OPTION.format(question=question, options="\n".join(lines))
    return {"prompt": prompt, "answer": LETTERS[right], "choices": list(choices)}


def gpqa(row: SuiteRow) -> JsonObject:
    """Four options in an order that depends on the question alone."""
    question, right = row.text("Question"), row.text("Correct Answer")
    choices = [right, *(row.text(f"Incorrect Answer {number}") for number in (1, 2, 3))]
    order = list(range(4))
    random.Random(f"gpqa/{question}").shuffle(order)
    return _choice(question, [choices[at] for at in order], order.index(0))


def mmlu_pro(row: SuiteRow) -> JsonObject:
    choices = [str(one) for one in row.value("options")]
    letter = row.text("answer")
    if letter not in LETTERS[: len(choices)]:
        raise row.bad(f"the answer {letter!r} is not the letter of one of {len(choices)} options")
    return _choice(row.text("question"), choices, LETTERS.index(letter))


def arc(row: SuiteRow) -> JsonObject:
    """Options are labelled with letters or digits."""
    choices = cast("Mapping[str, list[str]]", row.value("choices"))
    labels, right = choices["label"], row.text("answerKey")
    if right not in labels:
        raise row.bad(f"the answer {right!r} is not one of the options {', '.join(labels)}")
    return _choice(row.text("question"), choices["text"], labels.index(right))


def humaneval(row: SuiteRow) -> JsonObject:
    starter, name = str(row.value("prompt")), row.text("entry_point")
    block = f"Complete this program.\n\n```python\n{starter.rstrip()}\n```"
    return {
        "prompt": A_PROGRAM.format(question=block),
        "answer": "",
        "tests": check_tests(str(row.value("test")), name, starter),
        "entry_point": name,
        "starter": starter,
    }


def mbpp(row: SuiteRow) -> JsonObject:
    asserts = [str(one) for one in row.value("test_list")]
    imports = cast("list[str]", row.values.get("test_imports") or [])
    setup = "\n".join([*imports, str(row.values.get("test_setup_code") or "")])
    question = f"{row.text('prompt', 'text')}\n\nIt must pass this test:\n{asserts[0]}"
    return {
        "prompt": A_PROGRAM.format(question=question),
        "answer": "",
        "tests": assert_tests(asserts, setup),
    }


def livecodebench(row: SuiteRow) -> JsonObject:
    """Programs by their output, and methods by their value; public and private tests."""
    starter = str(row.values.get("starter_code") or "").rstrip()
    question = row.text("question_content")
    if starter:
        question += f"\n\nBegin with:\n```python\n{starter}\n```"
    else:
        question += "\n\nRead from standard input and print the result."
    try:
        method = str(json.loads(str(row.values.get("metadata") or "{}")).get("func_name") or "")
    except (ValueError, AttributeError, RecursionError):
        raise row.bad("metadata is not a JSON object") from None
    cases = [*_cases(row, "public_test_cases"), *_cases(row, "private_test_cases")]
    kept = _within_bytes(cases)
    return {
        "prompt": A_PROGRAM.format(question=question),
        "answer": "",
        "tests": output_tests(kept, f"Solution.{method}" if method else ""),
        "num_tests_left_out": len(cases) - len(kept),
    }


def _within_bytes(cases: list[JsonObject]) -> list[JsonObject]:
    """The smallest tests, as many as a task can carry, in their order."""
    sizes = [len(str(case["input"])) + len(str(case["output"])) for case in cases]
    kept, used = set[int](), 0
    for at in sorted(range(len(cases)), key=sizes.__getitem__):
        used += sizes[at]
        if used <= MAX_TESTS_BYTES:
            kept.add(at)
    return [case for at, case in enumerate(cases) if at in kept]


def _cases(row: SuiteRow, column: str) -> list[JsonObject]:
    """Tests as JSON; or packed as a pickled text, which is read without running it."""
    text = row.text(column)
    try:
        if not text.startswith("["):
            text = _unpickled_text(_inflated(base64.b64decode(text, validate=True)))
        return json.loads(text)
    except (ValueError, binascii.Error, zlib.error, RecursionError) as error:
        text = f"{column} cannot be read: {error}; download the file again"
        raise row.bad(text) from None


def _inflated(data: bytes) -> bytes:
    found = zlib.decompressobj().decompress(data, MAX_UNPACKED_BYTES)
    if len(found) == MAX_UNPACKED_BYTES:
        raise ValueError(f"more than {MAX_UNPACKED_BYTES:,} bytes")
    return found


def _unpickled_text(data: bytes) -> str:
    texts = [argument for code, argument, _ in pickletools.genops(data) if "UNICODE" in code.name]
    if len(texts) != 1:
        raise ValueError("it is not one packed text")
    return str(texts[0])


def _short(question: str, answers: Sequence[str]) -> JsonObject:
    unique = list(dict.fromkeys(one for one in answers if one.strip()))
    return {"prompt": SHORT_ANSWER.format(question=question), "answer": unique}


def short_answer(row: SuiteRow) -> JsonObject:
    """One answer, or one and its aliases."""
    aliases = map(str, cast("list[Any]", row.values.get("answer_aliases") or []))
    return _short(row.text("question", "Question"), [row.text("answer", "Answer"), *aliases])


def triviaqa(row: SuiteRow) -> JsonObject:
    answer = cast("Mapping[str, Any]", row.value("answer"))
    return _short(row.text("question"), [str(answer["value"]), *map(str, answer["aliases"])])


def gaia(row: SuiteRow) -> JsonObject | None:
    """Questions without an attached file."""
    if str(row.values.get("file_name") or "").strip():
        return None
    return _short(row.text("Question"), [row.text("Final answer")])


_NUMBER = re.compile(r"[^\w.-]+")


def clean_id(value: object) -> str:
    """An id for file names and tables."""
    return _NUMBER.sub("-", str(value)).strip("-")[:100]
