# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows must run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import torch
from cases import Calls, losses_of
from oracle import assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian
from torch import Tensor

from torch_privacy.ops import OPS, AnyLayout, Op, Use
from torch_privacy.ops._base import in_sum_dtype
from torch_privacy.ops.dense import Rows
from torch_privacy.ops.elementwise import sum_to_weight

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_op_of_the_documentation_is_exact(monkeypatch):
    imported = [Iterator, dataclass, torch, Tensor, Op, Use, in_sum_dtype, Rows, sum_to_weight]
    names = {thing.__name__: thing for thing in imported} | {"AnyLayout": AnyLayout}
    (block,) = (block for block in python_blocks("docs/jacobian.md") if "RECORDERS" in block)
    exec(block, names)
    for function, recorder in names["RECORDERS"].items():
        monkeypatch.setitem(OPS, function, recorder)
    fallback = Mock(side_effect=AssertionError("the op's own rule was passed over"))
    monkeypatch.setattr("torch_privacy._tape.replay", fallback)
    model, x = Calls(lambda m, x: torch.lerp(x, m.p, 0.3), p=torch.randn(4)), torch.randn(5, 6, 4)
    rows = one_backward_per_example(model, x, losses_of, list(x.split(1)))
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)


def test_example_of_the_readme_prints_its_epsilon(capsys):
    torch.set_default_dtype(torch.float32)
    (block,) = python_blocks("README.md")
    exec(block, {})
    assert re.fullmatch(r"epsilon in \[1\.99\d, (1\.99\d|2\.000)\] at delta = 1e-05 \(.*\)\n", capsys.readouterr().out)
