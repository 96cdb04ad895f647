# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Weights of consecutive real training steps: `make_trace.py MODEL OUT --rate 1e-6` fine-tunes a
model on the documentation of Python's standard library and keeps the bfloat16 copy of each step.

OUT holds `0/`, version 0 as an ordinary model folder; `NNNN.npz`, per tensor the bits that step N
changed (exclusive or with step N-1); `trace.json`. `read_versions` gives the versions back and
needs NumPy alone; making them needs torch and transformers (`make setup-engine` calls it with the
engine's environment).

The master weights are float32, as in mixed-precision training. Two things would make the first
steps unlike those of a longer training, and do not stand in the trace. Adam moves every weight by
the full rate at first and settles with its moments: some unrecorded steps come before. And the
model was stored in 4 and 8 bits, so its weights stand on a coarse grid, many at exactly zero where
any step shows: each begins at a random place of what its grid rounds together.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
"""bfloat16 as its bit patterns: NumPy has no such type."""

SEED = 0
WARM_UP_STEPS = 24
STEPS = 10
BATCH = 4
TOKENS = 96
"""Longest example; most are shorter."""
OPTIMIZER: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM = 1.0
BLOCK = 32
"""Neighbors in a row that share one grid: 8 bits and symmetric (embeddings) or 4 bits (others)."""


def read_versions(folder: Path) -> Iterator[dict[str, Bits]]:
    """Version 0, 1, 2, …: every tensor of each, in arrays that are the caller's to keep."""
    version = _read_bits(folder / "0" / "model.safetensors")
    yield version
    for step in sorted(folder.glob("*.npz")):
        with np.load(step) as changed:
            version = {name: bits ^ changed[name] for name, bits in version.items()}
        yield version


def _read_bits(path: Path) -> dict[str, Bits]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = np.fromfile(file, "<u2")
    return {
        name: data[slice(*(at // 2 for at in entry["data_offsets"]))].reshape(entry["shape"])
        for name, entry in header.items()
    }


def stdlib_docs(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, documentation) of the functions and classes of the standard library."""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                text := ast.get_docstring(node)
            ):
                yield f"{path.stem}.{node.name}", text


class Examples:
    """Batches of questions about the standard library with its own answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts = list(stdlib_docs(Path(sysconfig.get_path("stdlib"))))
        random.Random(SEED).shuffle(self._texts)

    def batch(self, step: int) -> tuple[Any, Any]:
        """Token ids, and as labels those of the answers: -100 is what the loss leaves out."""
        import torch

        rows = [self._row(*self._texts[step * BATCH + k]) for k in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(BATCH, width, dtype=torch.long)
        labels = torch.full((BATCH, width), -100)
        for k, (row, num_asked) in enumerate(rows):
            ids[k, : len(row)] = torch.tensor(row)
            labels[k, num_asked : len(row)] = ids[k, num_asked : len(row)]
        return ids, labels

    def _row(self, name: str, text: str) -> tuple[list[int], int]:
        asked = [{"role": "user", "content": f"What does {name} of Python do?"}]
        template = self._tokenizer.apply_chat_template
        prompt = template(asked, add_generation_prompt=True, tokenize=False)
        num_asked = len(self._tokenizer(prompt)["input_ids"])
        whole = self._tokenizer(prompt + text + "<|im_end|>")["input_ids"]
        return whole[: max(TOKENS, num_asked + 8)], num_asked


class Training:
    """Float32 master weights under AdamW."""

    def __init__(self, folder: Path, rate: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(SEED)
        self.version = torch.__version__
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._undo_quantisation()
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=rate, **OPTIMIZER)
        self._examples = Examples(AutoTokenizer.from_pretrained(folder))
        self._num_steps = 0

    def _undo_quantisation(self) -> None:
        import torch

        for name, weight in self._model.named_parameters():
            if weight.ndim == 2:
                blocks = weight.data.view(-1, BLOCK)
                if "embed" in name:
                    gap = blocks.abs().amax(1, keepdim=True) / 127
                else:
                    gap = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
                blocks += (torch.rand_like(blocks) - 0.5) * gap

    def step(self) -> float:
        """One update; the loss before it."""
        import torch

        ids, labels = self._examples.batch(self._num_steps)
        loss = self._model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._adam.step()
        self._adam.zero_grad()
        self._num_steps += 1
        return loss.item()

    def bits(self) -> dict[str, Bits]:
        """The bfloat16 copy that would be published."""
        import torch

        return {
            name: weight.detach().to(torch.bfloat16).view(torch.uint16).numpy()
            for name, weight in self._model.named_parameters()
        }

    def save(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        tensors = {
            name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in self.bits().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make(model: Path, out: Path, rate: float) -> None:
    shutil.copytree(model, out / "0", ignore=shutil.ignore_patterns("*.safetensors", ".*"))
    training = Training(model, rate)
    for step in range(WARM_UP_STEPS):
        log_line(f"warming up, step {step}: loss {training.step():.3f}")
    training.save(out / "0")
    before = training.bits()
    densities: list[float] = []
    num_weights = sum(bits.size for bits in before.values())
    for step in range(1, STEPS + 1):
        loss = training.step()
        after = training.bits()
        changed = {name: bits ^ before[name] for name, bits in after.items()}
        np.savez_compressed(out / f"{step:04}.npz", allow_pickle=False, **changed)
        num_changed = sum(np.count_nonzero(bits) for bits in changed.values())
        densities.append(num_changed / num_weights)
        log_line(f"step {step}: loss {loss:.3f}, {densities[-1]:.3%} of the weights changed")
        before = after
    last = deque(read_versions(out), maxlen=1).pop()
    assert all(np.array_equal(last[name], bits) for name, bits in before.items())
    about = {
        "lr": rate,
        "start": "a random place of what the grid of the stored model rounds together",
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "density": densities,
        "batch": BATCH,
        "max_tokens": TOKENS,
        "optimizer": {"name": "AdamW", **OPTIMIZER, "max_norm": MAX_NORM},
        "seed": SEED,
        "torch": training.version,
        "weights": num_weights,
    }
    (out / "trace.json").write_text(json.dumps(about, indent=2) + "\n")


def log_line(text: str) -> None:
    print(f"make_trace: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the weights of real training steps.")
    parser.add_argument("model", type=Path, help="folder of the model to train")
    parser.add_argument("out", type=Path, help="folder for the trace")
    parser.add_argument("--rate", type=float, required=True, help="learning rate")
    given = parser.parse_args()
    make(given.model, given.out, given.rate)


if __name__ == "__main__":
    main()
