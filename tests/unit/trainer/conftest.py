# SPDX-License-Identifier: Apache-2.0
"""One tiny model for all trainer tests: building and importing it costs more than using it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    init_model(TINY_QWEN3, folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def _loaded(model_folder: Path) -> PreTrainedModel:
    return load_model(model_folder)


@pytest.fixture
def new_model(_loaded: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """A fresh copy of the initial model at each call."""
    return lambda: copy.deepcopy(_loaded)


@pytest.fixture
def new_double_model(_loaded: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """The same model in float64 throughout: transformers' own norms compute in float32."""

    def make() -> PreTrainedModel:
        model = copy.deepcopy(_loaded).double()
        for parent in list(model.modules()):
            for name, norm in list(parent.named_children()):
                if type(norm).__name__ == "Qwen3RMSNorm":
                    weight = norm.get_parameter("weight")
                    exact = torch.nn.RMSNorm(weight.shape, eps=1e-6, dtype=torch.float64)
                    exact.weight = weight
                    setattr(parent, name, exact)
        return model

    return make
