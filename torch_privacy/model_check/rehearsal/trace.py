# SPDX-License-Identifier: Apache-2.0
"""Finds the module in which examples of a batch first affect each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...support.script_modules import takes_hooks
from ...support.torch_modes import tensors_in


class _ModuleCall:
    """One call of a module, with sums per example of those inputs and outputs that have a dimension for examples."""

    __slots__ = ("inputs", "kind", "name", "outputs")

    def __init__(self, name: str, kind: str, inputs: list[Tensor]):
        self.name, self.kind, self.inputs = name, kind, inputs
        self.outputs: list[Tensor] = []


class Trace:
    """Records the inputs and outputs of a model's modules in one run, as sums per example."""

    def __init__(self, model: nn.Module):
        self._model, self._count = model, 0
        self.calls: list[_ModuleCall] = []
        self._running: list[_ModuleCall] = []

    @contextmanager
    def recording(self, count: int) -> Iterator[None]:
        """Records the calls that are made inside the context, on a batch of ``count`` examples."""
        self._count = count
        names = {module: name for name, module in self._model.named_modules() if takes_hooks(module)}
        handles = [
            handle
            for module in names
            for handle in (
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            )
        ]
        self._names = names
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, kind = self._names.get(module, ""), type(module).__name__
        self._running.append(_ModuleCall(name, kind, self._sums((args, kwargs))))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running.pop()
        call.outputs = self._sums(output)
        self.calls.append(call)

    @torch.no_grad()
    def _sums(self, values: Any) -> list[Tensor]:
        tensors = [t for t in tensors_in(values) if t.layout is torch.strided]
        found = []
        for t in tensors:
            dims = [dim for dim, size in enumerate(t.shape) if size == self._count]
            if dims and not t.is_nested and not t.is_complex():
                rows = t.detach().movedim(dims[0], 0).reshape(self._count, -1).double()
                found.append(
                    (rows * torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)).sum(1).cpu()
                )
        return found

    def first_difference(self, other: Trace, kept: np.ndarray, places: np.ndarray, *, loose: bool) -> str:
        """Returns a sentence that says where examples first affect each other.

        ``kept`` are the kept examples' numbers in this trace, ``places`` those in the other.
        """
        tolerance = 1e-3 if loose else 1e-6

        def differ(one: list[Tensor], two: list[Tensor]) -> bool:
            return any(
                len(a) > kept.max() and len(b) > places.max() and not _is_close(a[kept], b[places], tolerance)
                for a, b in zip(one, two, strict=False)
            )

        if not self.calls:
            return "It happens outside of the model: in the loop, the loss or collate_fn."
        root = next((k for k, call in enumerate(self.calls) if call.name == ""), None)
        if root is not None and root < len(other.calls) and differ(self.calls[root].inputs, other.calls[root].inputs):
            return "It happens before the model: the inputs of model(...) differ already (loop or collate_fn)."
        for mine, theirs in zip(self.calls, other.calls, strict=False):
            if mine.name != theirs.name:
                return f"The forward calls other modules from {mine.name!r} ({mine.kind}) on."
            if differ(mine.outputs, theirs.outputs) and not differ(mine.inputs, theirs.inputs):
                return (
                    f"They are mixed in module {mine.name!r} ({mine.kind})."
                    if mine.name
                    else "They are mixed in the model's own forward."
                )
        return (
            "The model's outputs are the same: they are mixed in the loss (a mean over the batch, negatives from the "
            "batch, a broadcast of (n, 1) against (n,)), or in the backward pass."
        )


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.abs().nan_to_num(0).max()), equal_nan=True)
