# SPDX-License-Identifier: Apache-2.0
"""Fail when prose or names use a banned word: see scripts/banned_words.toml.

Prose is the docstrings, comments and string literals of src and scripts' messages, and the pages
README.md and docs. Code spans and code blocks of pages are not prose. Prints one line per finding:
where, what, and what to write instead."""

from __future__ import annotations

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "scripts" / "banned_words.toml"
CODE = ("src",)
PAGES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "docs")
_CODE_SPAN = re.compile(r"`+[^`\n]+`+")
_IDENTIFIER_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedWords:
    phrases: tuple[tuple[re.Pattern[str], str], ...]
    """Pattern over prose, and what to write instead."""
    names: dict[str, str]
    """Word of an identifier, in lower case, and what to write instead."""


def read_list(path: Path = LIST) -> BannedWords:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return BannedWords(
        phrases=tuple(
            (re.compile(entry["pattern"], re.IGNORECASE), entry["instead"])
            for entry in table["phrase"]
        ),
        names={entry["word"]: entry["instead"] for entry in table["name"]},
    )


def check_prose(text: str, first_line: int, banned: BannedWords) -> Iterator[tuple[int, str]]:
    """Line number and message of each banned phrase, also where it spans a line break."""
    flat = _CODE_SPAN.sub(lambda span: " " * len(span.group()), text)
    joined = re.sub(r"\n[ \t#>]*", lambda gap: "\n" + " " * (len(gap.group()) - 1), flat)
    spaced = joined.replace("\n", " ")
    single = re.sub(r" +", lambda gap: " " + "\0" * (len(gap.group()) - 1), spaced)
    dense, at = "", list[int]()
    for position, character in enumerate(single):
        if character != "\0":
            dense += character
            at.append(position)
    for pattern, instead in banned.phrases:
        for found in pattern.finditer(dense):
            line = first_line + flat.count("\n", 0, at[found.start()])
            yield line, f'"{found.group().strip()}": write {instead}'


def check_code(source: str, banned: BannedWords) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from check_prose(token.string, token.start[0], banned)
        elif token.type == tokenize.NAME:
            for word in _IDENTIFIER_WORD.findall(token.string):
                if instead := banned.names.get(word.lower()):
                    yield token.start[0], f"name {token.string}: write {instead}"


def check_page(text: str, banned: BannedWords) -> Iterator[tuple[int, str]]:
    without_blocks = re.sub(
        r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.M | re.S
    )
    yield from check_prose(without_blocks, 1, banned)


def files(roots: Iterable[str], suffix: str) -> Iterator[Path]:
    for root in roots:
        path = ROOT / root
        yield from [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))


def main() -> int:
    banned = read_list()
    findings: list[str] = []
    checked = 0
    for path in [*files(CODE, ".py"), *files(PAGES, ".md")]:
        text = path.read_text(encoding="utf-8")
        check = check_code if path.suffix == ".py" else check_page
        findings += [
            f"{path.relative_to(ROOT)}:{line}: {message}" for line, message in check(text, banned)
        ]
        checked += 1
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"check_words: {checked} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
