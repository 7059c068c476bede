# SPDX-License-Identifier: Apache-2.0
"""Sums of rows by ordinary backwards of the losses: to check the engine on the user's own batch, and to save memory.

A check compares the sum of all rows with the native gradient on random directions. Where memory allows nothing but
norms and products of a block, a second backward, with the factors as cotangent, computes its clipped sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...support.own_draws import randn
from ...support.torch_modes import backward_number, product_rounding
from ...support.validate import Refused
from ..layouts.codes import Codes, fresh_generator
from ..layouts.known import Merging
from ..parallel.ranks import ALONE, Peers
from ..parallel.shards import local_gradient
from ..recording.paths import RecordedGraph
from .blocks import Direction, OuterProduct, outer_product
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

    Attributes:
        is_conclusive: whether `conclude` could compare them, as it cannot where a row is not finite.
    """

    is_conclusive = False

    def __init__(self, native: ProjectedSum, dtypes: Collection[torch.dtype], peers: Peers = ALONE):
        self._peers = peers
        products = product_rounding(native.weights.device)
        self._is_half = torch.float16 in dtypes
        self._native, self._tolerance = native, max(products, *(torch.finfo(dtype).eps for dtype in dtypes)) ** 0.5
        n = float(native.weights.abs().sum())
        self._floors = {name: n * _floor(p, dtypes) for name, p in native.parameters.items()}
        self.begin()

    def begin(self) -> None:
        """Forgets the rows that were added."""
        self._differences = {n: [-product for product in some] for n, some in self._native.products.items()}
        self._squares: Tensor | float = 0.0

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
        self.is_conclusive = math.isfinite(scale)
        if not self.is_conclusive:
            return None
        most = {name: self._tolerance * scale + floor for name, floor in self._floors.items()}
        wrong = [name for name, some in self._differences.items() if not math.hypot(*some) <= most[name]]
        if not wrong:
            return None
        endless = [name for name in wrong if not all(map(math.isfinite, self._native.products[name]))]
        if endless:
            return (
                "tape: the gradients of the examples are finite, but with random weights they overflow in the "
                f"backward of the batch, so that those of parameter {', '.join(map(repr, endless))} cannot be checked. "
                "Compute in bfloat16 or float32, not in float16; or scale the losses down."
            )
        half = "Numbers too small for float16 may be lost: try bfloat16 or float32. Else this"
        return (
            f"tape: the rows of parameter {', '.join(map(repr, wrong))} do not add up to the native gradient. "
            f"{half if self._is_half else 'This'} is a bug in torch_privacy, or the model overrides a gradient "
            "(custom backward, gradient hook): freeze that part, and please report it."
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
        ours = sum(torch.tensordot(v, total[name], v.ndim - 1).to(c.device) for name, v in self._v.items())
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


class SumByBackward:
    """Computes the clipped sum of blocks of which nothing was kept, by a backward of the losses times the factors.

    Under saved-tensor hooks the user's code runs again in each backward, and nothing forces it to draw the same random
    numbers: the factors would be those of other rows. So the sums are confirmed by the rows' products with a random
    direction.

    Args:
        reached: the batch.
        cotangent: (n,) weight of each loss in its row.
        merging: which examples share a row, their mean.
        frees_graph: whether the backward frees the graph; then there can be only one.
    """

    def __init__(
        self, reached: RecordedGraph, cotangent: Tensor, merging: Merging | None, *, frees_graph: bool = False
    ):
        self._reached, self._cotangent, self._merging = reached, cotangent, merging
        self._names: list[str] = []
        self._factors: Tensor | None = None  # of the latest backward
        self._sums: dict[str, Tensor] = {}
        self._frees_graph = frees_graph
        self._fixed: Direction | None = None
        self._named: Sequence[Mapping[str, OuterProduct]] = []
        self._differences: list[tuple[str, Tensor, Tensor]] = []  # name, difference, lengths of the rows
        again = reached.recorder.log.saved_elsewhere
        self._confirming = {name: random_direction(p) for name, p in reached.parts.items()} if again else {}

    def project_on(self, fixed: Direction | None, named: Sequence[Mapping[str, OuterProduct]]) -> None:
        """Sets the directions, of any weight and by name, on which rows are projected before they are left out."""
        self._fixed, self._named = fixed, named

    @property
    def projects(self) -> bool:
        return bool(self._confirming or self._named or self._fixed)

    def directions(self, name: str, weight: Tensor) -> dict[Hashable, OuterProduct]:
        found: dict[Hashable, OuterProduct] = {id(of[name][0]): of[name] for of in self._named}
        if self._confirming:
            found[None] = self._confirming[name]
        if self._fixed is not None:
            found[self._fixed] = self._fixed(weight.shape, weight.device)
        return found

    def expect(self, name: str) -> None:
        self._names.append(name)

    def __call__(self, c: Tensor, name: str) -> Tensor:
        if self._factors is not c:
            if self._factors is not None and self._frees_graph:
                raise Refused(
                    "tape: under this memory budget the rows of a batch can be summed once, with one vector of factors."
                )
            self._factors, self._sums = c, self._backward(c)
        return self._sums.pop(name)

    def confirm(self, name: str, total: Tensor, product: Tensor, scale: Tensor) -> None:
        theirs = outer_product(self._confirming[name], total)
        self._differences.append((name, (theirs - product).abs(), scale))

    def conclude(self, squares: Tensor) -> None:
        """Raises ``Refused`` unless the sums are those of the rows (of these squared norms) that gave the factors.

        Rounding is relative to all parameters, because a gradient that is zero but for rounding has no size of its own.
        """
        if not self._differences or self._factors is None:
            return
        names, differences, scales = zip(*self._differences, strict=True)
        self._differences = []
        found = torch.stack([torch.stack(parts).double().cpu() for parts in (differences, scales)])
        factors, lengths = self._factors.to(squares).abs(), squares.nan_to_num(0.0, posinf=0.0).sqrt()
        most = self._reached.precision() ** 0.5 * max(float(found[1].norm()), float(factors @ lengths))
        wrong = [name for name, is_right in zip(names, (found[0] <= most).tolist(), strict=True) if not is_right]
        if wrong and math.isfinite(most):
            raise Refused(
                f"tape: a part under activation checkpointing, or another saved-tensor hook, gave other numbers in a "
                f"second backward, so that the sum of parameter {', '.join(map(repr, wrong))} is not that of the rows "
                "that were clipped. Nothing was released. Leave preserve_rng_state=True, its default, in checkpoint; "
                "or raise memory_budget in Performance, so that one backward is enough."
            )

    def _backward(self, c: Tensor) -> dict[str, Tensor]:
        c = c.to(self._cotangent)
        if self._merging is not None:
            c = c[self._merging.assignment.to(c.device)] * self._cotangent
        leaves = [self._reached.leaves[name] for name in self._names]
        if self._frees_graph:  # calls hold what a part under checkpointing is made again from
            self._reached.free_inputs()
        with self._reached.running_again():
            found = torch.autograd.grad(self._reached.losses, leaves, c, retain_graph=not self._frees_graph)
        return {
            name: g if type(g) is Tensor else cast(Tensor, local_gradient(g, leaf))
            for name, g, leaf in zip(self._names, found, leaves, strict=True)
        }
