# SPDX-License-Identifier: Apache-2.0
"""Reads the Dockerfile of a Harbor task: FROM, WORKDIR, COPY, ENV, and where RUN stands.

Pure: text in, an Image out. Refuses every other instruction, flag and form by its name and line;
so nothing of a Dockerfile is left out unseen. Runs nothing and copies nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn, cast

from penstock.errors import ConfigError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What `$PATH` means in a Dockerfile."""
MAX_CHARS = 1 << 16
MAX_VALUE_CHARS = 1 << 12
"""Of a variable: values repeat others, so a few lines could fill the memory."""
MAX_INSTRUCTION_CHARS = 1 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEREDOC = re.compile(r"<<-?\s*([\"']?)([A-Za-z_][A-Za-z0-9_]*)\1")
_CHMOD = re.compile(r"[0-7]{3,4}")
_HONOURED = "FROM, WORKDIR, COPY, ENV and RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    sources: tuple[str, ...]
    """Paths below environment/; may have * and ?."""
    target: str
    """Absolute; ends in / where it must be a folder."""
    mode: int | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    base: str
    """What FROM names."""
    workdir: str
    """Empty if there is none."""
    env: Mapping[str, str]
    copies: tuple[Copy, ...]
    run_lines: tuple[int, ...]
    """Lines of RUN; their effects must already be in the root file system."""


def parse_dockerfile(text: str, place: str) -> Image:
    """`place` names the file in messages. Raises ConfigError."""
    if len(text) > MAX_CHARS:
        _refuse(place, 1, f"it has {len(text):,} characters; at most {MAX_CHARS:,} are read")
    reader = _Reader(place)
    for line, words in _instructions(text, place):
        reader.read(line, words)
    return reader.image()


def _refuse(place: str, line: int, text: str) -> NoReturn:
    raise ConfigError(f"{place}:{line}: {text}")


def _instructions(text: str, place: str) -> Iterator[tuple[int, str]]:
    """Each instruction with the line on which it starts; continuation lines are joined."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, first in lines:
        stripped = first.strip()
        if re.match(r"#\s*escape\s*=", stripped, re.IGNORECASE):
            _refuse(place, number, "the directive escape= is not supported; continue lines with \\")
        if not stripped or stripped.startswith("#"):
            continue
        joined, last = "", first
        while (part := last.rstrip()).endswith("\\"):
            joined += part[:-1]
            last = next((line for _, line in lines if _is_code(line)), "")
        joined = (joined + last).strip()
        for _, word in cast(list[tuple[str, str]], _HEREDOC.findall(joined)):
            if joined[:3].upper() != "RUN":
                _refuse(place, number, f"<<{word}: here-documents are not supported; use a file")
            if not any(line.strip() == word for _, line in lines):
                _refuse(place, number, f"<<{word} has no end; write a line {word}")
        yield number, joined


def _is_code(line: str) -> bool:
    """Comments and empty lines inside a continued instruction do not end it."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


class _Reader:
    """One build stage, instruction by instruction."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._line = 0
        self._base = ""
        self._workdir = ""
        self._env: dict[str, str] = {}
        self._copies: list[Copy] = []
        self._runs: list[int] = []

    def read(self, line: int, instruction: str) -> None:
        self._line = line
        name, _, rest = instruction.partition(" ")
        name, rest = name.upper(), rest.strip()
        known = {
            "FROM": self._from,
            "WORKDIR": self._set_workdir,
            "COPY": self._copy,
            "ENV": self._set_env,
            "RUN": self._run,
        }
        if name not in known:
            self.refuse(f"{name} is not supported; honoured are {_HONOURED}: remove it")
        if not rest:
            self.refuse(f"{name} needs an argument")
        if name != "FROM" and not self._base:
            self.refuse(f"{name} comes before FROM; write FROM first")
        known[name](rest)

    def image(self) -> Image:
        if not self._base:
            self._line = 1
            self.refuse("there is no FROM; write one, such as FROM python:3.12-slim")
        return Image(
            base=self._base,
            workdir=self._workdir,
            env=self._env,
            copies=tuple(self._copies),
            run_lines=tuple(self._runs),
        )

    def refuse(self, text: str) -> NoReturn:
        _refuse(self._place, self._line, text)

    def _from(self, rest: str) -> None:
        words = rest.split()
        if words[0].startswith("--") or "$" in words[0]:
            self.refuse(f"FROM {words[0]} is not supported; name an image")
        if self._base or len(words) > 1:
            self.refuse("FROM with several stages is not supported; write one FROM IMAGE")
        self._base = words[0]

    def _set_workdir(self, rest: str) -> None:
        words = self._words(rest)
        self._workdir = self._absolute(" ".join(words))

    def _run(self, rest: str) -> None:
        self._runs.append(self._line)

    def _set_env(self, rest: str) -> None:
        key, space, value = rest.partition(" ")
        if "=" not in key:  # the old form, ENV KEY the rest is the value
            if not space:
                self.refuse(f"ENV {key} has no value; write ENV {key}=value")
            pairs = [(key, " ".join(self._words(value)))]
        else:
            pairs = [self._pair(word) for word in self._words(rest)]
        for name, text in pairs:
            if not _NAME.fullmatch(name):
                self.refuse(f"ENV: {name!r} cannot name a variable")
            if len(text) > MAX_VALUE_CHARS:
                self.refuse(f"ENV {name}: its value has more than {MAX_VALUE_CHARS:,} characters")
            self._env[name] = text

    def _pair(self, word: str) -> tuple[str, str]:
        name, equals, value = word.partition("=")
        if not equals:
            self.refuse(f"ENV: {word!r} is not NAME=VALUE; put quotes around a value with spaces")
        return name, value

    def _copy(self, rest: str) -> None:
        mode: int | None = None
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            key, _, value = flag.partition("=")
            if key != "--chmod" or not _CHMOD.fullmatch(value):
                self.refuse(f"COPY {flag} is not supported; of the flags, --chmod=755 is honoured")
            mode, rest = int(value, 8), rest.strip()
        words = self._json_words(rest) if rest.startswith("[") else self._words(rest)
        if len(words) < 2:
            self.refuse("COPY needs a source and a target")
        *sources, target = words
        for source in sources:
            if ".." in PurePosixPath(source).parts:
                self.refuse(f"COPY {source} leaves the folder environment/; copy from inside it")
        is_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
        absolute = self._absolute(target)
        self._copies.append(
            Copy(
                sources=tuple(source.lstrip("/") or "." for source in sources),
                target=absolute.rstrip("/") + "/" if is_folder else absolute,
                mode=mode,
                line=self._line,
            )
        )

    def _json_words(self, rest: str) -> list[str]:
        try:
            words: Any = json.loads(rest)
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, list) or not all(
            isinstance(word, str) for word in cast(list[Any], words)
        ):
            self.refuse('COPY [ is not a JSON list of texts; write COPY ["from", "to"]')
        return [self._expand(word) for word in cast(list[str], words)]

    def _absolute(self, path: str) -> str:
        parts = (PurePosixPath(self._workdir or "/") / path).parts
        if ".." in parts:
            self.refuse(f"the path {path} has `..`; write it out")
        return str(PurePosixPath(*parts))

    def _words(self, text: str) -> list[str]:
        """Split as Docker does: quotes, backslashes, and variables outside of single quotes."""
        words, quote, has_word, at = list[str](), "", False, 0
        word = _Pieces(self)
        while at < len(text):
            char = text[at]
            if char == "\\" and quote != "'" and at + 1 < len(text):
                at += 1
                keeps = quote == '"' and text[at] not in '"\\$'
                word.add("\\" if keeps else "", text[at])
                has_word = True
            elif char in "\"'" and quote in ("", char):
                quote, has_word = ("" if quote else char), True
            elif char == "$" and quote != "'":
                value, at = self._variable(text, at)
                word.add(value)
                has_word = True
            elif char.isspace() and not quote:
                if has_word:
                    words.append(word.end())
                has_word = False
            else:
                word.add(char)
                has_word = True
            at += 1
        if quote:
            self.refuse(f"a {quote} is not closed")
        return [*words, word.end()] if has_word else words

    def _expand(self, text: str) -> str:
        done, at = _Pieces(self), 0
        while at < len(text):
            if text[at] == "$":
                value, at = self._variable(text, at)
                done.add(value)
            else:
                done.add(text[at])
            at += 1
        return done.end()

    def _variable(self, text: str, at: int) -> tuple[str, int]:
        """The value of the variable at `$`, and the position of its last character."""
        match = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})").match(text, at)
        if match is None:
            return "$", at
        name = match[1] or match[2]
        if not _NAME.fullmatch(name):
            self.refuse(f"${{{name}}} is not supported; only plain variables are")
        value = self._env.get(name, DEFAULT_PATH if name == "PATH" else None)
        if value is None:
            self.refuse(f"${name} is not set by an ENV above; write its value")
        return value, match.end() - 1


class _Pieces:
    """Words of one instruction as they are put together: each use of a variable repeats it."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._left = MAX_INSTRUCTION_CHARS
        self._parts: list[str] = []

    def add(self, *texts: str) -> None:
        self._parts += texts
        self._left -= sum(map(len, texts))
        if self._left < 0:
            self._reader.refuse(
                f"it has more than {MAX_INSTRUCTION_CHARS:,} characters with its variables"
            )

    def end(self) -> str:
        """The word; the next one begins."""
        word = "".join(self._parts)
        self._parts.clear()
        return word
