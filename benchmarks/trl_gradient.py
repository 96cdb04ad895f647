# SPDX-License-Identifier: Apache-2.0
"""Records what TRL makes of stored batches, for `tests/unit/trainer/test_trl.py`; run by TRL's own
interpreter: `python -P trl_gradient.py FILE`.

One small model, ten batches of the same answers with other rewards and other log-probs of the
policy that sampled. TRL compares the rewards, computes the loss and makes the optimizer; nothing is
generated, and nothing is shuffled, because its generation batch is never split here.

FILE (safetensors): weights before and after ten updates, the batches, and for the first batch the
advantages, and the gradient on-policy and with the perturbed log-probs."""

import json
import sys
import tempfile
from importlib import import_module
from typing import Any

np: Any = import_module("numpy")
torch: Any = import_module("torch")
trl: Any = import_module("trl")
transformers: Any = import_module("transformers")
tokenizers: Any = import_module("tokenizers")
datasets: Any = import_module("datasets")
save_file: Any = import_module("safetensors.torch").save_file

GROUPS, SIZE, STEPS = 8, 8, 10
LONGEST, PAD, END = 6, 0, 1
SIGNS = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghij", "<r0>", "<r1>"]
MODEL = {
    "vocab_size": len(SIGNS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": END,
}
SETTINGS = {
    "epsilon": 0.2,
    "delta": 1.5,
    "entropy_coef": 0.1,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}


def new_model(draw: Any) -> Any:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.tensor(draw.standard_normal(parameter.shape), dtype=torch.float32)
            parameter.copy_(0.3 * values + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def new_tokenizer() -> Any:
    words = tokenizers.models.WordLevel({sign: i for i, sign in enumerate(SIGNS)}, "<unk>")
    plain = tokenizers.Tokenizer(words)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Stored:
    """Answers and rewards of one step after another, in place of a policy and a reward."""

    def __init__(self, draw: Any) -> None:
        lengths = draw.integers(2, 7, GROUPS)
        prompts = [["".join(draw.choice(list("abcdefghij"), n))] * SIZE for n in lengths]
        self.prompts: list[str] = [prompt for group in prompts for prompt in group]
        rows = len(self.prompts)
        self.answers = [draw.integers(2, 16, n).tolist() for n in draw.integers(1, 7, rows)]
        for answer in self.answers:
            if len(answer) < LONGEST:
                answer[-1] = END
        self.rewards = draw.integers(0, 4, (STEPS, rows)) / 3
        self.rewards[:, :SIZE] = 1.0  # no spread; in float32 the mean of thirds would leave some
        self.noise = 0.5 * draw.standard_normal((STEPS, rows, LONGEST))
        self.step = 0

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert prompts == self.prompts
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": self.answers, "logprobs": None}

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        return self.rewards[self.step].tolist()


def new_trainer(model: Any, stored: Stored, folder: str) -> Any:
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=stored.reward,
        args=trl.GRPOConfig(
            folder,
            per_device_train_batch_size=GROUPS * SIZE,
            num_generations=SIZE,
            max_completion_length=LONGEST,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            **SETTINGS,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": stored.prompts}),
        processing_class=new_tokenizer(),
        rollout_func=stored.rollout,
    )


def inputs_of(trainer: Any, stored: Stored, step: int) -> dict[str, Any]:
    stored.step = step
    return trainer._generate_and_score_completions([{"prompt": p} for p in stored.prompts])


def gradient(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def logprobs_of(trainer: Any, inputs: dict[str, Any]) -> Any:
    whole = [
        torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1)
        for kind in ("ids", "mask")
    ]
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, *whole, LONGEST)[0]


def main() -> None:
    torch.set_num_threads(1)
    draw = np.random.default_rng(20)
    model, stored = new_model(draw), Stored(draw)
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(model, stored, folder)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        record = {f"before/{name}": p.detach().clone() for name, p in model.named_parameters()}
        first = inputs_of(trainer, stored, 0)
        now = logprobs_of(trainer, first)
        olds = now + torch.tensor(stored.noise, dtype=torch.float32)
        record |= {
            "answers": first["completion_ids"].int(),
            "answer_mask": first["completion_mask"].int(),
            "prompts": first["prompt_ids"].int(),
            "prompt_mask": first["prompt_mask"].int(),
            "rewards": torch.tensor(stored.rewards),
            "advantages": first["advantages"].float(),
            "logprobs": now,
            "old_logprobs": olds,
        }
        for kind, more in (("on", {}), ("off", {"old_per_token_logps": olds[0]})):
            found = gradient(trainer, {**first, **more})
            record |= {f"{kind}/{name}": value for name, value in found.items()}
        optimizer = trainer.create_optimizer()
        for step in range(STEPS):
            inputs = inputs_of(trainer, stored, step)
            gradient(trainer, {**inputs, "old_per_token_logps": olds[step]})
            torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
            optimizer.step()
        record |= {f"after/{name}": p.detach().clone() for name, p in model.named_parameters()}
    about = {"model": MODEL, "settings": SETTINGS, "trl": trl.__version__}
    save_file(record, sys.argv[1], metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    main()
