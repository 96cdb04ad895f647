# SPDX-License-Identifier: Apache-2.0
"""A pulled version is an ordinary model folder: a plain `vllm serve` loads it unchanged, and
answers like transformers with the same folder. Needs `make setup-engine`."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.setup_engine import CACHE, ENGINE, MARKER, MODEL
from tests.unit.weights.weight_servers import put_folder, running_weight_server

from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.manifest import parse_manifest
from penstock.weights.store import DirectoryStore

START_S = 600.0
"""An idle machine takes twenty seconds."""
WEIGHTS = "model.safetensors"
PROMPT = "The capital of France is"
NUM_TOKENS = 12
TOLERANCE = 1e-3
"""In log-probability, with float32 on both sides."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(
        not all((folder / MARKER).exists() for folder in (ENGINE, CACHE / "models" / MODEL)),
        reason=f"no vLLM or model in {CACHE}; run `make setup-engine`",
    ),
]


def write_next(folder: Path) -> None:
    """The model with one weight in a hundred changed by a few percent: enough to change its
    output."""
    shutil.copytree(CACHE / "models" / MODEL, folder)
    path = folder / WEIGHTS
    path.chmod(0o644)
    head = len(layout_of(path).head)
    bits = np.memmap(path, "<u2", "r+", head)
    at = np.flatnonzero(np.random.default_rng(0).random(len(bits), np.float32) < 0.01)
    bits[at] ^= np.uint16(8)
    bits.flush()


@contextmanager
def serving(folder: Path, log: Path) -> Generator[str]:
    """The address of a plain `vllm serve FOLDER`, without our plugin."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    words = [ENGINE / "bin" / "vllm", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    limits = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2"]
    with log.open("wb") as out:
        engine = subprocess.Popen(
            [*words, *limits, "--served-model-name", "policy", "--enforce-eager"],
            stdout=out, stderr=out, env={**os.environ, **quiet}, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_healthy(engine, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        engine.terminate()
        try:
            engine.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


def wait_until_healthy(engine: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert engine.poll() is None, f"vllm ended:\n{log.read_text()[-3000:]}"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"vllm does not answer after {START_S:.0f} s:\n{log.read_text()[-3000:]}")


def complete(url: str) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities from the engine."""
    body = {
        "model": "policy", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
        "logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)["choices"][0]["logprobs"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"vllm refused: {error.read()[:500]!r}") from None
    return [int(token.split(":")[1]) for token in found["tokens"]], found["token_logprobs"]


def expect(folder: Path, tokens: list[int]) -> tuple[list[int], list[float]]:
    """The token transformers would choose at each position of this answer, and its
    log-probability."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    likely = torch.log_softmax(logits, -1)
    return logits.argmax(-1).tolist(), likely[range(len(tokens)), tokens].tolist()


async def pull_by_delta(
    tmp_path: Path, versions: tuple[PublishedVersion, PublishedVersion]
) -> tuple[Path, Path]:
    """Version 0 was pulled in full, version 1 as a delta."""
    puller = Puller(tmp_path / "cache", transfer="delta")
    async with running_weight_server(tmp_path) as caller:
        first, second = [await puller.pull([caller], version) for version in versions]
    store = DirectoryStore(tmp_path / "store")
    files = parse_manifest(store.read_manifest(versions[1].manifest_digest)).files
    [step] = store.deltas_to(next(file.blob for file in files if file.name == WEIGHTS))
    assert (tmp_path / "cache" / "blobs" / step.blob).exists(), "it came as a delta"
    assert step.bytes < (first / WEIGHTS).stat().st_size / 50
    return first, second


async def test_vllm_serves_a_version_pulled_as_a_delta(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_next(tmp_path / "next")
    zero = put_folder(tmp_path, CACHE / "models" / MODEL, 0)
    one = put_folder(tmp_path, tmp_path / "next", 1, after=zero)
    before, folder = await pull_by_delta(tmp_path, (zero, one))
    with serving(folder, tmp_path / "vllm.log") as url:
        tokens, likely = await asyncio.to_thread(complete, url)
    assert len(tokens) == NUM_TOKENS
    greedy, right = expect(folder, tokens)
    assert tokens == greedy
    assert likely == pytest.approx(right, abs=TOLERANCE)
    _, old = expect(before, tokens)
    assert max(abs(a - b) for a, b in zip(likely, old, strict=True)) > 20 * TOLERANCE
