# SPDX-License-Identifier: Apache-2.0
"""The suites that penstock knows by name: where their rows are, and what scores the answers.

One table. How a row becomes a question is in `suite_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.dataflow.sources.suites.suite_rows import (
    Convert,
    arc,
    gaia,
    gpqa,
    gsm8k,
    humaneval,
    livecodebench,
    maths,
    mbpp,
    mmlu_pro,
    olympiadbench,
    short_answer,
    triviaqa,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSuite:
    hub: str
    """`owner/name` of the data set; empty if the Hub has none that `datasets` can load."""
    scorer: str
    convert: Convert
    split: str = "test"
    config: str | None = None
    """Configuration of the data set."""
    ids: tuple[str, ...] = ()
    """Columns that may have the id of a question; without any, its number."""


KNOWN_SUITES: Mapping[str, KnownSuite] = MappingProxyType(
    {
        "gsm8k": KnownSuite(hub="openai/gsm8k", config="main", scorer="math", convert=gsm8k),
        "math500": KnownSuite(
            hub="HuggingFaceH4/MATH-500", scorer="math", convert=maths, ids=("unique_id",)
        ),
        "aime24": KnownSuite(
            hub="HuggingFaceH4/aime_2024",
            split="train",
            scorer="math",
            convert=maths,
            ids=("id", "ID"),
        ),
        "aime25": KnownSuite(hub="math-ai/aime25", scorer="math", convert=maths, ids=("id", "ID")),
        "amc23": KnownSuite(hub="math-ai/amc23", scorer="math", convert=maths, ids=("id",)),
        "minerva": KnownSuite(hub="math-ai/minervamath", scorer="math", convert=maths),
        "olympiadbench": KnownSuite(
            hub="Hothan/OlympiadBench",
            config="OE_TO_maths_en_COMP",
            split="train",
            scorer="math",
            convert=olympiadbench,
            ids=("id",),
        ),
        "gpqa_diamond": KnownSuite(
            hub="Idavidrein/gpqa",
            config="gpqa_diamond",
            split="train",
            scorer="choice",
            convert=gpqa,
            ids=("Record ID",),
        ),
        "mmlu_pro": KnownSuite(
            hub="TIGER-Lab/MMLU-Pro", scorer="choice", convert=mmlu_pro, ids=("question_id",)
        ),
        "arc_challenge": KnownSuite(
            hub="allenai/ai2_arc",
            config="ARC-Challenge",
            scorer="choice",
            convert=arc,
            ids=("id",),
        ),
        "humaneval": KnownSuite(
            hub="openai/openai_humaneval", scorer="code", convert=humaneval, ids=("task_id",)
        ),
        "mbpp": KnownSuite(
            hub="google-research-datasets/mbpp",
            config="sanitized",
            scorer="code",
            convert=mbpp,
            ids=("task_id",),
        ),
        "livecodebench": KnownSuite(
            hub="", scorer="code", convert=livecodebench, ids=("question_id",)
        ),
        "hotpotqa": KnownSuite(
            hub="hotpotqa/hotpot_qa",
            config="distractor",
            split="validation",
            scorer="exact",
            convert=short_answer,
            ids=("id", "_id"),
        ),
        "triviaqa": KnownSuite(
            hub="mandarjoshi/trivia_qa",
            config="rc.nocontext",
            split="validation",
            scorer="exact",
            convert=triviaqa,
            ids=("question_id",),
        ),
        "musique": KnownSuite(
            hub="dgslibisey/MuSiQue",
            split="validation",
            scorer="exact",
            convert=short_answer,
            ids=("id",),
        ),
        "bamboogle": KnownSuite(hub="chiayewken/bamboogle", scorer="exact", convert=short_answer),
        "gaia": KnownSuite(
            hub="gaia-benchmark/GAIA",
            config="2023_all",
            split="validation",
            scorer="exact",
            convert=gaia,
            ids=("task_id",),
        ),
    }
)
