# SPDX-License-Identifier: Apache-2.0
"""Texts that a tokenizer gives up on, or that are made to be kept: neither ends a node nor fills
its memory. A tokenizer that gives up panics, with an error that is no Exception."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.gateway import bpe
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from penstock.errors import BadRequest, ConfigError
from penstock.gateway import tokenizing
from penstock.gateway.control_tokens import ControlTokenEscaper
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.gateway.model_calls import Delta
from penstock.gateway.parsing import PLAIN, AnswerFormat, ToolFormat
from penstock.gateway.prompts import LOOP_CHARS
from penstock.gateway.renderer import MAX_CACHED_CHARS, Renderer
from penstock.gateway.stream_decoder import StreamDecoder
from penstock.gateway.tokenizing import MAX_CHARS, PieceEncoder
from penstock.rollout.environments import protocol
from penstock.rollout.environments.protocol import MAX_TEXT_CHARS, parse_answer
from penstock.runs.data_check import _count  # pyright: ignore[reportPrivateUsage]
from penstock.types import PolicyName, SamplingSpec, Version

POLICY = PolicyName("policy")
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PANIC = "x" * 40
"""As ten million spaces are to the patterns in use, but quick."""


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def tokenizer() -> Tokenizer:
    made = Tokenizer(WordLevel({"x": 0, "<unk>": 1}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(r"(?:x+x+)+y"), "isolated")
    return made


@pytest.fixture
def fragile() -> Renderer:
    return Renderer(tokenizer(), PLAIN_TEMPLATE, window=131_072)


def test_the_panic_is_no_exception() -> None:
    with pytest.raises(BaseException) as raised:
        tokenizer().encode(PANIC)
    assert not isinstance(raised.value, Exception)


def test_a_panic_is_a_refusal(fragile: Renderer) -> None:
    for encode in (fragile.encode, fragile.encode_large):
        with pytest.raises(BadRequest, match="tokenizer gave up"):
            encode(PANIC)


@pytest.mark.parametrize("padding", [0, LOOP_CHARS])
async def test_a_panic_ends_no_other_attempt(fragile: Renderer, padding: int) -> None:
    async def generate(request: GenerationRequest) -> Completion:
        raise AssertionError(request)

    gateway = Gateway(generate)
    gateway.set_renderer(POLICY, fragile)
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(), seed=1)
    refused: list[Exception] = []

    async def attempt() -> None:
        try:
            await session.chat(user(PANIC + "z" * padding))
        except Exception as error:
            refused.append(error)

    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(asyncio.Event().wait())
        await tasks.create_task(attempt())
        assert not other.done()
        other.cancel()
    assert isinstance(refused[0], BadRequest)


def test_a_panic_over_a_data_set_names_the_row(fragile: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer gave up.*xxx"):
        _count(PANIC, fragile)


def test_a_panic_of_a_reward_model_is_a_refusal() -> None:
    head = pytest.importorskip("penstock.trainer.prm.head")
    with pytest.raises(BadRequest, match="tokenizer gave up"):
        head.tokenize(tokenizer(), PANIC, 8)


def test_no_text_of_many_millions_of_characters_is_tokenised() -> None:
    renderer = Renderer(tokenizer(), PLAIN_TEMPLATE)
    for encode in (renderer.encode, renderer.encode_large):
        with pytest.raises(BadRequest, match="at most"):
            encode("z" * (MAX_CHARS + 1))


def test_an_observation_is_bounded() -> None:
    def answer(num_chars: int) -> bytes:
        return json.dumps({"id": 1, "observation": {"text": " " * num_chars}}).encode()

    assert parse_answer(answer(MAX_TEXT_CHARS)).observation
    with pytest.raises(ValueError, match="not a valid answer"):
        parse_answer(answer(MAX_TEXT_CHARS + 1))


def test_an_observation_of_very_many_parts_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB of empty lists were three seconds, in which its node did nothing else."""
    parts = ",".join(["[]"] * (1 << 20))
    line = f'{{"id": 1, "observation": {{"info": {{"x": [{parts}]}}}}}}'.encode()
    monkeypatch.setattr(protocol, "_ANSWERS", None)
    with pytest.raises(ValueError, match="lists and objects"):
        parse_answer(line)


def test_a_short_prompt_keeps_no_long_text() -> None:
    """Thousands of rendered prompts are kept; the template decides how long each is."""
    renderer = Renderer(tokenizer(), "{{ 'y' * 100000 }}" + PLAIN_TEMPLATE)
    texts = renderer._texts  # pyright: ignore[reportPrivateUsage]
    for number in range(3):
        assert renderer.render(user(str(number))).endswith(str(number))
    assert sum(map(len, texts.values())) <= 3 * MAX_CACHED_CHARS


def test_bytes_that_make_no_character_are_hardly_decoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = bpe.renderer("append-only")
    decode, decoded = renderer.decode, [0]

    def counted(ids: Sequence[int]) -> str:
        decoded[0] += len(ids)
        return decode(ids)

    monkeypatch.setattr(renderer, "decode", counted)
    half = next(i for i in range(renderer.num_ids) if decode([i]) == "\ufffd")
    heard: list[Delta] = []
    decoder = StreamDecoder(renderer, PLAIN, (), heard.append)
    version = Version(policy=POLICY, incarnation=1, number=0)
    for token in [half] * 2_000 + list(renderer.encode("a")) * 2_100:
        decoder.feed(TokenChunk(sampled_ids=[token], logprobs=[0.0], version=version))
    assert decoded[0] < 10 * 4_100
    told = "".join(delta.text for delta in heard)
    assert told.endswith("aaa") and told == "\ufffd" * 2_000 + "a" * (len(told) - 2_000)


def many_tokens(number: int) -> list[str]:
    """As Llama 3 reserves 250 of them, and Gemma thousands."""
    return [f"<|reserved_special_token_{one}|>" for one in range(number)] + ["<|a|>", "<b>"]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("<|" * 20_000, id="one text of beginnings"),
        pytest.param(["t"] * 2_000, id="many short texts"),
    ],
)
def test_the_number_of_control_tokens_does_not_multiply_the_work(value: object) -> None:
    """4 MB of `<|` were compared with each of Llama 3's tokens wherever one could begin: one call
    that no other thread interrupts, of ten seconds. 64 KB of one-letter texts were compared with
    6,000 ends of tokens each, on the event loop."""

    def least_s(number: int) -> float:
        escaper = ControlTokenEscaper(many_tokens(number))
        found: list[float] = []
        for _ in range(5):
            began = time.process_time()
            escaper.escape_untrusted_json(value)
            found.append(time.process_time() - began)
        return min(found)

    assert least_s(1024) < 10 * least_s(8)


def test_what_is_kept_of_pieces_is_bounded_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is refused for its length was kept, too: 130 MB of rare characters, which have
    four ids each, filled five gigabytes of the node's memory."""
    monkeypatch.setattr(tokenizing, "MAX_KEPT_IDS", 1_000)
    encoder = PieceEncoder(bpe.tokenizer())
    for number in range(50):
        encoder.encode(f"{number} " + "\U00013000" * 100)
        kept = encoder._known.values()  # pyright: ignore[reportPrivateUsage]
        assert sum(map(len, kept)) <= 1_000
    again = f"{49} " + "\U00013000" * 100
    assert encoder.encode(again) == tokenizing.encode(bpe.tokenizer(), again)


@pytest.mark.parametrize(
    ("answer_format", "begin"),
    [
        pytest.param(AnswerFormat(has_thinking=True), "", id="before the answer"),
        pytest.param(AnswerFormat(has_thinking=True, is_thinking=True), "a", id="reasoning"),
        pytest.param(AnswerFormat(tools=ToolFormat.HERMES), "a", id="text"),
        pytest.param(AnswerFormat(tools=ToolFormat.LLAMA), "", id="before a call"),
    ],
)
def test_white_space_without_end_is_held_back_once(
    answer_format: AnswerFormat, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token was put behind all that was held back, and all of it looked at: 32,000 tokens of a
    hundred spaces took a minute of the event loop."""
    renderer = bpe.renderer("append-only")
    heard: list[Delta] = []
    decoder = StreamDecoder(renderer, answer_format, (), heard.append)
    look, looked = decoder._look, [0]  # pyright: ignore[reportPrivateUsage]

    def counted() -> None:
        looked[0] += 1
        look()

    monkeypatch.setattr(decoder, "_look", counted)
    version = Version(policy=POLICY, incarnation=1, number=0)
    blank = " \n" * 500
    for token in renderer.encode(begin + blank + "zz"):
        decoder.feed(TokenChunk(sampled_ids=[token], logprobs=[0.0], version=version))
    assert looked[0] < 20
    told = "".join(delta.reasoning + delta.text for delta in heard)
    assert told.lstrip().startswith(begin) and told.endswith("zz")
    assert begin == "" or told == begin + blank + "zz"
