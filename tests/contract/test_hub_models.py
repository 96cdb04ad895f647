# SPDX-License-Identifier: Apache-2.0
"""Models of the Hub, against a server that speaks its API: downloads, commits, refusals.

`huggingface_hub` reads its variables when it is imported, so each part runs in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
from tests.contract.hub_model_server import Files, HubServer, hub_server

from penstock.trainer.model_folders import TINY_QWEN3, init_model

MODEL = "tests/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A real model, and what else lies in repositories."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    init_model(TINY_QWEN3, folder, seed=3)
    others = ("README.md", "pytorch_model.bin", "onnx/model.safetensors", "onnx/config.json")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | dict.fromkeys(
        (*others, "consolidated.safetensors"), b"x" * 100
    )


@pytest.fixture
def hub(files: Files) -> Generator[HubServer]:
    with hub_server() as server:
        server.push(MODEL, files)
        yield server


def python(code: str, home: Path, env: Mapping[str, str]) -> str:
    """Output of a program with this Hub and an empty cache; a failure shows its last line."""
    settings = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings, **env},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


START = """
import sys
from pathlib import Path
from penstock.config import demo_config
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.launch import StopRequest, launch

for run, init in (given.split("=") for given in "{starts}".split()):
    folder = RunFolder(Path(run))
    overrides = ["algorithm.name=opd", "algorithm.teacher=tests/tiny"]
    overrides.append("models.policy.init=" + init)
    try:  # a stop request: the folder is claimed, and nothing starts
        launch(demo_config(0, overrides), folder, stop=StopRequest(number=15))
    except ConfigError as error:
        print(str(error).splitlines()[-1])
    else:
        config = folder.read_config()
        print(config.models["policy"].init, config.algorithm.teacher)
"""


def test_a_run_records_the_commit_and_resumes_with_it(
    hub: HubServer, files: Files, tmp_path: Path
) -> None:
    def start(*starts: str, **env: str) -> list[str]:
        return python(START.format(starts=" ".join(starts)), tmp_path, env).splitlines()

    [commit] = hub.repositories[MODEL]
    first = f"{MODEL}@{commit}"
    assert start(f"run={MODEL}", HF_ENDPOINT=hub.url) == [f"{first} {first}"]
    fetched = [name for name in files if "/" not in name and name.endswith((".json", ".jinja"))]
    assert sorted(hub.downloads) == sorted([*fetched, "model.safetensors"])
    hub.downloads.clear()
    offline = start(f"run={MODEL}", f"offline={MODEL}", HF_HUB_OFFLINE="1")
    assert offline == [f"{first} {first}"] * 2

    second = f"{MODEL}@{hub.push(MODEL, {**files, 'model.safetensors': b'other weights'})}"
    starts = [f"run={MODEL}", f"run={second}", f"new={MODEL}"]
    resumed, refused, new = start(*starts, HF_ENDPOINT=hub.url)
    assert resumed == f"{first} {first}"
    assert "pass --accept-changes" in refused
    assert new == f"{second} {second}"
    assert hub.downloads == ["model.safetensors"], "what did not change is on this machine"


def test_the_trainer_reads_a_model_of_the_hub_as_plain_files(
    hub: HubServer, files: Files, tmp_path: Path
) -> None:
    [commit] = hub.repositories[MODEL]
    code = f"""
from pathlib import Path
from penstock.hub import find_folder
from penstock.trainer.model_folders import init_model
from penstock.trainer.pipeline.memory_estimate import count_parameters

init = "{MODEL}@{commit}"
assert find_folder(init) is None and count_parameters(init) is None
init_model(init, Path("model"), seed=0)
print(count_parameters(init) == count_parameters("builtin:tiny-qwen3"))
"""
    assert python(code, tmp_path, {"HF_ENDPOINT": hub.url}) == "True\n"
    copied = {path.name: path for path in (tmp_path / "model").iterdir()}
    assert not any(path.is_symlink() for path in copied.values())
    assert copied["model.safetensors"].read_bytes() == files["model.safetensors"]
    assert {"README.md", "onnx", "consolidated.safetensors"}.isdisjoint(copied)


def test_a_check_downloads_no_weights_and_notices_a_full_disk(
    hub: HubServer, tmp_path: Path
) -> None:
    code = f"""
import shutil, types
from penstock.errors import ConfigError
from penstock.hub import check_hub_model, find_folder

check_hub_model("{MODEL}")
assert find_folder("{MODEL}") is None
print(find_folder("{MODEL}", texts_only=True).name)
shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)
try:
    check_hub_model("{MODEL}")
except ConfigError as error:
    print(error)
"""
    commit, problem = python(code, tmp_path, {"HF_ENDPOINT": hub.url}).splitlines()
    assert [commit] == [*hub.repositories[MODEL]]
    assert "config.json" in hub.downloads
    assert not any(name.endswith(".safetensors") for name in hub.downloads)
    assert "0.0 GB free; free some, or set HF_HOME" in problem


PROBLEM = """
from penstock.errors import ConfigError
from penstock.hub import pin_model
for name in {names}:
    try:
        print(pin_model(name, lambda text: None))
    except ConfigError as error:
        print(error)
"""


def test_what_the_hub_refuses_is_said_with_the_cure(hub: HubServer, tmp_path: Path) -> None:
    hub.push("tests/gated", {})
    hub.push("tests/empty", {"README.md": b""})
    hub.push("tests/torch", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.gated.add("tests/gated")
    names = ["tests/none", "tests/gated", f"{MODEL}@v2", "tests/empty", "tests/torch"]
    said = python(PROBLEM.format(names=names), tmp_path, {"HF_ENDPOINT": hub.url}).splitlines()
    expected = [
        "no folder here has this name, and the Hugging Face Hub has no such model",
        "`hf auth login` or set HF_TOKEN",
        "no revision v2; choose a branch, tag or commit from",
        "has no config.json and no *.safetensors",
        "has no *.safetensors; name a model in transformers' format",
    ]
    for name, text, part in zip(names, said, expected, strict=True):
        assert text.startswith(name), text
        assert part in text, text


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; run"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached ("),
    ],
)
def test_without_the_hub_the_message_says_what_to_do(
    env: Mapping[str, str], why: str, tmp_path: Path
) -> None:
    [text] = python(PROBLEM.format(names=["a/b@v1"]), tmp_path, env).splitlines()
    assert why in text
    assert "`hf download a/b --revision v1 --local-dir DIR` on a machine with network" in text
    assert "copy DIR to this one and name it here instead" in text


def test_check_names_the_key_of_a_model_that_cannot_be_had(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.runs.preflight import find_problems
from penstock.runs.target import RunTarget

config = demo_config(0, ["models.policy.init=a/b", "output_dir=."])
target = RunTarget(config=config, folder=RunFolder(Path("run")), python_path=())
print(*find_problems(target), sep="\\n")
"""
    text = python(code, tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert text.startswith("models.policy.init: a/b is neither a folder here nor complete in")
