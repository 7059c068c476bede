# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows must run."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from oracle import assert_exact, recorded_jacobian
from parts import Calls, Hidden, losses_of
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
        monkeypatch.setattr("torch_privacy.jacobian.recorder.replay", fallback)
    assert_exact(Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4))


def test_op_of_the_documentation_notices_a_change_in_place(monkeypatch):
    register_ops_of_the_documentation(monkeypatch)

    def forward(m: Calls, x: Tensor) -> Tensor:
        scale = x.sigmoid().detach()
        y = torch.lerp(torch.zeros_like(x), m.p, scale)
        scale.mul_(2)
        return y

    with pytest.raises(tp.Refused, match="an input of 'lerp' was changed in place"):
        recorded_jacobian(Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4), losses_of)


def test_function_of_ones_own_is_taken_as_the_documentation_says(monkeypatch):
    @torch.library.custom_op("torch_privacy_tests::hidden", mutates_args=())
    def hidden(x: Tensor, w: Tensor) -> Tensor:
        return x * w * w

    hidden.register_autograd(Hidden.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    x = torch.randn(5, 3)
    with pytest.raises(tp.Refused, match="parameter 'w' reaches the losses by a path"):
        recorded_jacobian(Calls(lambda m, x: Hidden.apply(x, m.w), w=torch.randn(3)), x, losses_of)
    model = Calls(lambda m, x: hidden(x, m.w), w=torch.randn(3))
    assert_exact(model, x)
    recorder = Mock(return_value=iter(()))  # knows nothing after all
    monkeypatch.setitem(OPS, torch.ops.torch_privacy_tests.hidden.default, recorder)
    assert_exact(model, x)
    recorder.assert_called_once()


EPSILON = r"epsilon in \[1\.99\d, (1\.99\d|2\.000)\] at delta = 1e-05 \(.*\)\n"
PAGES = {
    "README.md": EPSILON,
    "docs/accounting.md": "",
    "docs/data.md": r"29305 3256 2\n",
    "docs/gep.md": r"epsilon in \[1\.729, 1\.730\] at delta = 1e-05 \(.*\)\nGEP: .*\n",
    "docs/index.md": EPSILON,
    "docs/jacobian.md": "",
    "docs/search.md": r"one run 2\.57\nlogarithmic 3\.76\ngeometric 3\.99\npoisson 5\.21\n",
    "docs/training.md": "",
}


@pytest.mark.parametrize("page", PAGES)
def test_first_example_on_the_page_runs(page, capsys):
    """Where it is a part of a script, the rest is here."""
    torch.set_default_dtype(torch.float32)
    x, y, model = torch.randn(1000, 5), torch.randint(2, (1000,)), torch.nn.Linear(5, 2)
    rest = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": x, "y": y}
    rest |= {"dataset": torch.utils.data.TensorDataset(x, y), "F": torch.nn.functional, "tp": tp}
    block, *_ = python_blocks(page)
    exec(block.replace("num_steps=2000", "num_steps=20"), rest)
    assert re.fullmatch(PAGES[page], capsys.readouterr().out)
