# SPDX-License-Identifier: Apache-2.0
"""Tests each way to use a parameter within a part under activation checkpointing, or with other saved-tensor hooks."""

import pytest
import torch
from cases import CASES, losses_of
from oracle import assert_jacobian_equals_rows, flat, one_backward_per_example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torch_privacy as tp
from torch_privacy.jacobian.tape import Tape

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # by torch, again in the backward


def once(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


def without_early_stop(model: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return once(model, x)


def nested(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: once(model, x).sin() * 2, x, use_reentrant=False)


def offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


HOW = {call.__name__: call for call in (once, without_early_stop, nested, offloaded)}


class Within(nn.Module):
    """Calls a model under saved-tensor hooks, with an input that needs a gradient itself."""

    def __init__(self, model: nn.Module, how: str, is_float: bool):
        super().__init__()
        self.model, self.how = model, HOW[how]
        self.scale = nn.Parameter(torch.tensor(1.3)) if is_float else None

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.model, x if self.scale is None else (x * self.scale).tanh())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_rows_and_clipped_sum_under_saved_tensor_hooks_match_one_backward_per_example(case, how):
    inner, x = CASES[case]()
    model = Within(inner, how, x.is_floating_point())
    rows = one_backward_per_example(model, x, losses_of)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    assert_jacobian_equals_rows(tape.jacobian(losses, verify=True), rows)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    with Tape(trained, others, num_examples=len(x)) as tape:
        losses = losses_of(model, x)

    def clip(jacobian: tp.Jacobian, group: str) -> dict[str, Tensor]:
        return jacobian.weighted_sum(1 / (1 + jacobian.squared_norms().sqrt()))

    total = flat(tape.clipped_sum(losses, {"all": [*trained]}, clip, memory_budget=1e-9), 0)
    torch.testing.assert_close(total, rows.T @ (1 / (1 + rows.norm(dim=1))), rtol=1e-8, atol=1e-9)
