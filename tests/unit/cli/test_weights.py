# SPDX-License-Identifier: Apache-2.0
"""`penstock weights ls | show | verify | diff` on the files of a run that is not running."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_commands import run_main
from tests.unit.weights.version_history import WEIGHTS, VersionHistory

from penstock.cli.output import format_bytes, table
from penstock.cli.weights_format import percent, shorten
from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.types import PolicyName
from penstock.weights.manifest import encode_manifest, make_manifest, parse_manifest
from penstock.weights.publish import put_snapshot
from penstock.weights.retention import execute_plan, plan_deletion
from penstock.weights.tensors import TensorEntry

WIDTH = 80


class Run:
    """A run folder with five versions, of which the second to fourth are kept as deltas."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = RunFolder(tmp_path / "reverse")
        self.folder.write_config(demo_config(0))
        self.history = VersionHistory(self.folder.weights)
        self.history.add_versions(5)
        self.store = self.history.store
        with self.store.deleting() as has_lock:
            assert has_lock
            digests = [self.history.digest(number) for number in range(5)]
            execute_plan(self.store, plan_deletion(self.store, digests, digests[-1:]))

    def blob(self, number: int) -> Path:
        return self.store.blob_path(self.history.file(number).blob)

    def delta(self, number: int) -> Path:
        [step] = self.store.entries_to(self.history.file(number).blob)
        return self.store.blob_path(step.blob)

    def manifest(self, number: int) -> Path:
        return self.folder.weights / "manifests" / f"{self.history.digest(number)}.json"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


Printed = tuple[int, str, str]


@pytest.fixture
def weights(run: Run, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(verb: str, *words: str) -> Printed:
        code, out, err = run_main(capsys, "weights", verb, str(run.folder.path), *words)
        assert all(len(line) <= WIDTH for line in out.splitlines()), "fits a terminal"
        return code, out, err

    return call


@pytest.fixture
def as_json(run: Run, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(verb: str, *words: str) -> tuple[int, dict[str, Any]]:
        words = (str(run.folder.path), *words, "--json")
        code, out, _ = run_main(capsys, "weights", verb, *words)
        return code, json.loads(out.splitlines()[-1])

    return call


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


# --- ls -------------------------------------------------------------------------------------------


def test_ls_lists_versions_and_how_they_are_kept(run: Run, weights: Any) -> None:
    code, out, err = weights("ls")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [re.split(r"  +", line)[0] for line in lines[1:6]] == [f"policy@{n}" for n in range(5)]
    assert [line.split()[4] for line in lines[1:6]] == ["whole", *["deltas"] * 3, "whole"]
    assert all(run.history.digest(n)[:12] in lines[n + 1] for n in range(5))
    assert "402 kB" in lines[1] and "–" in lines[1]
    assert "1.5 kB" in lines[2] and "0.38 %" in lines[2]
    assert lines[-1].startswith("5 versions of policy; the store holds 8")


def test_ls_for_programs(run: Run, as_json: Any) -> None:
    code, found = as_json("ls")
    assert code == 0
    assert [version["number"] for version in found["versions"]] == list(range(5))
    assert [version["kept"] for version in found["versions"]] == ["whole", *["deltas"] * 3, "whole"]
    assert found["versions"][3]["manifest_digest"] == run.history.digest(3)
    assert found["versions"][3]["delta_bytes"] == run.delta(3).stat().st_size
    assert found["damaged"] == []
    blobs = [path.stat().st_size for path in (run.folder.weights / "blobs").iterdir()]
    assert (found["num_blobs"], found["store_bytes"]) == (len(blobs), sum(blobs))


def test_ls_shows_what_is_missing_and_damaged(run: Run, weights: Any, as_json: Any) -> None:
    run.delta(2).unlink()
    run.manifest(4).chmod(0o644)
    run.manifest(4).write_text("{")
    code, out, err = weights("ls")
    assert code == 0
    assert [line.split()[4] for line in out.splitlines()[1:5]] == [
        "whole",
        "deltas",
        "missing",
        "missing",
    ]
    assert "1 manifests are damaged" in err and "penstock weights verify" in err
    assert as_json("ls")[1]["damaged"] == [run.history.digest(4)]


def test_several_versions_of_one_number_are_all_listed(run: Run, weights: Any) -> None:
    """A rewind trains number 4 again, with other weights."""
    put_snapshot(
        run.folder.weights,
        run.folder.path / "hf-policy",
        policy=PolicyName("policy"),
        number=3,
    )
    _, out, _ = weights("ls")
    assert out.count("policy@3 ") == 2
    code, _, err = weights("show", "policy@3")
    assert code == 1
    assert "policy@3 is ambiguous (2 versions)" in err
    assert f"{run.history.digest(3)[:12]} (policy@3)" in err
    code, out, _ = weights("show", run.history.digest(3)[:7])
    assert code == 0
    assert run.history.digest(3) in out


def test_a_store_without_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "reverse")
    folder.write_config(demo_config(0))
    for verb, words in (("ls", []), ("show", ["0"]), ("verify", []), ("diff", ["0", "1"])):
        code, out, err = run_main(capsys, "weights", verb, str(folder.path), *words)
        assert (code, out) == (1, "")
        assert "no version in" in err


# --- which version --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["policy@2", "2", "DIGEST"])
def test_a_version_has_three_names(run: Run, as_json: Any, word: str) -> None:
    code, found = as_json("show", word.replace("DIGEST", run.history.digest(2)[:10]))
    assert code == 0
    assert found["manifest_digest"] == run.history.digest(2)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("policy@9", "did you mean policy@4 or policy@3 or policy@2?"),
        ("9", "did you mean policy@4 or policy@3 or policy@2?"),
        ("polici@1", "did you mean policy@1 or"),
        ("policy@1.3", "addressed without the incarnation; use policy@3"),
        ("policy", "did you mean policy@4?"),
        ("", "did you mean policy@4?"),
        ("../../x", "did you mean"),
    ],
)
def test_an_unknown_version_gets_a_suggestion(weights: Any, word: str, expected: str) -> None:
    for verb, words in (("show", [word]), ("verify", [word]), ("diff", ["0", word])):
        if word or verb != "verify":
            code, out, err = weights(verb, *words)
            assert (code, out) == (1, "")
            assert expected in err


def test_a_number_alone_is_not_enough_for_two_policies(run: Run, weights: Any) -> None:
    VersionHistory(run.folder.weights, policy="judge").add_versions(2)
    code, _, err = weights("show", "1")
    assert code == 1
    assert "did you mean judge@1 or policy@1?" in err
    assert weights("show", "judge@1")[0] == 0


# --- show -----------------------------------------------------------------------------------------


def test_show_prints_files_tensors_and_deltas(run: Run, weights: Any) -> None:
    code, out, _ = weights("show", "3")
    assert code == 0
    assert run.history.digest(3) in out
    assert "3 tensors of 100,300 elements (3 F32)" in out
    assert re.search(rf"{WEIGHTS} +{run.history.file(3).blob[:12]} +401 kB +deltas", out)
    assert re.search(r"config.json +\w{12} +23 B +whole", out)
    assert f"{WEIGHTS}: rebuilt from policy@0 with 3 deltas of 4.6 kB" in out
    assert re.search(rf"{WEIGHTS} +policy@2 +1.5 kB +0.38 % +0.99 %", out)
    assert "base" not in out


def test_show_of_an_adapter_names_its_model(run: Run, weights: Any, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    weights_file = run.folder.path / "hf-policy" / WEIGHTS
    (folder / "adapter_model.safetensors").write_bytes(weights_file.read_bytes())
    for number, base in enumerate((run.history.versions[4].weights_digest, "f" * 64)):
        put_snapshot(
            run.folder.weights, folder, policy=PolicyName("lora"), number=number, base=base
        )
    assert "(policy@4)" in weights("show", "lora@0")[1]
    assert f"of {run.history.versions[4].weights_digest[:12]}" in weights("ls")[1]


def test_show_for_programs_has_everything(run: Run, as_json: Any) -> None:
    _, found = as_json("show", "3")
    assert {file["name"]: file["kept"] for file in found["files"]} == {
        WEIGHTS: "deltas",
        "config.json": "whole",
    }
    [file] = [file for file in found["files"] if file["name"] == WEIGHTS]
    assert len(file["chain"]) == 3 and len(file["deltas"]) == 1
    assert [tensor["name"] for tensor in found["tensors"]] == ["a.weight", "b.weight", "c.weight"]


# --- verify ---------------------------------------------------------------------------------------


def test_an_intact_store_is_found_intact_and_left_alone(
    run: Run, weights: Any, as_json: Any
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.folder.path.rglob("*")}
    code, out, err = weights("verify")
    assert code == 0
    assert out == "5 versions intact, 2.0 MB checked\n"
    assert err.count(WEIGHTS) == 5 and err.count("config.json") == 1, "shared files are read once"
    code, found = as_json("verify", "3")
    assert code == 0
    assert (found["ok"], found["num_versions"], found["damage"]) == (True, 1, [])
    after = {path: path.stat().st_mtime_ns for path in run.folder.path.rglob("*")}
    assert {path for path in before.keys() ^ after.keys() if path.name != "lock"} == set()
    assert all(after[path] == before[path] for path in before if path.is_file())


def test_a_flipped_bit_is_found_named_and_has_a_fix(run: Run, weights: Any, as_json: Any) -> None:
    flip(run.blob(4), -1)
    code, out, err = weights("verify")
    assert (code, out) == (1, "")
    assert f"1. policy@4 {WEIGHTS}: its digest is" in err
    assert "different bits in c.weight" in err
    assert str(run.blob(4)) in err
    assert "delete it; it is rebuilt from deltas" in err
    assert "error: 1 damaged item in" in err
    code, found = as_json("verify", "4")
    assert code == 1
    assert found["ok"] is False
    assert [damage["version"] for damage in found["damage"]] == ["policy@4"]
    assert weights("verify", "0")[0] == 0


def test_a_damaged_snapshot_damages_versions_rebuilt_from_it(run: Run, as_json: Any) -> None:
    flip(run.blob(0), -1)
    code, found = as_json("verify")
    assert code == 1
    assert [damage["version"] for damage in found["damage"]] == [f"policy@{n}" for n in range(4)]
    assert "delete it and publish the version again" in found["damage"][0]["fix"]
    assert "(from deltas)" in found["damage"][1]["what"]


@pytest.mark.parametrize("kind", ["delta", "delta gone", "blob gone", "header", "cut off"])
def test_every_kind_of_damage_is_found(run: Run, weights: Any, kind: str) -> None:
    if kind == "delta":
        flip(run.delta(4), -1)
    elif kind == "delta gone":
        run.delta(4).unlink()
    elif kind == "blob gone":
        run.blob(0).unlink()
    elif kind == "header":
        flip(run.blob(4), 3)
    else:
        os.truncate(run.blob(4), 1000)
    code, _, err = weights("verify")
    assert code == 1
    assert "Traceback" not in err
    path = run.delta(4) if kind.startswith("delta") else run.blob(0 if "gone" in kind else 4)
    assert str(path) in err


def test_a_damaged_manifest_is_found(run: Run, weights: Any) -> None:
    flip(run.manifest(4), 50)
    code, _, err = weights("verify")
    assert code == 1
    assert str(run.manifest(4)) in err
    assert "delete it and publish the version again" in err


def test_a_manifest_that_lies_about_a_tensor_is_found(run: Run, weights: Any) -> None:
    """Its files are as it says, and it has the right name."""
    good = parse_manifest(run.store.read_manifest(run.history.digest(4)))
    lie = TensorEntry(name="a.weight", dtype="F32", shape=(200, 300), digest="0" * 64)
    bad = make_manifest(good.policy, 5, good.files, (lie, *good.tensors[1:]))
    run.store.put_manifest(encode_manifest(bad))
    code, _, err = weights("verify", "5")
    assert code == 1
    assert "different bits in a.weight, although all files match their digests" in err


# --- diff -----------------------------------------------------------------------------------------


def test_diff_counts_what_changed(run: Run, weights: Any, as_json: Any) -> None:
    """Both are kept as deltas only."""
    code, out, _ = weights("diff", "1", "3")
    assert code == 0
    _, found = as_json("diff", "policy@1", "policy@3")
    changed = [tensor["num_changed"] for tensor in found["tensors"]]
    assert found["num_changed"] == sum(changed) > 1000
    assert found["num_elements"] == 100_300
    assert f"{sum(changed):,} of 100,300 elements changed (" in out
    assert "in 3 of 3 tensors" in out
    shares = [tensor["num_changed"] / tensor["num_elements"] for tensor in found["tensors"]]
    assert shares == sorted(shares, reverse=True)
    assert not list(run.folder.path.glob(".weights-*")), "nothing is left behind"


def test_diff_of_a_version_with_itself(weights: Any) -> None:
    code, out, _ = weights("diff", "4", "policy@4")
    assert code == 0
    assert "0 of 100,300 elements changed (0.00 %), in 0 of 3 tensors" in out


def test_diff_of_a_file_that_is_gone_says_so(run: Run, weights: Any) -> None:
    run.blob(0).unlink()
    code, _, err = weights("diff", "0", "4")
    assert code == 1
    assert "cannot be rebuilt from deltas" in err


# --- what the documentation shows -----------------------------------------------------------------


def documented() -> list[str]:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "inspect-weights.md"
    return re.findall(r"^\$ penstock weights (.+)$", page.read_text(), re.MULTILINE)


def test_every_documented_command_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command.split() for command in documented()]
    assert {words[0] for words in commands} >= {"ls", "show", "diff", "verify"}
    for verb, _, *words in commands:
        if verb == "gc":  # asks the ledger: `e2e/test_fleet` has one
            continue
        code, out, err = run_main(capsys, "weights", verb, str(run.folder.path), *words)
        assert (code, bool(out)) == (0, True), err


# --- how numbers read -----------------------------------------------------------------------------


def test_sizes_shares_and_names() -> None:
    sizes = [0, 999, 1000, 9_949, 9_950, 999_499, 999_500, 28_000_000_000, 10**13]
    assert [format_bytes(number) for number in sizes] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "9.9 kB",
        "10 kB",
        "999 kB",
        "1.0 MB",
        "28 GB",
        "10.0 TB",
    ]
    assert [percent(part, 100_000) for part in (0, 1, 84, 9_994, 9_995, 100_000)] == [
        "0.00 %",
        "<0.01 %",
        "0.08 %",
        "9.99 %",
        "10 %",
        "100 %",
    ]
    name = "model.layers.29.self_attn.some_very_long.q_proj.weight"
    assert len(shorten(name)) == 38
    assert shorten(name).startswith("model.layers.29.") and shorten(name).endswith("q_proj.weight")
    assert table(("a", "number"), [("long", "1"), ("b", "1,000")]) == [
        "a     number",
        "long       1",
        "b      1,000",
    ]
