# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop that takes part in a run: five calls, and everything else is its own.

python recipes/plain_trainer/trainer.py URL --store RUN/weights --init FOLDER [--policy NAME]
    [--state DIR]

`train` is all that it takes to join. `reinforce` is the learning, and is there to be replaced. SGD
keeps no state of its own, so weights and cursor are a whole checkpoint.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock import VersionsClient


def train(client: VersionsClient, init: Path, state: Path) -> None:
    folder, (number, seq) = restore_point(init, state)
    model = load(folder)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
    client.incarnate(number=number, seq=seq)
    while True:
        folder = save(model, init, state, number, seq)
        client.publish(folder, number=number)
        client.checkpoints([(number, seq)])
        seq += 1
        batch = client.batch(seq)
        if batch is None:
            return
        loss = reinforce(model, batch.rewards, batch.samples)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        number += 1
        client.commit(seq, number=number, stats={"loss": float(loss), "grad_norm": norm})


def reinforce(model: Any, rewards: tuple[tuple[float, ...], ...], samples: Any) -> Any:
    """Minus the log-prob of every sampled token, times how much better than its group the row was;
    a missing row keeps its place in the group."""
    advantages: list[float] = []
    for group in rewards:
        mean = sum(group) / len(group)
        advantages += [reward - mean for reward in group]
    terms: list[Any] = [0.0 * next(model.parameters()).sum()]  # there may be no token at all
    places = (samples.starts_S.tolist(), samples.ends_S.tolist(), samples.rows_S.tolist())
    for start, end, row in zip(*places, strict=True):
        ids = torch.tensor(samples.ids_T[start:end].tolist())
        logprobs: Any = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        mask = torch.tensor(samples.mask_T[start + 1 : end].tolist())
        chosen: Any = logprobs.gather(1, ids[1:, None])[:, 0][mask]
        terms.append(-advantages[row] * chosen.sum() / max(samples.num_trained, 1))
    loss: Any = torch.stack(terms).sum()
    return loss


def load(folder: Path) -> Any:
    kind: Any = AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32)


def restore_point(init: Path, state: Path) -> tuple[Path, tuple[int, int]]:
    """The newest checkpoint with its cursor, else the initial model."""
    saved = sorted(state.glob("step_*"), key=lambda path: int(path.name[5:]))
    if not saved:
        return init, (0, 0)
    number, seq = json.loads((saved[-1] / "cursor").read_text())
    return saved[-1], (number, seq)


def save(model: Any, init: Path, state: Path, number: int, seq: int) -> Path:
    """Weights and cursor, complete under their name or not there; the older one goes after."""
    hidden, folder = state / "partial", state / f"step_{seq}"
    if folder.exists():
        return folder
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.copytree(init, hidden)
    model.save_pretrained(hidden)
    (hidden / "cursor").write_text(json.dumps([number, seq]))
    os.sync()
    hidden.rename(folder)
    for older in state.glob("step_*"):
        if older != folder:
            shutil.rmtree(older)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain PyTorch loop as the trainer of a run.")
    parser.add_argument("url")
    file = os.environ.get("PENSTOCK_TOKEN_FILE")
    parser.add_argument("--token-file", type=Path, default=file, required=not file)
    parser.add_argument("--store", type=Path, required=True, help="the run's weight store")
    parser.add_argument("--init", type=Path, required=True, help="Hugging Face folder of number 0")
    parser.add_argument("--policy", default="policy")
    parser.add_argument("--state", type=Path, help="checkpoints; by default beside the store")
    given = parser.parse_args()
    state = given.state or given.store.parent / f"plain-trainer-{given.policy}"
    state.mkdir(parents=True, exist_ok=True)
    token = given.token_file.read_text().strip()
    with VersionsClient(given.url, token, policy=given.policy, store=given.store) as client:
        train(client, given.init, state)


if __name__ == "__main__":
    main()
