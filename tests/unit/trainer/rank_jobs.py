# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_gang.py` and `test_repartition.py` do: `python -m … JOB FOLDER`.

A job is a function of the gang; what it returns is written as JSON for the test to judge. It runs
in a process started by the trainer's own supervisor, with gloo between the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.stages import ParallelConfig
from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.fleet.processes import exit_with_parent
from penstock.trainer.ranks.group import RankGroup, Ranks, init_process_group, make_rank_group
from penstock.trainer.ranks.repartition import RowPlacement, repartition
from penstock.trainer.ranks.row_fetch import fetch_rows
from penstock.trainer.ranks.supervisor import (
    LOOPBACK,
    HostRanks,
    RankEnv,
    read_rank_env,
    run_ranks,
)
from penstock.types import (
    GroupId,
    Manifest,
    OutcomeKind,
    PolicyName,
    RowId,
    RowPayload,
    RowSummary,
    SealedGroup,
)

NUM_STEPS = 20
MORE_STEPS = range(NUM_STEPS, NUM_STEPS + 2)
TENSOR_STEPS = 3
VOCAB = 16
MICRO = 2
"""Sequences in one forward pass."""


# --- a minimal learner: sums, weights known before the first pass, AdamW ------------------------


def sequences(step: int, num_rows: int = 5) -> list[Tensor]:
    """A batch of ragged rows, the same on every rank."""
    draw = np.random.default_rng([11, step])
    lengths = draw.integers(4, 12, num_rows)
    return [torch.from_numpy(draw.integers(0, VOCAB, length)) for length in lengths]


class PlainLoop:
    """What any learner must do in a gang, and no more."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3, fused=True)

    def step(self, rows: Sequence[Tensor]) -> tuple[float, float]:
        """The loss of the whole batch, and the gradient's norm before it was clipped."""
        from penstock.trainer.ranks.sharding import clip

        own = rows[self.ranks.position.part :: self.ranks.position.parallel.dp]
        trained = float(sum(row.numel() - 1 for row in own))
        (num_trained,) = self.ranks.sum_over_ranks(np.array([trained]))
        parts = [own[first : first + MICRO] for first in range(0, len(own), MICRO)]
        total = 0.0
        for index in range(self.ranks.max_over_ranks(len(parts))):
            loss = self._loss(parts[index]) if index < len(parts) else self._nothing()
            (loss / float(num_trained)).backward()
            total += loss.item()
        (total,) = self.ranks.sum_over_ranks(np.array([total]))
        norm = clip(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total) / float(num_trained), norm

    def _loss(self, rows: Sequence[Tensor]) -> Tensor:
        """One forward pass: in a gang every rank runs as many as the others."""
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        )

    def _nothing(self) -> Tensor:
        """A rank with fewer micro-batches takes part in the passes of the others."""
        return self._loss([torch.zeros(2, dtype=torch.int64)]) * 0.0

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }

    def restore(self, whole: dict[str, Tensor]) -> None:
        from penstock.trainer.ranks.sharding import shard_like

        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                key: shard_like(whole[f"{name}.{key}"], parameter)
                if key != "step"
                else whole[f"{name}.{key}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def train(model: Any, ranks: Ranks, steps: range) -> tuple[PlainLoop, list[tuple[float, float]]]:
    loop = PlainLoop(model, ranks)
    return loop, [loop.step(sequences(step)) for step in steps]


# --- the trainer's own learners -------------------------------------------------------------------

CREWS = {"grpo": NUM_STEPS, "m2po": 4, "ppo": 4, "rloo+adapted": 6, "grpo+tied": 4}
"""Steps by algorithm, and the folder of its model where it is another."""
GATHERED = ("grpo", "rloo+adapted", "grpo+tied")
"""Of these the weights are compared, too."""
LORA = {"rank": 2, "alpha": 8}


def learned(
    folder: Path, name: str, ranks: Ranks
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Loss and gradient norm of each step, and the weights after the last."""
    from tests.unit.trainer.doubles import POLICY, random_batch, settings

    from penstock.trainer import build
    from penstock.trainer.batches import assemble
    from penstock.trainer.ranks import weight_loading
    from penstock.trainer.ranks.sharding import gather

    algorithm, _, where = name.partition("+")
    lora = LORA if where == "adapted" else None
    chosen = settings(folder / (where if where == "tied" else "model"), algorithm, lora=lora)
    position = ranks.position
    if not position.is_rank0:
        build.load_model = weight_loading.load_model = _forbidden
    models = build.build_models(chosen, POLICY, folder / (where or "model"), ranks)
    if where == "tied":
        embeddings: Any = models.model.get_input_embeddings()
        assert embeddings.weight is cast(Any, models.model.get_output_embeddings()).weight
    curve: list[tuple[float, float]] = []
    for seq in range(1, CREWS[name] + 1):
        sealed = random_batch(3, seq=seq, num_groups=5, size=3)
        rows = [
            row if index % position.parallel.dp == position.part else replace(row, payload=None)
            for index, row in enumerate(sealed.rows)
        ]
        batch = assemble(sealed.manifest, rows, POLICY, VOCAB, ranks=ranks)
        values = models.step(batch).values
        assert values["tokens/trained"] == sum(batch.row_columns["length"])
        curve.append((values["loss"], values["grad_norm"]))
    return curve, gather(cast(Any, models.weights()), ranks)


def _forbidden(folder: Path, dtype: torch.dtype | None = None) -> Any:
    raise AssertionError(f"only the first rank reads {folder} whole")


# --- jobs ---------------------------------------------------------------------------------------


def pair(folder: Path) -> dict[str, Any]:
    """Two ranks: sharded training, by parts and inside one part, and what they say meanwhile."""
    from safetensors.torch import save_file

    from penstock.trainer.model_folders import load_model
    from penstock.trainer.ranks.sharding import gather, shard

    parts = make_rank_group(ParallelConfig(dp=2))
    inside = make_rank_group(ParallelConfig(tp=2))
    assert parts is not None and inside is not None
    model = load_model(folder / "model").eval()
    loop, curve = train(shard(model, model, parts), parts, range(NUM_STEPS))
    whole = gather(loop.model.state_dict(keep_vars=True), parts)
    state = gather(loop.state(), parts)
    if parts.position.is_rank0:
        save_file(whole, folder / "whole.safetensors")
        save_file(state, folder / "state.safetensors")
    went_on = [list(loop.step(sequences(step))) for step in MORE_STEPS]
    split = load_model(folder / "model").eval()
    tensor_loop, tensor_curve = train(shard(split, split, inside), inside, range(TENSOR_STEPS))
    tensor_whole = gather(tensor_loop.model.state_dict(keep_vars=True), inside)
    if inside.position.is_rank0:
        save_file(tensor_whole, folder / "tensor_whole.safetensors")
    crews = {name: learned(folder, name, parts) for name in CREWS}
    if parts.position.is_rank0:
        for name in GATHERED:
            save_file(crews[name][1], folder / f"{name}.safetensors")
    return {
        "crews": {name: curve for name, (curve, _) in crews.items()},
        "curve": curve,
        "tensor_curve": tensor_curve,
        "gathered": len(whole),
        "local_share": _local_share(loop.model),
        "pressures": parts.gather_over_ranks(pressures_of(parts.position.rank, 2)).tolist(),
        "went_on": went_on,
        "resumed": _resumed(folder, parts),
        "drawn": _drawn_bytes(parts),
        "drawn_inside": _drawn_bytes(inside),
        "said": parts.broadcast_from_rank0([parts.position.rank + 5, 7]),
    }


def _local_share(model: Any) -> float:
    """Of all elements, those that this rank keeps."""
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return local / sum(parameter.numel() for parameter in model.parameters())


def _resumed(folder: Path, ranks: RankGroup) -> list[list[float]]:
    """The steps that follow, by a new life that restored what was gathered."""
    from safetensors.torch import load_file

    from penstock.trainer.model_folders import load_model
    from penstock.trainer.ranks.sharding import shard

    model = load_model(folder / "model").eval()
    model.load_state_dict(load_file(folder / "whole.safetensors"))
    loop = PlainLoop(shard(model, model, ranks), ranks)
    loop.restore(load_file(folder / "state.safetensors"))
    return [list(loop.step(sequences(step))) for step in MORE_STEPS]


def pressures_of(rank: int, num_ranks: int) -> Tensor:
    """One rank's share of the same ragged pressures, whatever the number of ranks."""
    every = torch.from_numpy(np.random.default_rng(3).lognormal(-4, 2, 101)).float()
    first = (0, 83, 101)[rank] if num_ranks == 2 else 0
    end = (83, 101)[rank] if num_ranks == 2 else 101
    return every[first:end]


NUM_ROWS = 64


def sealed_rows() -> tuple[Manifest, tuple[RowPayload, ...]]:
    """A batch of rows of about 2 KB; nobody here looks into them."""
    draw = np.random.default_rng(5)
    rows = tuple(
        RowPayload(row_id=RowId(f"p0-0.{row}.1"), payload=draw.bytes(int(size)))
        for row, size in enumerate(draw.integers(1950, 2050, NUM_ROWS))
    )
    summaries = tuple(
        RowSummary(
            row_id=row.row_id,
            digest="",
            reward=0.0,
            outcome=OutcomeKind.COMPLETED,
            sampled={PolicyName("policy"): len(row.payload or b"")},
            versions={},
        )
        for row in rows
    )
    group = SealedGroup(group_id=GroupId("p0-0"), task_key="", rows=summaries)
    return Manifest(consumer=PolicyName("policy"), seq=1, trains_from=0, groups=(group,)), rows


class CountingDataflow:
    """Serves rows as the dataflow does, and counts the bytes this process is given."""

    def __init__(self, rows: tuple[RowPayload, ...]) -> None:
        self.all = rows
        self.num_bytes = 0

    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer:
        rows = self.all if indexes is None else tuple(self.all[index] for index in indexes)
        self.num_bytes += sum(len(row.payload or b"") for row in rows)
        return RowsAnswer(rows=rows)


def _drawn_bytes(ranks: RankGroup) -> dict[str, Any]:
    manifest, sealed = sealed_rows()
    dataflow = CountingDataflow(sealed)
    said = _count_broadcast(ranks)
    rows = fetch_rows(dataflow, manifest, ranks)
    return {
        "through": dataflow.num_bytes + sum(said),
        "fetched": dataflow.num_bytes,
        "all": sum(len(row.payload or b"") for row in sealed),
        "own": [index for index, row in enumerate(rows) if row.payload is not None],
        "is_right": all(
            row.row_id == sealed[index].row_id and row.payload in (None, sealed[index].payload)
            for index, row in enumerate(rows)
        ),
    }


def _count_broadcast(ranks: RankGroup) -> list[int]:
    """Bytes of rows that pass between neighbours, counted where they pass."""
    pluralise: list[int] = []
    passed_on = ranks.broadcast_in_part

    def count(payload: bytes) -> bytes:
        given = passed_on(payload)
        if ranks.position.parallel.tp > 1 and not ranks.position.fetches_rows:
            pluralise.append(len(given))
        return given

    ranks.broadcast_in_part = count
    return pluralise


def four(folder: Path) -> dict[str, Any]:
    """Four ranks: rows between stages of different sizes, and numbers from three uneven ranks."""
    rank = dist.get_rank()
    chains = {
        "dp2tp2-dp4": [ParallelConfig(dp=2, tp=2), ParallelConfig(dp=4)],
        "4-2-3": [ParallelConfig(dp=4), ParallelConfig(dp=2), ParallelConfig(dp=3)],
        "dp2tp2-dp2": [ParallelConfig(dp=2, tp=2), ParallelConfig(dp=2, tp=2)],
        "4-4": [ParallelConfig(dp=4), ParallelConfig(dp=4)],
    }
    results: dict[str, Any] = {name: _chain(chain, rank) for name, chain in chains.items()}
    three = make_rank_group(ParallelConfig(dp=3))
    results["metrics"] = None if three is None else _metrics(three)
    square = make_rank_group(ParallelConfig(dp=2, tp=2))
    assert square is not None
    results["drawn"] = _drawn_bytes(square)
    results["summed"] = square.sum_over_ranks(np.array([10.0**square.position.part])).tolist()
    return results


def round_robin(num_parts: int) -> npt.NDArray[np.int64]:
    """The part of each row if parts take rows in turn: p, p + parts, …"""
    return np.arange(NUM_ROWS, dtype=np.int64) % num_parts


def payload_of(row: int) -> bytes:
    """Ragged, and some of nothing."""
    return bytes([row]) * (row * 37 % 101)


def count_exchanged() -> list[tuple[int, int]]:
    """(sent, received) bytes of each exchange of rows from now on."""
    found: list[tuple[int, int]] = []
    original: Any = getattr(dist.all_to_all_single, "original", dist.all_to_all_single)

    def counted(received: Tensor, sent: Tensor, *sizes: list[int]) -> None:
        if sent.dtype is torch.uint8:
            found.append((sent.numel(), received.numel()))
        original(received, sent, *sizes)

    counted.original = original  # pyright: ignore[reportFunctionMemberAccess]
    dist.all_to_all_single = counted
    return found


def _chain(chain: list[ParallelConfig], rank: int) -> list[dict[str, Any]]:
    before = RowPlacement(parallel=chain[0], parts_R=round_robin(chain[0].dp))
    rows = {row: payload_of(row) for row in before.rows_of(rank)}
    stages: list[dict[str, Any]] = []
    exchanged = count_exchanged()
    for parallel in chain[1:]:
        after = RowPlacement(parallel=parallel, parts_R=round_robin(parallel.dp))
        exchanged.clear()
        rows = repartition(rows, before, after, rank=rank)
        stages.append(
            {
                "rows": list(rows),
                "is_right": all(content == payload_of(row) for row, content in rows.items()),
                "sent": sum(sent for sent, _ in exchanged),
                "received": sum(received for _, received in exchanged),
            }
        )
        before = after
    return stages


UNEVEN = ([1.0, 2.0, 3.0, 4.0, 5.0], [], [10.0])
"""A number per token on each of three ranks."""


def _metrics(ranks: RankGroup) -> dict[str, Any]:
    """A mean over all tokens: sums and denominators are added up, in one call."""
    own = np.array(UNEVEN[ranks.position.rank])
    total, count = ranks.sum_over_ranks(np.array([own.sum(), own.size]))
    return {"mean": float(total / count), "most": ranks.max_over_ranks(own.size)}


def mortal(folder: Path) -> dict[str, Any]:
    """Two ranks that save after every step; in its first life, the second dies in the middle."""
    from safetensors.torch import load_file, save_file

    from penstock.trainer.model_folders import load_model
    from penstock.trainer.ranks.sharding import gather, shard

    ranks = make_rank_group(ParallelConfig(dp=2))
    assert ranks is not None
    saved = sorted(folder.glob("step.*.safetensors"))
    model = load_model(folder / "model").eval()
    whole = load_file(saved[-1]) if saved else {}
    if whole:
        model.load_state_dict({name: whole[f"model.{name}"] for name in model.state_dict()})
    loop = PlainLoop(shard(model, model, ranks), ranks)
    if whole:
        loop.restore(whole)
    for step in range(len(saved), MORTAL_STEPS):
        if step == 3 and ranks.position.rank == 1 and (folder / "kill").exists():
            (folder / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        loop.step(sequences(step))
        weights = {f"model.{name}": tensor for name, tensor in loop.model.named_parameters()}
        whole = gather(weights | loop.state(), ranks)
        if ranks.position.is_rank0:
            save_file(whole, folder / "partial")
            (folder / "partial").rename(folder / f"step.{step}.safetensors")
        dist.barrier()
    return {"began_at": len(saved)}


MORTAL_STEPS = 6
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {"pair": pair, "four": four, "mortal": mortal}


def supervised(job: str, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run a job on ranks as a trainer starts them; what each of them found."""
    code = run_ranks(
        [sys.executable, "-m", "tests.unit.trainer.rank_jobs", job, str(folder)],
        HostRanks.one_host(num_ranks),
        env=_environ(),
        is_stopping=lambda: False,
        final_codes=(1,),
    )
    assert code == 0, f"a rank of {job} failed; see its messages above"
    return _results(job, num_ranks, folder)


def forked(
    job: str, num_ranks: int, folder: Path, module: str = "tests.unit.trainer.rank_jobs"
) -> list[dict[str, Any]]:
    """The same from one process that forks: torch is loaded once for all ranks."""
    command = [sys.executable, "-m", module, job, str(folder), str(num_ranks)]
    subprocess.run(command, env=_environ(), check=True, timeout=3000)
    return _results(job, num_ranks, folder)


def _environ() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _results(job: str, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{job}.{rank}.json").read_text()) for rank in range(num_ranks)]


def _work(job: str, folder: Path, rank_env: RankEnv) -> None:
    torch.set_num_threads(1)
    init_process_group(rank_env, timeout_s=400.0)
    result = JOBS[job](folder)
    (folder / f"{job}.{rank_env.rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # torch takes seconds to say farewell


def _load_once() -> None:
    """What training loads late, before ranks are forked rather than in each of them."""
    from transformers import AutoModelForCausalLM

    import penstock.trainer.ranks.sharding

    assert AutoModelForCausalLM and penstock.trainer.ranks.sharding
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _fork(job: str, folder: Path, num_ranks: int) -> None:
    if job != "four":
        _load_once()
    listener = socket.create_server((LOOPBACK, 0), backlog=16)
    children: list[int] = []
    for rank in range(num_ranks):
        rank_env = RankEnv(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=rank,
            host=LOOPBACK,
            port=listener.getsockname()[1],
            listener=listener.fileno() if rank == 0 else None,
        )
        pid = os.fork()
        if pid == 0:
            _work(job, folder, rank_env)
        children.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    os._exit(1 if any(codes) else 0)


def main() -> None:
    exit_with_parent()
    job, folder = sys.argv[1], Path(sys.argv[2])
    rank_env = read_rank_env(os.environ)
    if rank_env is None:
        _fork(job, folder, int(sys.argv[3]))
    else:
        _work(job, folder, rank_env)


if __name__ == "__main__":
    main()
