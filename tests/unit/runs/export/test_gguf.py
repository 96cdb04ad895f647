# SPDX-License-Identifier: Apache-2.0
"""GGUF files and Modelfiles: what they hold, what is refused, and that llama.cpp agrees."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.gateway.chatml import TEMPLATE as CHATML
from tests.unit.runs.export import llama_program
from tests.unit.runs.export.stored_runs import tiny_model
from tests.unit.runs.export.test_model import greedy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.config import SamplingConfig
from penstock.errors import WeightsError
from penstock.gateway.renderer import Renderer
from penstock.runs.export.gguf_file import write_gguf
from penstock.runs.export.gguf_tokenizer import read_vocabulary
from penstock.runs.export.modelfile import write_modelfile

CACHE = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()
LLAMA = CACHE / "llama" / "bin" / "python"
SMOLLM = CACHE / "models" / "SmolLM2-135M-Instruct"
TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand tabs   \r\n",
    "naïve café — 東京 🙂 x²",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2  # I'LL",
]
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, path: Path, precision: Any = None) -> Any:
    write_gguf(folder, path, name="tiny", precision=precision, lineage={"run": "r"})
    return gguf.GGUFReader(path)


def tensors(reader: Any) -> dict[str, Any]:
    """As float32, in the shape of numpy."""
    return {
        one.name: gguf.quants.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1])
        for one in reader.tensors
    }


def field(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def tiny_llama(folder: Path, **changes: Any) -> Path:
    """The tiny model without its norms of queries and keys is a Llama."""
    tiny_model(folder, seed=3)
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if "q_norm" not in name and "k_norm" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    edit_config(folder, **llama, **changes)
    return folder


def test_a_qwen3_file_holds_weights_vocabulary_template_and_lineage(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    reader = write(folder, tmp_path / "x.gguf")
    given, found = load_file(folder / "model.safetensors"), tensors(reader)
    assert len(found) == len(given)
    assert np.array_equal(found["output.weight"], given["lm_head.weight"])
    for layer in (0, 1):
        for ours, theirs in (
            ("attn_q", "self_attn.q_proj"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("ffn_down", "mlp.down_proj"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            wanted = given[f"model.layers.{layer}.{theirs}.weight"]
            assert np.array_equal(found[f"blk.{layer}.{ours}.weight"], wanted)
    assert field(reader, "general.architecture") == "qwen3"
    assert field(reader, "qwen3.attention.head_count_kv") == 2
    assert field(reader, "qwen3.attention.key_length") == 32
    assert field(reader, "qwen3.rope.freq_base") == 100.0
    assert field(reader, "tokenizer.ggml.tokens")[:4] == ["<pad>", "<eos>", "<unk>", ">"]
    assert field(reader, "tokenizer.ggml.eos_token_id") == 1
    assert field(reader, "tokenizer.chat_template") == (folder / "chat_template.jinja").read_text()
    assert field(reader, "penstock.run") == "r"


def test_bf16_rounds_matrices_only_and_is_the_default_of_a_model_stored_so(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    edit_config(folder, dtype="bfloat16")
    kinds = {one.name: one.tensor_type.name for one in write(folder, tmp_path / "b.gguf").tensors}
    assert kinds["output.weight"] == "BF16" and kinds["output_norm.weight"] == "F32"
    found = tensors(gguf.GGUFReader(tmp_path / "b.gguf"))["output.weight"]
    wanted = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.allclose(found, wanted, rtol=2**-8, atol=0) and not np.array_equal(found, wanted)
    full = write(folder, tmp_path / "f.gguf", "f32")
    assert {one.tensor_type.name for one in full.tensors} == {"F32"}


def test_rows_of_llamas_queries_are_paired_as_llama_cpp_rotates_them(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", rope_parameters=ROPE_LLAMA3)
    found = tensors(write(folder, tmp_path / "x.gguf"))
    given = load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    heads, size = 2, 32
    for head in range(heads):
        for at in range(size // 2):
            first, second = head * size + at, head * size + size // 2 + at
            to = head * size + 2 * at
            assert np.array_equal(found["blk.0.attn_k.weight"][to], given[first])
            assert np.array_equal(found["blk.0.attn_k.weight"][to + 1], given[second])
    factors = found["rope_freqs.weight"]
    assert factors[0] == 1.0 and factors[-1] == 4.0, "high frequencies stay, low ones are divided"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "gemma3 models cannot be written"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type has a value"),
        ({"use_sliding_window": True}, "use_sliding_window has a value"),
        ({"model_type": "llama"}, "tensor model.layers.0.self_attn.k_norm.weight has no place"),
        ({"vocab_size": 8}, "the embedding only 8 rows"),
    ],
)
def test_a_model_that_llama_cpp_would_run_differently_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tiny_model(tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(WeightsError, match=message):
        write(folder, tmp_path / "x.gguf")


# --- tokenizers ------------------------------------------------------------------------------


def byte_level(folder: Path, *before: Any) -> Path:
    """A byte-level BPE tokenizer with these steps before merging."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("1", "2"), ("Ġ", "w")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = before[0] if len(before) == 1 else pre_tokenizers.Sequence([*before])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def split(digits: str) -> Any:
    from tokenizers import Regex

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def raw_bytes(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


FAMILIES: dict[str, tuple[Any, ...]] = {
    "gpt-2": (raw_bytes(use_regex=True),),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), raw_bytes(use_regex=True)),
    "qwen2": (split(""), raw_bytes(use_regex=False)),
    "llama-bpe": (split("{1,3}"), raw_bytes(use_regex=False)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_told_apart_by_their_rules(tmp_path: Path, family: str) -> None:
    found = read_vocabulary(byte_level(tmp_path, *FAMILIES[family]), 300)
    assert found.family == family
    assert found.merges == ("h e", "1 2", "Ġ w")
    assert found.types[found.tokens.index("<eos>")] == 3 and found.special == {"eos": 259}
    assert found.tokens[299] == "[PAD299]" and found.types[299] == 5


@pytest.mark.parametrize(
    "before",
    [
        (pre_tokenizers.Metaspace(),),
        (pre_tokenizers.ByteLevel(add_prefix_space=True),),
        (split("{1,2}"), raw_bytes(use_regex=False)),
    ],
)
def test_unknown_rules_are_refused(tmp_path: Path, before: tuple[Any, ...]) -> None:
    with pytest.raises(WeightsError, match=r"none that llama\.cpp is known to run alike"):
        read_vocabulary(byte_level(tmp_path, *before), 300)


# --- Ollama ----------------------------------------------------------------------------------

INSTRUCTION = re.compile(
    r"""\#[^\n]*
    | FROM\ \S+
    | (?:TEMPLATE|SYSTEM|LICENSE)\ (?:"{3}(?P<text>(?:(?!"{3}).)*)"{3}|[^"\n]+)
    | ADAPTER\ \S+
    | PARAMETER\ (?:temperature|top_p|min_p|repeat_penalty)\ \d+(?:\.\d+)?
    | PARAMETER\ (?:top_k|seed|num_ctx|num_predict)\ -?\d+
    | PARAMETER\ stop\ "[^"\n]+"
    | MESSAGE\ (?:system|user|assistant)\ [^\n]+""",
    re.VERBOSE | re.DOTALL,
)
"""Ollama's grammar, as far as an export may use it."""


def check_modelfile(text: str) -> list[str]:
    """The instructions, one by one; fails at the first that is none."""
    found: list[str] = []
    while text:
        match = INSTRUCTION.match(text)
        assert match is not None, f"not an instruction: {text[:80]!r}"
        found.append(match[0])
        rest = text[match.end() :]
        assert rest.startswith("\n"), f"text after an instruction: {rest[:80]!r}"
        text = rest.lstrip("\n")
    assert [one.split()[0] for one in found].count("FROM") == 1
    for one in found:
        assert one.count("{{") == one.count("}}")
        actions = [part.strip("- ").split()[0] for part in re.findall(r"{{(.*?)}}", one)]
        assert actions.count("end") == sum(word in ("range", "if", "with") for word in actions)
    return found


@pytest.mark.parametrize("text", ["FROM a b\n", 'PARAMETER stop "a\n', "RUN ls\n", 'SYSTEM """a\n'])
def test_the_checker_refuses_what_ollama_refuses(text: str) -> None:
    with pytest.raises(AssertionError):
        check_modelfile(text)


def modelfile(folder: Path, template: str) -> list[str]:
    (folder / "chat_template.jinja").write_text(template)
    sampling = SamplingConfig(temperature=0.7, top_p=0.95, top_k=20)
    write_modelfile(folder, folder / "Modelfile", "x.gguf", sampling)
    return check_modelfile((folder / "Modelfile").read_text())


def test_a_modelfile_has_the_template_the_system_prompt_and_the_sampling(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model", raw_bytes(use_regex=True))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 261]}))
    found = modelfile(folder, CHATML)
    assert "FROM ./x.gguf" in found and "PARAMETER top_k 20" in found
    assert 'PARAMETER stop "<|im_end|>"' in found and 'PARAMETER stop "<eos>"' in found
    [template] = [one for one in found if one.startswith("TEMPLATE")]
    assert "<|im_start|>{{ .Role }}" in template
    default = (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    )
    found = modelfile(folder, default + "{% endif %}" + CHATML)
    assert 'SYSTEM """Be brief."""' in found
    plain = modelfile(folder, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert 'TEMPLATE """{{- range .Messages }}{{ .Content }}{{ end }}"""' in plain
    other = modelfile(folder, "{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert not any(one.startswith("TEMPLATE") for one in other), "Ollama looks into the GGUF file"


# --- llama.cpp -------------------------------------------------------------------------------

needs_llama = pytest.mark.skipif(
    not LLAMA.exists(), reason=f"no llama-cpp-python in {LLAMA.parents[1]}: make setup-llama"
)


def ask_llama(asked: dict[str, Any]) -> Any:
    done = subprocess.run(
        [str(LLAMA), "-I", llama_program.__file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("shape", ["qwen3", "llama", "llama3"])
def test_llama_cpp_agrees_on_tiny_models(tmp_path: Path, shape: str) -> None:
    folder = tmp_path / "model"
    if shape == "qwen3":
        tiny_model(folder)
    else:
        tiny_llama(folder, **({"rope_parameters": ROPE_LLAMA3} if shape == "llama3" else {}))
    path = tmp_path / "x.gguf"
    write(folder, path)
    renderer = Renderer.load(folder)
    texts = ["abc>", "jihgfedcba>", "a<eos>b"]
    prompts = [[*renderer.encode(text)] for text in texts]
    prompts.append([*renderer.encode("abcdefghij" * 8)])  # beyond the original window
    asked = {"texts": texts, "prompts": prompts, "num_tokens": 16, "banned": [1]}
    found = ask_llama({str(path): asked})[str(path)]
    assert found["texts"] == prompts[:3]
    assert found["answers"] == [greedy(folder, prompt, 16) for prompt in prompts]
    assert found["template"] == (folder / "chat_template.jinja").read_text()


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_cuts_text_alike(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    byte_level(folder, *FAMILIES[family])
    weights = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = np.resize(weights[name], (300, weights[name].shape[1]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, vocab_size=300)
    path = tmp_path / "x.gguf"
    write(folder, path)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*TEXTS, "he 12 121212 we'll WE'LL  hehe\n w"]
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    asked = {"texts": texts, "prompts": [], "num_tokens": 0, "banned": []}
    assert ask_llama({str(path): asked})[str(path)]["texts"] == wanted


@pytest.mark.slow
@needs_llama
@pytest.mark.skipif(not SMOLLM.exists(), reason=f"no model in {SMOLLM}: make setup-engine")
@pytest.mark.parametrize("precision", ["bf16", "f32"])
def test_llama_cpp_agrees_on_a_real_model(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "x.gguf"
    write(SMOLLM, path, precision)
    renderer = Renderer.load(SMOLLM)
    tokenizer: Any = Tokenizer.from_file(str(SMOLLM / "tokenizer.json"))
    questions = ["What is the capital of France?", "Write a haiku about water."]
    prompts = [
        [*renderer.encode(renderer.render([{"role": "user", "content": text}]))]
        for text in questions
    ]
    asked = {"texts": TEXTS, "prompts": prompts, "num_tokens": 24, "banned": [1]}
    found = ask_llama({str(path): asked})[str(path)]
    assert found["texts"] == [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    wanted = [greedy(SMOLLM, prompt, 24) for prompt in prompts]
    assert [*map(until_end, found["answers"])] == [*map(until_end, wanted)]


def until_end(ids: list[int]) -> list[int]:
    """An answer without what follows its end: there the model only guesses, and llama.cpp, which
    multiplies bfloat16 weights in bfloat16, may guess another token."""
    return ids[: ids.index(2)] if 2 in ids else ids
