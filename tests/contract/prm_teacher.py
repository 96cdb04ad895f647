# SPDX-License-Identifier: Apache-2.0
"""A program that labels steps: good ones end in a."""

from __future__ import annotations

from penstock.trainer.prm.traces import Trace


def label(text: str, *, trace: Trace, step: int) -> float:
    assert text.endswith(trace.steps[step].action)
    return 1.0 if text.endswith("a") else 0.0
