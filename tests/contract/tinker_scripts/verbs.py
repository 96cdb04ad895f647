# SPDX-License-Identifier: Apache-2.0
"""Every verb of the Tinker SDK that the server has, once, by the unmodified SDK.

    verbs.py URL KEY BASE_MODEL [FOLDER_WITH_TORCH]

Prints one JSON object of what came back. The SDK needs torch only for a client's own loss."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")  # of the SDK, about its own next version
sys.path.extend(sys.argv[4:])  # behind the SDK's own packages

import tinker  # noqa: E402 - after the path
from tinker import types  # noqa: E402

LINE = [4, 5, 6, 3, 6, 5, 4]
ADAM = types.AdamParams(learning_rate=1e-2)


def datum(**inputs: Any) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(LINE[:-1]),
        loss_fn_inputs={"target_tokens": LINE[1:], **inputs},
    )


def logprobs(passed: Any) -> list[float]:
    return [float(value) for value in passed.loss_fn_outputs[0]["logprobs"].data]


def own_loss(data: list[Any], found: list[Any]) -> tuple[Any, dict[str, float]]:
    total = sum((one.exp() ** 2).sum() for one in found)
    return total, {"squares": float(total)}


def main() -> None:
    url, key, base_model = sys.argv[1:4]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    said: dict[str, Any] = {}
    model = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()
    said["rank"] = model.get_info().lora_rank
    ones, zeros = [1.0] * 6, [0.0] * 6
    first = model.forward_backward([datum(weights=ones)], "cross_entropy")
    step = model.optim_step(ADAM)
    before = first.result(timeout=600)
    said["loss"] = before.metrics["loss:sum"]
    said["sum"] = -sum(logprobs(before))
    said["step"] = step.result(timeout=600).metrics
    after = model.forward([datum(weights=ones)], "cross_entropy").result(timeout=600)
    said["moved"] = sum(logprobs(after)) - sum(logprobs(before))
    policy = {"logprobs": logprobs(after), "advantages": ones}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        found = model.forward_backward([datum(**policy)] * 3, loss).result(timeout=600)
        said[loss] = found.metrics["loss:sum"]
    state = model.save_state("state").result(timeout=600)
    named = model.save_weights_for_sampler("named").result(timeout=600)
    other = service.create_training_client_from_state_with_optimizer(state.path).result()
    copied = other.forward([datum(weights=ones)], "cross_entropy").result(timeout=600)
    said["copied"] = logprobs(copied) == logprobs(after)
    prompt = types.ModelInput.from_ints(LINE[:4])
    params = types.SamplingParams(max_tokens=5, seed=3)
    samplers = [
        service.create_sampling_client(model_path=named.path).result(),
        model.save_weights_and_get_sampling_client().result(),
        service.create_sampling_client(base_model=base_model).result(),
    ]
    drawn = [one.sample(prompt, 3, params).result(timeout=600) for one in samplers]
    said["sampled"] = [[len(each.tokens) for each in one.sequences] for one in drawn]
    said["same"] = [
        list(drawn[0].sequences[i].tokens) == list(drawn[1].sequences[i].tokens) for i in range(3)
    ]
    tokens = list(drawn[0].sequences[0].tokens)
    line = types.ModelInput.from_ints(LINE[:4] + [int(token) for token in tokens])
    scored = samplers[0].compute_logprobs(line).result(timeout=600)
    recorded = drawn[0].sequences[0].logprobs
    said["worst"] = max(abs(a - b) for a, b in zip(scored[4:], recorded, strict=True))
    refused = model.forward_backward([datum(weights=zeros)], "ppo")
    try:
        refused.result(timeout=600)
    except tinker.TinkerError as error:
        said["refused"] = str(error)
    if sys.argv[4:]:
        own = model.forward_backward_custom([datum()], own_loss).result(timeout=600)
        said["own"] = own.metrics
        model.optim_step(ADAM).result(timeout=600)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
