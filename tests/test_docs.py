# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows must run."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases import Calls, losses_of
from oracle import assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian
from torch import Tensor

import torch_privacy as tp
from torch_privacy.ops import OPS

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def register_ops_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> dict:
    (block,) = (block for block in python_blocks("docs/jacobian.md") if "RECORDERS" in block)
    names: dict = {"__name__": "an_op_of_ones_own"}
    exec(block, names)
    for function, recorder in names["RECORDERS"].items():
        monkeypatch.setitem(OPS, function, recorder)
    return names


LERPS = {  # whether the rule of the documentation knows the form
    "by a number": (True, lambda m, x: torch.lerp(x, m.p, 0.3)),
    "by keyword": (True, lambda m, x: x.lerp(end=m.p, weight=0.3)),
    "by a tensor": (True, lambda m, x: torch.lerp(x, m.p, x.sigmoid())),
    "from a parameter": (False, lambda m, x: torch.lerp(m.p, x, 0.3)),
    "by a parameter": (False, lambda m, x: torch.lerp(x, x.sin(), m.p)),
    "to a parameter by itself": (False, lambda m, x: torch.lerp(x, m.p, m.p)),
}


@pytest.mark.parametrize("form", LERPS)
def test_op_of_the_documentation_is_exact(form, monkeypatch):
    register_ops_of_the_documentation(monkeypatch)
    known, forward = LERPS[form]
    if known:
        fallback = Mock(side_effect=AssertionError("the op's own rule was passed over"))
        monkeypatch.setattr("torch_privacy._tape.replay", fallback)
    model, x = Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4)
    rows = one_backward_per_example(model, x, losses_of, list(x.split(1)))
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)


def test_op_of_the_documentation_notices_a_change_in_place(monkeypatch):
    register_ops_of_the_documentation(monkeypatch)

    def forward(m: Calls, x: Tensor) -> Tensor:
        scale = x.sigmoid().detach()
        y = torch.lerp(torch.zeros_like(x), m.p, scale)
        scale.mul_(2)
        return y

    with pytest.raises(tp.Refused, match="an input of 'lerp' was changed in place"):
        recorded_jacobian(Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4), losses_of)


class Tilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x)
        return x * p

    @staticmethod
    def backward(ctx, b):
        (x,) = ctx.saved_tensors
        return None, (b * x).sum((0, 1))


def test_function_of_ones_own_is_taken_as_the_documentation_says(monkeypatch):
    @torch.library.custom_op("torch_privacy_tests::tilt", mutates_args=())
    def tilt(x: Tensor, p: Tensor) -> Tensor:
        return x * p

    tilt.register_autograd(Tilt.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    x = torch.randn(5, 6, 4)
    with pytest.raises(tp.Refused, match="parameter 'p' reaches the losses by a path"):
        recorded_jacobian(Calls(lambda m, x: Tilt.apply(x, m.p), p=torch.randn(4)), x, losses_of)
    model = Calls(lambda m, x: tilt(x, m.p), p=torch.randn(4))
    rows = one_backward_per_example(model, x, losses_of, list(x.split(1)))
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)
    recorder = Mock(wraps=OPS[torch.mul])
    monkeypatch.setitem(OPS, torch.ops.torch_privacy_tests.tilt.default, recorder)
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)
    recorder.assert_called_once()


def test_example_of_the_readme_prints_its_epsilon(capsys):
    torch.set_default_dtype(torch.float32)
    (block,) = python_blocks("README.md")
    exec(block, {})
    assert re.fullmatch(r"epsilon in \[1\.99\d, (1\.99\d|2\.000)\] at delta = 1e-05 \(.*\)\n", capsys.readouterr().out)
