# SPDX-License-Identifier: Apache-2.0
"""Runs ``torch.cond`` by the branch that is taken, in which each use of a parameter is recorded.

Run uncompiled, torch's own function drops the gradients of parameters that a branch uses without an argument for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cond(
    note: Callable[..., Any], pred: Tensor | bool, true_fn: Callable, false_fn: Callable, operands: Any = ()
) -> Any:
    """Returns the result of the branch that is taken."""
    return (true_fn if pred else false_fn)(*operands)


COMPOSED: dict[Callable, Callable] = {torch.ops.higher_order.cond: cond}
