# SPDX-License-Identifier: Apache-2.0
"""Compares the taped Jacobian of real architectures with one backward per example."""

from typing import Any, cast

import pytest
import torch
from oracle import assert_jacobian_equals_rows, one_backward_per_example
from real_models import MODELS, QUIET, RealModel, part

import torch_privacy as tp

pytestmark = QUIET

# The grouped product does not exist in float64; Mamba's scan computes in float32, whatever the model's type.
NEVER_IN_FLOAT64 = [name for name in MODELS if "grouped_mm" in name or name == "Mamba"]


def made(name: str, dtype: torch.dtype) -> RealModel:
    torch.set_default_dtype(dtype)
    return MODELS[name]()


def recorded(real: RealModel) -> tp.Jacobian:
    with tp.record(real.module) as tape:
        losses = real.losses(real.module, real.batch)
    return tape.jacobian(losses, verify=True)


def rows_of(real: RealModel) -> torch.Tensor:
    n = len(next(iter(real.batch.values())))
    parts: list[Any] = [part(real.batch, i) for i in range(n)]
    return one_backward_per_example(real.module, torch.zeros(n), cast(Any, real.losses), parts)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NEVER_IN_FLOAT64])
def test_jacobian_of_real_model_matches_one_backward_per_example(name):
    real = made(name, torch.float64)
    assert_jacobian_equals_rows(recorded(real), rows_of(real))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", MODELS)
def test_jacobian_of_real_model_matches_in_float32(name):
    real = made(name, torch.float32)
    assert_jacobian_equals_rows(recorded(real), rows_of(real), rtol=1e-5)
