# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to a run file, reading it gives a config or a `ConfigError`, nothing else."""

import re
from collections.abc import Iterator
from typing import Any, cast

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import RunConfig, demo_config, dump
from penstock.config.loader import parse
from penstock.errors import ConfigError

VALID_CONFIG = dump(demo_config(0))
LINE = re.compile(r"(run\.yaml:\d+: |override \").+")

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["???", "${name}", "${", "${a}", "survivors(99999999999)", "1e3", "hf"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PIECES = st.sampled_from(
    [
        *[
            "\n",
            " ",
            "  ",
            ": ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            "&a ",
            "*a",
            "!!int ",
            "!x ",
            "'",
            '"',
            "|",
        ],
        *[
            "#",
            "${",
            "}",
            "${name}",
            "${oc.env:X}",
            "???",
            "<<: ",
            "0b_",
            "1" * 5000,
            "\t",
            "\0",
            "%",
        ],
        *[
            "null",
            "~",
            "yes",
            ".nan",
            ".inf",
            "2020-01-01",
            "? ",
            "---\n",
            "...\n",
            "name",
            "\\",
            "é",
        ],
    ]
)


def read(text: str, overrides: list[str]) -> RunConfig | None:
    """Read; a refusal must be a list of well-formed lines."""
    try:
        return parse(text, origin="run.yaml", overrides=overrides)
    except ConfigError as error:
        for line in str(error).splitlines() or [""]:
            assert LINE.fullmatch(line), str(error)
        return None


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a tree, the root left out."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(cast(dict[Any, Any], value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast(list[Any], value)))
    for key, below in items:
        yield (*path, key)
        yield from key_paths(below, (*path, key))


def change(tree: Any, path: tuple[Any, ...], action: str, junk: Any) -> None:
    for part in path[:-1]:
        tree = tree[part]
    if action == "replace":
        tree[path[-1]] = junk
    elif action == "delete":
        del tree[path[-1]]
    elif isinstance(tree, dict):
        tree[f"{path[-1]}x"] = junk
    else:
        tree.append(junk)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_changed_trees(data: st.DataObject) -> None:
    tree = yaml.safe_load(VALID_CONFIG)
    for _ in range(data.draw(st.integers(1, 4))):
        known = list(key_paths(tree))
        if not known:
            break
        action = data.draw(st.sampled_from(["replace", "delete", "add"]))
        change(tree, data.draw(st.sampled_from(known)), action, data.draw(JUNK))
    read(yaml.safe_dump(tree, sort_keys=False), [])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_changed_texts(data: st.DataObject) -> None:
    text = VALID_CONFIG
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.sampled_from([0, 0, 1, 3, 40]))
        text = text[:start] + data.draw(PIECES | st.text(max_size=3)) + text[end:]
    read(text, [])


@settings(deadline=None, max_examples=40)
@given(text=st.text() | st.lists(PIECES).map("".join))
def test_any_text(text: str) -> None:
    read(text, [])


KEYS = st.sampled_from(
    [
        *["seed", "sources", "sources.0", "sources[0].task", "sources[9].x", "models.policy.init"],
        *[
            "dataflow.rules",
            "dataflow.rules[0]",
            "dataflow.closing",
            "training",
            "a.b",
            "sources.x.y",
        ],
        *[
            "name.x",
            "models",
            "algorithm.epsilon",
            "sources.0.name.z",
            "report_to.0",
            "",
            ".",
            "a[",
        ],
    ]
)
VALUES = (
    JUNK.map(lambda junk: yaml.safe_dump(junk, default_flow_style=True).strip())
    | st.lists(PIECES, max_size=4).map("".join)
    | st.text(max_size=5)
)


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
def test_any_overrides(pairs: list[tuple[str, str]]) -> None:
    read(VALID_CONFIG, [f"{key}={value}" for key, value in pairs])


@settings(deadline=None, max_examples=40)
@given(overrides=st.lists(st.text(max_size=8), min_size=1, max_size=2))
def test_any_text_as_override(overrides: list[str]) -> None:
    read(VALID_CONFIG, overrides)
