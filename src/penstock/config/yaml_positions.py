# SPDX-License-Identifier: Apache-2.0
"""Lines of a YAML text: the position of each key, and what the text may not contain.

Owns the refusal of duplicate keys, explicit tags, self-references and texts too deep or too large
to be a config. Knows no schema, and constructs values only of a text without such problems."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from penstock.options import KeyPath
from penstock.plugins import quoted

MAX_DEPTH = 32
"""Deepest nesting; the schema needs seven levels."""
MAX_NODES = 10_000
"""Largest number of nodes after expanding aliases, so that a short text cannot become huge;
OmegaConf takes no more."""
MAX_CHARS = 1 << 20
"""Longest text of all scalars, after expanding aliases."""
MAX_KEY_CHARS = 256
"""Longest key: each message about what is below repeats it, and an alias may repeat it, too."""
MAX_PROBLEMS = 100
"""So many are enough to mend a file; a walk ends there."""
MAX_NUMBER_CHARS = 128
"""Longest number: to write out one of millions of digits takes minutes, or fails."""

_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""What OmegaConf resolves: `${` after an even number of backslashes."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""LibYAML takes a tenth of the time, where PyYAML was built with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlProblem:
    """A problem that does not depend on the schema."""

    line: int
    """Line in the text, from 1."""
    path: KeyPath
    """The key concerned; empty for the full text."""
    text: str
    """What is wrong and how to fix it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPositions:
    """The line of each key of a text."""

    lines: Mapping[KeyPath, int]
    """Line of each key and list item, from 1; the empty path is the first line of the text."""
    problems: tuple[YamlProblem, ...]
    """Why the text cannot be read, in order of lines."""
    is_mapping: bool
    """Whether the text is one mapping at its top."""
    is_empty: bool
    """Whether there are only comments."""
    interpolations: tuple[KeyPath, ...]
    """The values with a `${}` that is not escaped."""

    def line_of(self, path: KeyPath) -> int:
        """Line of a key, or of its nearest parent that is written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def locate_keys(text: str) -> KeyPositions:
    """Find the line of every key, and everything that makes the text unreadable."""
    problems: list[YamlProblem] = []
    root: yaml.Node | None = None
    try:
        problems += _forbidden_yaml(text)
        if not problems:
            root = compose(text)
    except yaml.YAMLError as error:
        problems.append(_syntax(error))
    walk = _NodeVisitor()
    if root is not None:
        walk.lines[()] = root.start_mark.line + 1
        walk.visit(root, (), ())
    return KeyPositions(
        lines=walk.lines,
        problems=tuple(problems + walk.problems),
        is_mapping=isinstance(root, yaml.MappingNode),
        is_empty=root is None and not problems,
        interpolations=tuple(walk.interpolations),
    )


def read_values(text: str) -> Any:
    """The values of a text of any author; YAMLError for what `locate_keys` refuses."""
    if problems := locate_keys(text).problems:
        raise yaml.YAMLError(f"line {problems[0].line}: {problems[0].text}")
    return yaml.SafeLoader(text).get_single_data()


def compose(text: str) -> yaml.Node | None:
    """The nodes of a text; an alias is the node itself."""
    found = yaml.compose  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast(yaml.Node | None, found(text, Loader=_LOADER))


def events(text: str) -> Iterator[yaml.Event]:
    """The text as a flat stream, which nothing in it makes longer."""
    parse = yaml.parse  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast(Iterator[yaml.Event], parse(text, Loader=_LOADER))


def _forbidden_yaml(text: str) -> list[YamlProblem]:
    """Tags and nesting, seen in the flat stream of events before anything recurses over it."""
    depth = 0
    for count, event in enumerate(events(text)):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or count > 2 * MAX_NODES:
            return [YamlProblem(line=line, path=(), text="too deep or too large for a run file")]
        tag = getattr(event, "tag", None)
        if tag is not None:
            return [YamlProblem(line=line, path=(), text=f"tag {tag} is not allowed; delete it")]
    return []


def _syntax(error: yaml.YAMLError) -> YamlProblem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        return YamlProblem(
            line=mark.line + 1 if mark else 1,
            path=(),
            text=f"not YAML: {what}; check indentation, quotes and brackets around this line",
        )
    return YamlProblem(line=1, path=(), text=f"not YAML: {str(error).splitlines()[0]}")


def _is_text(key: yaml.ScalarNode) -> bool:
    """Text as a key; `on` is a key of stages, although YAML reads it as a boolean."""
    return key.tag == _STR or key.value == "on"


@dataclass(slots=True)
class _NodeVisitor:
    """One pass over the nodes, with aliases expanded."""

    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    problems: list[YamlProblem] = field(default_factory=list[YamlProblem])
    interpolations: list[KeyPath] = field(default_factory=list[KeyPath])
    num_nodes: int = 0
    num_chars: int = 0

    def visit(self, node: yaml.Node, path: KeyPath, ancestors: tuple[yaml.Node, ...]) -> None:
        self.num_nodes += 1
        if node in ancestors:
            self._refuse(node, path, "refers to itself; write the value out")
        elif len(ancestors) > MAX_DEPTH or self.num_nodes == MAX_NODES:
            self._refuse(node, path, "too deep or too large for a run file")
        elif self.num_nodes > MAX_NODES or len(self.problems) >= MAX_PROBLEMS:
            return
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[*path, index] = item.start_mark.line + 1
                self.visit(item, (*path, index), (*ancestors, node))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path, ancestors)
        elif isinstance(node, yaml.ScalarNode):
            self._visit_scalar(node, path)

    def _visit_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        length = len(node.value)
        self.num_chars += length
        if self.num_chars - length <= MAX_CHARS < self.num_chars:
            self._refuse(node, path, "too deep or too large for a run file")
        elif self.num_chars > MAX_CHARS:
            return
        elif node.tag in _NUMBERS and length > MAX_NUMBER_CHARS:
            text = f"a number of {length} characters; put quotes around it if it is text"
            self._refuse(node, path, text)
        elif _INTERPOLATION.search(node.value):
            self.interpolations.append(path)

    def _visit_mapping(
        self, node: yaml.MappingNode, path: KeyPath, ancestors: tuple[yaml.Node, ...]
    ) -> None:
        for key, value in node.value:
            line = key.start_mark.line + 1
            if len(self.problems) >= MAX_PROBLEMS:
                return
            if key.tag == _MERGE:
                self.visit(value, (*path, "<<"), (*ancestors, node))
            elif len(key.value) > MAX_KEY_CHARS:
                self._refuse(key, path, f"a key is longer than {MAX_KEY_CHARS} characters")
            elif not isinstance(key, yaml.ScalarNode) or not _is_text(key):
                written = key.value if isinstance(key, yaml.ScalarNode) else "this key"
                self._refuse(key, path, f"{written} is not text; put quotes around the key")
            elif (place := (*path, key.value)) in self.lines:
                first = self.lines[place]
                text = f"duplicate key {quoted(key.value)}, first on line {first}; keep one of them"
                self.problems.append(YamlProblem(line=line, path=place, text=text))
            else:
                self.lines[place] = line
                self.visit(value, place, (*ancestors, node))

    def _refuse(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append(YamlProblem(line=line, path=path, text=text))
