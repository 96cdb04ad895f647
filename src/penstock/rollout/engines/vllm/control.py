# SPDX-License-Identifier: Apache-2.0
"""Control calls to a vLLM server: pause, load, label, resume, and checks of its options.

Each raises EngineError, which names the option to set if the server lacks one. Stateless: the
engine decides the order of calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import EngineError
from penstock.rollout.http_client import HttpClient, HttpReply

CALL_S = 60.0
PAUSE_S = 120.0
LOAD_S = 1800.0
"""Large models take minutes from a cold disk."""
PROBE_S = 300.0
POLL_S = 0.05
EXTENSION = "penstock_worker.Extension"
REQUIRED_OPTIONS = (
    "--enable-scale-out",
    "--logprobs-mode",
    "processed_logprobs",
    "--worker-extension-cls",
    EXTENSION,
)
"""Options a server must be started with, in addition to VLLM_SERVER_DEV_MODE=1."""
COUNTERS = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")
_FIX_HINT = (
    f"start it with VLLM_SERVER_DEV_MODE=1 and `{' '.join(REQUIRED_OPTIONS)}`, "
    "the folder of penstock_worker.py on its "
    "PYTHONPATH and PENSTOCK_WEIGHTS_ROOT set to the folder that contains the snapshots"
)


@dataclass(frozen=True, slots=True)
class _Progress:
    """Of one worker, with a patch."""

    is_busy: bool
    error: str
    num_bytes: int


class Control:
    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def is_healthy(self) -> bool:
        try:
            return (await self._client.request("GET", "/health", timeout_s=CALL_S)).status == 200
        except OSError:
            return False

    async def num_tokens(self) -> float:
        """Tokens generated and read since the start; grows while the server makes progress."""
        body = (await self._call("GET", "/metrics")).body
        lines = (line for line in body.splitlines() if line.startswith(COUNTERS))
        return sum(float(line.rpartition(b" ")[2]) for line in lines)

    async def pause(self, *, keeps_kv: bool = False) -> None:
        """Pause running answers; their cache is dropped and recomputed on resume, or kept."""
        clear = "false" if keeps_kv else "true"
        await self._call("POST", f"/pause?mode=keep&clear_cache={clear}", timeout_s=PAUSE_S)

    async def check(self, folder: Path) -> None:
        await self._worker("penstock_check", str(folder))

    async def load(self, folder: Path) -> None:
        await self._worker("penstock_load", str(folder))

    async def prepare_patch(self, patch: Path, folder: Path) -> int:
        """Prepare a patch beside the running answers; returns the bytes that were read for it.
        Raises EngineError, without changes, if it does not fit."""
        await self._worker("penstock_prepare", str(patch), str(folder))
        return await self._wait_for_workers()

    async def apply_patch(self) -> None:
        await self._worker("penstock_apply")

    async def verify_patch(self, names: Sequence[str]) -> None:
        """Raises EngineError if a loaded tensor does not have the bits of its version. One call
        for each, so that answers go on in between."""
        for name in names:
            reply = _read(await self._worker("penstock_verify", name))
            if not all(worker["is_right"] for worker in reply["results"]):
                raise EngineError(f"{name} does not have the bits of its version")

    async def _wait_for_workers(self) -> int:
        deadline = time.monotonic() + LOAD_S
        while True:
            reply = _read(await self._worker("penstock_progress"))
            workers = [_Progress(**worker) for worker in reply["results"]]
            if not any(worker.is_busy for worker in workers):
                break
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM's workers prepare a patch for more than {LOAD_S:g} s")
            await asyncio.sleep(POLL_S)
        if errors := [worker.error for worker in workers if worker.error]:
            raise EngineError(f"vLLM cannot use a patch: {errors[0]}")
        return sum(worker.num_bytes for worker in workers)

    async def reset_prefix_cache(self) -> None:
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not _read(await self._call("POST", path)).get("success"):
            raise EngineError("vLLM failed to drop its prefix cache of the old weights")

    async def label(self, name: str) -> None:
        """Set the version label of tokens sampled from now on."""
        await self._call("POST", "/update_weight_version", {"new_version": name})

    async def load_adapter(self, name: str, folder: Path) -> None:
        call = {"lora_name": name, "lora_path": str(folder)}
        await self._call("POST", "/v1/load_lora_adapter", call, timeout_s=LOAD_S)

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def resume(self) -> None:
        await self._call("POST", "/resume", timeout_s=PAUSE_S)

    async def check_logprobs(self) -> None:
        """Raise EngineError if the log-probs do not match the sampling distribution. With top_k 1,
        each sampled token must have log-prob 0, unlike under a plain softmax."""
        params = {"top_k": 1, "temperature": 2.0, "max_tokens": 4, "logprobs": 0}
        call = {
            "token_ids": [1],
            "sampling_params": {**params, "ignore_eos": True, "detokenize": False},
        }
        reply = await self._call("POST", "/inference/v1/generate", call, timeout_s=PROBE_S)
        try:
            [choice] = _read(reply)["choices"]
            logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
            has_spans = bool(choice["weight_versions"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"unexpected response from vLLM's generate route ({error!r}); {_FIX_HINT}"
            ) from None
        if not has_spans:
            raise EngineError("vLLM does not report the weight version of tokens; use vLLM 0.32")
        if len(logprobs) != 4 or any(abs(logprob) > 1e-6 for logprob in logprobs):
            raise EngineError(
                f"vLLM's log-probs do not match the sampling distribution (top_k 1 gave "
                f"{logprobs}, not 0); start it with `--logprobs-mode processed_logprobs`"
            )

    async def _worker(self, method: str, *args: object) -> HttpReply:
        call = {"method": method, "args": list(args), "timeout": LOAD_S}
        return await self._call("POST", "/collective_rpc", call, timeout_s=LOAD_S)

    async def _call(
        self, method: str, path: str, body: object = None, *, timeout_s: float = CALL_S
    ) -> HttpReply:
        return await self._client.call(
            "vLLM", method, path, body, timeout_s=timeout_s, fix=_FIX_HINT
        )


def _read(reply: HttpReply) -> dict[str, Any]:
    try:
        return msgspec.json.decode(reply.body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"cannot parse vLLM's response: {error}; use vLLM 0.32") from None
