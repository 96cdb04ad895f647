# SPDX-License-Identifier: Apache-2.0
"""A data set of somebody else: none of its prompts is a file from elsewhere on this machine or
beyond it, and a short file takes no gigabytes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import time
import unicodedata
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.unit.dataflow.data_packages import import_datasets, parquet, pyarrow

from penstock.dataflow.sources import DataSpec, harbor, open_data, tables
from penstock.dataflow.sources.leakage import names_of, words_of
from penstock.errors import ConfigError
from penstock.scorers.exact import normalise
from penstock.scorers.marks import without_marks

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
NULLS = 50_000_000
ROW = b'{"prompt": "one"}\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of who opens the data set, beside which it lies."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "key.txt").write_text(SECRET)
    return home


def _card(path: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        files = {"config_name": "default", "data_files": [{"split": "train", "path": [path]}]}
        (folder / "README.md").write_text(f"---\n{json.dumps({'configs': [files]})}\n---\n")

    return write


def _yaml_card(folder: Path) -> None:
    text = "configs: [{config_name: default, data_files: ../home/key.txt}]\n"
    (folder / ".huggingface.yaml").write_text(text)


def _alias(folder: Path) -> None:
    text = "a: &a ../home/key.txt\nconfigs: [{config_name: default, data_files: [*a]}]"
    (folder / "README.md").write_text(f"---\n{text}\n---\n")


def _link(folder: Path) -> None:
    (folder / "train.txt").symlink_to(folder.parent / "home" / "key.txt")


def _link_of_a_folder(folder: Path) -> None:
    (folder / "data").symlink_to(folder.parent / "home")


def _endless_card(folder: Path) -> None:
    (folder / "README.md").symlink_to("/dev/zero")


def _state(folder: Path) -> None:
    import_datasets().Dataset.from_dict({"prompt": [SECRET]}).save_to_disk(folder.parent / "home")
    state = json.loads((folder.parent / "home" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../home/data-00000-of-00001.arrow"}]
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(state))


def _split(folder: Path) -> None:
    import_datasets().Dataset.from_dict({"prompt": [SECRET]}).save_to_disk(folder.parent / "home")
    (folder / "dataset_dict.json").write_text('{"splits": ["../home"]}')


WAYS_OUT = {
    "absolute": _card("{home}/key.txt"),
    "dots": _card("../home/key.txt"),
    "url": _card("https://192.0.2.1/key.txt"),
    "scheme": _card("file:{home}/key.txt"),
    "chain": _card("a.txt::{home}/key.txt"),
    "hub": _card("hf://datasets/someone/private/key.txt"),
    "yaml": _yaml_card,
    "alias": _alias,
    "link": _link,
    "folder": _link_of_a_folder,
    "endless": _endless_card,
    "state": _state,
    "split": _split,
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_folder_leads_nowhere_else(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(import_datasets().config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "evil"
    folder.mkdir()
    WAYS_OUT[way](folder)
    for card in folder.glob("README.md"):
        if card.is_file():
            card.write_text(card.read_text().replace("{home}", str(home)))
    why = "not in the folder|link out of the folder|alias of YAML"
    split = "../home" if way == "split" else None
    with pytest.raises(ConfigError, match=why) as refused:
        open_data("train", DataSpec(path=str(folder), split=split))
    assert "192.0.2.1" not in str(refused.value) or way == "url"


def test_links_within_a_folder_and_of_a_snapshot_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_datasets().config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repo = tmp_path / "datasets--someone--sums"
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "ab").write_text('{"prompt": "one"}\n')
    (snapshot / "first.jsonl").symlink_to("../../blobs/ab")
    (snapshot / "train.jsonl").symlink_to("first.jsonl")
    _card("train.jsonl")(snapshot)
    assert open_data("train", DataSpec(path=str(snapshot))).row(0) == {"prompt": "one"}
    (repo / "blobs" / "ab").unlink()
    (repo / "blobs" / "ab").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="link out of the folder"):
        open_data("train", DataSpec(path=str(snapshot)))


def _tar() -> bytes:
    """Once unpacked below `cache`, `z.txt` and `D` lead to `home`; `L` writes through `D`."""
    up = 4
    out = "/".join(["d"] * up + [".."] * up + ["home"])
    links = [
        ("z.txt", tarfile.SYMTYPE, f"{out}/key.txt"),
        ("D", tarfile.SYMTYPE, out),
        ("d", tarfile.SYMTYPE, "."),
        ("sub/a/keep.txt", tarfile.REGTYPE, ""),
        ("sub/a/L", tarfile.LNKTYPE, "D/bashrc"),
        ("sub/a/L", tarfile.REGTYPE, ""),
    ]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, kind, target in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            entry.size = len(ROW) * entry.isreg()
            tar.addfile(entry, io.BytesIO(ROW) if entry.isreg() else None)
    return packed.getvalue()


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("train.jsonl", ROW)
    return packed.getvalue()


PACKED = {
    "train.txt": _tar(),
    "train.jsonl": _tar(),
    "train.conll": _tar(),
    "train.txt.tar.gz": gzip.compress(_tar()),
    "train.tar": _tar(),
    "deep/train.jsonl": _zip(),
    "train.zip": _zip(),
    "train.json": gzip.compress(ROW),
    "train.jsonl.gz": gzip.compress(ROW),
    "train.csv": lzma.compress(b"prompt\none\n"),
    "train.csv.xz": lzma.compress(b"prompt\none\n", lzma.FORMAT_ALONE),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of `datasets`, beside `home`."""
    cache, config = tmp_path / "cache", import_datasets().config
    downloads = cache / "downloads"
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(config, "DOWNLOADED_DATASETS_PATH", downloads)
    monkeypatch.setattr(config, "EXTRACTED_DATASETS_PATH", str(downloads / "extracted"))
    return cache


def _open_packed(home: Path, name: str, data: bytes) -> ConfigError:
    """The refusal of a folder with this file, of which nothing was unpacked."""
    (home / "bashrc").write_text("# my own\n")
    path = home.parent / "evil" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        open_data("train", DataSpec(path=str(home.parent / "evil")))
    assert (home / "bashrc").read_text() == "# my own\n"
    return refused.value


@pytest.mark.parametrize("name", PACKED)
def test_nothing_of_a_folder_is_unpacked(home: Path, cache: Path, name: str) -> None:
    refused = str(_open_packed(home, name, PACKED[name]))
    assert f"{name} is an archive or compressed" in refused and "set data.path to" in refused
    assert not (cache / "downloads").exists()


def test_what_is_packed_without_a_sign_of_it_is_read_as_it_is(home: Path, cache: Path) -> None:
    packed = lzma.compress(_tar(), lzma.FORMAT_ALONE)
    assert "cannot be loaded" in str(_open_packed(home, "train.txt", packed))
    assert not (cache / "downloads").exists()


def test_one_long_value_of_many_rows_is_read_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.parquet"
    uses = pyarrow.array([0] * 256, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(uses, pyarrow.array(["a" * (1 << 20)]))
    table = pyarrow.table({"prompt": column})
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        open_data("train", DataSpec(path=str(path), has_prompt=True)).check()
    finally:
        pyarrow.set_memory_pool(before)
    assert path.stat().st_size < 1 << 10 and pool.max_memory() < 64 << 20
    monkeypatch.setattr(tables, "MAX_WINDOW_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"row 1, or one after it, is too long"):
        open_data("train", DataSpec(path=str(path))).row(0)


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_values_that_cost_a_file_nothing_are_counted(tmp_path: Path, is_dictionary: bool) -> None:
    path = tmp_path / "bomb.parquet"
    values = pyarrow.nulls(NULLS)
    if is_dictionary:
        uses = pyarrow.array([0] * 1000, pyarrow.int32())
        values = pyarrow.DictionaryArray.from_arrays(uses, pyarrow.array(["a" * (1 << 20)]))
    offsets = pyarrow.array([0, len(values)], pyarrow.int32())
    row = pyarrow.ListArray.from_arrays(offsets, values)
    parquet.write_table(pyarrow.table({"prompt": row}), path)
    with pytest.raises(ConfigError, match="is too long"):
        open_data("train", DataSpec(path=str(path))).row(0)


def test_values_of_any_shape_are_read(tmp_path: Path) -> None:
    row = {"map": {"a": 1}, "list": [[1], []], "struct": {"a": [None]}, "none": None, "yes": True}
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    columns = {name: pyarrow.array([value]) for name, value in row.items() if name != "map"}
    columns["map"] = pyarrow.array([row["map"]], kind)
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    found = open_data("train", DataSpec(path=str(tmp_path / "a.parquet"))).row(0)
    assert found == {**row, "map": [("a", 1)]}


LONG_WORD = "canary" * 40_000
HARBOR_FILES = {
    "words": ("instruction.md", f"<!--{LONG_WORD}", ""),
    "variables": (
        "environment/Dockerfile",
        f"FROM debian\nENV A={'x' * 4096}\nENV B={'$A' * 12_000}\n",
        "with its variables",
    ),
    "lists": (
        "environment/Dockerfile",
        "FROM debian\nWORKDIR /a\n" + "COPY f* /a/\n" * 5000,
        "COPY lists more than",
    ),
    "parts": ("task.toml", ".".join("a" * 16_000) + " = 1\n", "a key of more than 32 parts"),
    "quoted": ("task.toml", ".".join(['"a"'] * 10_000) + " = 1\n", "a key of more than 32 parts"),
    "depth": ("task.toml", f"a = {'[' * 30_000}", "nested too deeply"),
}


@pytest.mark.parametrize("what", HARBOR_FILES)
def test_a_harbor_task_is_read_in_time_that_grows_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A Dockerfile of 64 KB took its reader 20 minutes, an instruction of 1 MB five, and a
    task.toml of 64 KB half a minute and 4 GB."""
    monkeypatch.setattr(harbor, "MAX_LOOKED_AT", 10_000)
    name, text, why = HARBOR_FILES[what]
    task = tmp_path / "task"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    for at in range(20):
        (task / "environment" / f"f{at}").touch()
    (task / "tests" / "test.sh").touch()
    (task / "task.toml").touch()
    (task / "instruction.md").write_text("Do it.")
    (task / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /a\n")
    (task / name).write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError, match=why) if why else nullcontext():
        harbor.read_tasks("train", harbor.HarborSpec(path=str(task)))
    assert time.process_time() - started < 8


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73", "\uff9e\u0f73"])
@pytest.mark.parametrize("of", [words_of, normalise, names_of])
def test_marks_on_letters_are_taken_off_in_time_that_grows_with_them(
    marks: str, of: Callable[[str], object]
) -> None:
    """A prompt of 160 KB of them held up the comparison with suites for half a minute, and an
    answer the reward `exact`: Python sorts them by insertion."""
    started = time.process_time()
    of("One Two" + marks * (100_000 // len(marks)))
    assert time.process_time() - started < 2


def test_taking_marks_off_changes_no_text() -> None:
    texts = [
        "Ça n’est pas ﬁni",
        "ᾳ\u0345\u0301x",
        "e\u0301\u0323" * 3,
        "ｶﾞ 1,000.50",
        "A" * 300 + "é",
    ]
    for text in (*texts, "".join(texts) * 20):
        folded = unicodedata.normalize("NFKD", text).casefold()
        assert without_marks(text) == "".join(c for c in folded if not unicodedata.combining(c))


def test_empty_lines_of_a_question_are_passed_over_once() -> None:
    """40,000 of them took 26 s."""
    started = time.process_time()
    assert names_of("One:\n Two three.\n\n Four Five" + "\n" * 100_000) == {"five"}
    assert time.process_time() - started < 2
