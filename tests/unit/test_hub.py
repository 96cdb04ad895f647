# SPDX-License-Identifier: Apache-2.0
"""Which texts name a model of the Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.hub import is_same_model, model_folder, parse_hub_model, pin_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "id", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "main"),
        ("a/b@refs/pr/7", "a/b", "refs/pr/7"),
        (f"a/b@{COMMIT}", "a/b", COMMIT),
    ],
)
def test_names_of_the_hub(name: str, id: str, revision: str) -> None:
    model = parse_hub_model(name)
    assert model is not None
    assert (model.id, model.revision, str(model)) == (id, revision, name)
    assert model.is_pinned is (revision == COMMIT)


@pytest.mark.parametrize(
    "name", ["builtin:tiny-qwen3", "gpt2", "./a/b", "/a/b", "~/a", "../a", "a/b/c", "a/b/", "a/b@"]
)
def test_other_texts_are_folders(name: str) -> None:
    assert parse_hub_model(name) is None
    assert pin_model(name, pytest.fail) == name


def test_a_folder_of_that_name_wins_except_over_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/b", f"a/b@{COMMIT}"):
        Path(name).mkdir(parents=True)
    assert parse_hub_model("a/b") is None
    assert model_folder("a/b") == Path("a/b")
    assert parse_hub_model(f"a/b@{COMMIT}") is not None


def test_only_a_commit_of_the_same_model_is_the_same() -> None:
    assert is_same_model("a/b", f"a/b@{COMMIT}")
    assert not is_same_model("a/b", f"a/c@{COMMIT}")
    assert not is_same_model("a/b", "a/b@main")
    assert not is_same_model("a/b@main", f"a/b@{COMMIT}"), "main may have moved"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"penstock-rl\[train\]"):
        pin_model("a/b", lambda text: None)


def test_the_library_loads_only_when_it_is_needed() -> None:
    code = "import sys, penstock.hub as h; h.parse_hub_model('a/b')\n"
    code += "sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
