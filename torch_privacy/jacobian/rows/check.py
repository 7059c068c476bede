# SPDX-License-Identifier: Apache-2.0
"""Checks the engine on the user's own batch: a sum of its rows must equal the gradient of an ordinary backward."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...support.own_draws import randn
from ...support.torch_modes import backward_number, product_rounding
from ...support.validate import Refused
from ..layouts.codes import Codes, fresh_generator
from ..layouts.known import Merging
from ..parallel.agreement import ALONE, Peers
from ..parallel.shards import local_gradient
from .blocks import OuterProduct, outer_product
from .operator import Jacobian

DIRECTIONS = 2  # random ones, on which each gradient is projected


class ProjectedSum:
    """The gradient of the losses with random weights, by an ordinary backward, projected on a few random directions.

    Args:
        parameters: all recorded ones.
        weights: (rows,) random signed powers of two.
        leaves: the parameters in the graph, if ``parameters`` are this rank's parts of them.

    Attributes:
        leaves: for which a backward must compute gradients, while this is `watching` it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], weights: Tensor, leaves: Mapping[str, Tensor] | None = None):
        self.parameters, self.weights = parameters, weights
        self.leaves = [*(parameters if leaves is None else leaves).values()]
        self.directions = {name: [random_direction(p) for _ in range(DIRECTIONS)] for name, p in parameters.items()}
        self.products = {name: [0.0] * DIRECTIONS for name in parameters}
        self._backward = -1  # number of the one that is watched

    @contextmanager
    def watching(self, losses: Tensor) -> Iterator[None]:
        """Reads the gradients that a backward of the losses within the ``with`` block has for leaves; frees each.

        Other backwards that run inside of it, for rows or in a part that is made again, are passed over.
        """
        assert losses.grad_fn is not None
        handles = [
            losses.grad_fn.register_prehook(self._begin),
            *(
                leaf.register_hook(partial(self._read, name, leaf))
                for name, leaf in zip(self.directions, self.leaves, strict=True)
                if leaf.requires_grad
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, gradients: tuple[Tensor, ...]) -> None:
        if self._backward < 0:  # others come later
            self._backward = backward_number()

    def _read(self, name: str, leaf: Tensor, g: Tensor) -> Tensor | None:
        if backward_number() != self._backward:
            return None
        local = local_gradient(g, leaf)
        if local is not None:
            self.products[name] = [float(outer_product(v, local.detach())) for v in self.directions[name]]
        return g.new_zeros(()).expand_as(g) if type(g) is Tensor and g.layout is torch.strided else None

    @classmethod
    def of(
        cls,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        merging: Merging | None,
        exponents: int,
        leaves: Mapping[str, Tensor] | None = None,
    ) -> ProjectedSum:
        """Makes the backward; the graph stays."""
        weights = Codes(len(losses) if merging is None else merging.count, exponents).cotangent(0).to(losses)
        native, c = cls(parameters, weights, leaves), weights
        if merging is not None:
            c = weights[merging.assignment.to(losses.device)] * merging.weights().to(losses)
        with native.watching(losses):
            torch.autograd.grad(losses, native.leaves, c, retain_graph=True, allow_unused=True)
        return native


class RowCheck:
    """Compares the sum of all rows with the ordinary gradient by random projections, so that neither is stored.

    Args:
        native: with a weight for each row.
        dtypes: the floating-point types between losses and parameters.
        peers: ranks that have parts of the same parameters.
    """

    def __init__(self, native: ProjectedSum, dtypes: Collection[torch.dtype], peers: Peers = ALONE):
        self._peers, self._dtypes = peers, dtypes
        products = product_rounding(native.weights.device)
        self._native, self._tolerance = native, max(products, *(torch.finfo(dtype).eps for dtype in dtypes)) ** 0.5
        n = float(native.weights.abs().sum())
        self._floors = {name: n * _floor(p, dtypes) for name, p in native.parameters.items()}
        self._differences = {name: [-product for product in products] for name, products in native.products.items()}
        self._squares: Tensor | float = 0.0

    def fresh(self) -> RowCheck:
        """Returns the same check, before any rows were added."""
        return RowCheck(self._native, self._dtypes, self._peers)

    @property
    def directions(self) -> list[dict[str, OuterProduct]]:
        """Returns the directions that the rows' sum is projected on, by name."""
        return [{name: some[k] for name, some in self._native.directions.items()} for k in range(DIRECTIONS)]

    @torch.no_grad()
    def add(self, jacobian: Jacobian) -> None:
        """Adds the rows of some of the parameters; each parameter must be added once."""
        jacobian.check_equal()
        self._squares = self._squares + jacobian.squared_norms()
        for k, directions in enumerate(self.directions):
            for name, product in jacobian.products_of_sum(self._native.weights, directions):
                self._differences[name][k] += float(product)

    def conclude(self) -> None:
        """Raises ``Refused`` unless all rows agree with the native gradient, on all ranks that have parts of it."""
        self._peers.refuse(self._finding())

    def _finding(self) -> str | None:
        assert isinstance(self._squares, Tensor)
        weights = self._native.weights
        scale = float((weights.abs() * self._squares.sqrt().to(weights)).sum())
        if not math.isfinite(scale):
            return None
        most = {name: self._tolerance * scale + floor for name, floor in self._floors.items()}
        wrong = [name for name, some in self._differences.items() if not math.hypot(*some) <= most[name]]
        if not wrong:
            return None
        return (
            f"tape: the rows of parameter {', '.join(map(repr, wrong))} do not add up to the native gradient. "
            "This is a bug in torch_privacy, or the model overrides a gradient (custom backward, gradient "
            "hook): freeze that part, and please report it."
        )


def random_direction(p: Tensor) -> OuterProduct:
    """Returns the factors of a random direction, seeded by the system: of p's first dimension, and of the others."""
    generator, dtype = fresh_generator(), torch.promote_types(p.dtype, torch.float32)
    shapes = torch.Size([*p.shape[:1], 1])[:1], p.shape[1:]
    factors = (randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    left, right = (factor.to(p.device, dtype) for factor in factors)
    return left, right


def _floor(p: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """Returns the length up to which a gradient may be lost: its squares underflow, or its entries do on the way."""
    infos = [torch.finfo(dtype) for dtype in {*dtypes, p.dtype}]
    for_sums = torch.finfo(torch.promote_types(p.dtype, torch.float32))
    entry = max(for_sums.smallest_normal**0.5, *(16 * info.smallest_normal * info.eps for info in infos))
    return p.numel() ** 0.5 * entry


class ProjectionsDiffer(Refused):
    """A sum of rows that disagrees with the projections of these rows."""


class ProjectionCheck:
    """Compares sums of rows by ordinary backwards with random projections of the rows: ``v·(Jᵀ c)`` is ``c·(J v)``.

    Args:
        v: name -> (g, *shape): some of the directions.
        projections: (n, g), the rows projected on these.
        norms: (n,), estimates that set the scale.
    """

    def __init__(self, v: Mapping[str, Tensor], projections: Tensor, norms: Tensor):
        self._v, self._projections, self._norms = v, projections, norms

    def compare(self, total: Mapping[str, Tensor], c: Tensor) -> None:
        """Raises unless the projections confirm the weighted sum ``total`` with weights c.

        Raises:
            Refused: the model's backward is not the derivative of its forward, is not linear, or is undefined.
        """
        self.judge(total, self.measure(total, c).tolist())

    def measure(self, total: Mapping[str, Tensor], c: Tensor) -> Tensor:
        """Returns (3,) what `judge` must know: the sum's length, the largest difference, and what it is relative to."""
        lengths = [torch.linalg.vector_norm(part).double().to(c.device) for part in total.values()]
        length = torch.stack(lengths).norm()
        ours = sum(torch.tensordot(v.flatten(1), total[name].flatten(), 1).to(c.device) for name, v in self._v.items())
        used = c != 0
        projections = torch.where(used[:, None], self._projections.to(c), 0)
        difference = (ours - c @ projections).abs().max()
        scale = length + torch.where(used, c * self._norms.to(c), 0).sum()
        return torch.stack([length, difference.double(), scale.double()])

    def judge(self, total: Mapping[str, Tensor], measured: Sequence[float]) -> None:
        """Raises as `compare` does."""
        length, difference, scale = measured
        if not math.isfinite(length) and not all(bool(part.isfinite().all()) for part in total.values()):
            raise Refused(
                "Sketched: the sum of the clipped gradients is not finite, and with one backward for all examples the "
                "example that caused it cannot be left out. Keep losses and their gradients finite, e.g. by "
                "log_softmax in place of log(softmax), or by clamping the model's inputs."
            )
        tolerance = max(torch.finfo(part.dtype).eps for part in (self._projections, *total.values())) ** 0.5
        if not difference <= tolerance * scale:
            raise ProjectionsDiffer(
                "Sketched: the model's ordinary gradient does not match its random projections. Possible causes: a "
                "custom backward or a gradient hook that is no derivative, a parameter used outside of model(...), or "
                "a forward that does not repeat. Remove it."
            )


def vjp(losses: Tensor, parameters: Mapping[str, Tensor], c: Tensor, *, retain_graph: bool) -> dict[str, Tensor]:
    """Returns the gradient of ``c · losses`` by name; zeros for parameters that the losses do not depend on."""
    grads = torch.autograd.grad(losses, list(parameters.values()), c, retain_graph=retain_graph, allow_unused=True)
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g.detach().clone() for (name, p), g in pairs}
