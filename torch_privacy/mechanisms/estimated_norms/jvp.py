# SPDX-License-Identifier: Apache-2.0
"""Computes J v for directions v of the parameters from a vector of losses and the model's own forward.

There are two methods, each for a batch of directions (vmap) or for one direction after the other:

* forward mode: the model's forward is repeated with the directions as tangents of its parameters, which gives the
  tangents of its outputs; the losses, as a function of the outputs alone, are then differentiated by the second method.
  One after the other, directions can share the values of the forward;
* double vjp: the gradient of ``u · losses`` is linear in u, and the derivative in u of its product with v is J v.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from ...jacobian.recording.calls import edge_of
from ...ops.tangents import FastTangents
from ...support.model_state import Versions
from ...support.random_state import RandomState
from ...support.torch_modes import tensors_in
from .shared_forward import SharedForward

# name -> (g, *shape): g directions; -> (n, g)
Project = Callable[[Mapping[str, Tensor]], Tensor]


class BatchingMode(Enum):
    """Modes of processing several directions."""

    SHARED = "one direction after the other, sharing the forward"
    TOGETHER = "directions together"
    EACH = "one direction after the other"


@dataclass
class ForwardCall:
    """One forward call of the model in the user's loop, which can be repeated."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random_state: RandomState | None  # before the forward; None if the forward need not be repeated
    edges: list[GradientEdge] = field(default_factory=list)  # of the outputs that losses can depend on
    sizes: list[int] = field(default_factory=list)  # numbers of entries of these outputs
    positions: list[int] = field(default_factory=list)  # of these outputs among the leaves of the whole output
    prefetched: list[dict[int, Tensor]] = field(default_factory=list)  # by group of directions: position -> tangents
    shared: SharedForward | None = None  # while directions share it
    mean_entries: float = 0.0  # of the shared forward's values

    def __post_init__(self) -> None:
        self._versions = Versions(tensors_in((self.args, self.kwargs)))

    def record_output(self, output: Any) -> list[tuple[GradientEdge, torch.Size]]:
        """Records the graph edges of the output's tensors; returns edges and shapes."""
        leaves = tree_leaves(output)
        self.positions = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.grad_fn is not None]
        outputs = [leaves[k] for k in self.positions]
        self.edges, self.sizes = [edge_of(t) for t in outputs], [t.numel() for t in outputs]
        return [(edge, t.shape) for edge, t in zip(self.edges, outputs, strict=True)]

    def prefetch_tangents(
        self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], batching: BatchingMode
    ) -> None:
        """Computes and keeps the outputs' tangents along g directions before the forward, while no graph takes memory.

        Raises:
            RuntimeError: the forward changes its input in place, and cannot be repeated.
        """
        tangents = self.tangents(v, parameters, batching)
        self.prefetched.append(dict(zip(self.positions, tangents, strict=True)))
        self._check_versions()

    def tangents(
        self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], batching: BatchingMode
    ) -> list[Tensor]:
        """Returns the outputs' tangents, (g, *shape) each, along g directions of the parameters."""
        self._check_versions()
        assert self.random_state is not None
        detached = {name: p.detach() for name, p in parameters.items()}
        after = RandomState()
        try:
            with torch.no_grad(), differentiable_twice(self.model), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch when it loads its forward mode
                # what sharing left when it failed is not for the modes that are tried next
                self.shared = (self.shared or SharedForward()) if batching is BatchingMode.SHARED else None
                if batching is BatchingMode.TOGETHER:
                    self.random_state.restore()
                    return list(vmap(lambda one: jvp(self._outputs, (detached,), (one,))[1], randomness="same")(v))
                count = len(next(iter(v.values())))
                each = [self._tangents_along({name: d[j] for name, d in v.items()}, detached) for j in range(count)]
                return [torch.stack(tangents) for tangents in zip(*each, strict=True)]
        finally:
            after.restore()

    def free_shared(self) -> None:
        """Frees the values that directions shared, after the last direction."""
        if self.shared is not None:
            self.mean_entries, self.shared = self.shared.entries_per_op, None

    def _check_versions(self) -> None:
        if not self._versions.are_current():
            raise RuntimeError("the forward changed its input in place, and cannot be repeated")

    def _tangents_along(self, v: Mapping[str, Tensor], detached: Mapping[str, Tensor]) -> list[Tensor]:
        assert self.random_state is not None
        self.random_state.restore()
        sharing = nullcontext() if self.shared is None else self.shared.along(v.values())
        with forward_ad.dual_level(), sharing, FastTangents():
            outputs = self._outputs({name: forward_ad.make_dual(p, v[name]) for name, p in detached.items()})
            pairs = [forward_ad.unpack_dual(y) for y in outputs]
            return [torch.zeros_like(y) if tangent is None else tangent for y, tangent in pairs]

    def _outputs(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = tree_leaves(functional_call(self.model, dict(parameters), self.args, self.kwargs))
        if not self.edges:  # before the forward it is unknown which outputs the losses can depend on
            self.positions = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        return tuple(leaves[k] for k in self.positions)


@contextmanager
def differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Runs attention and recurrent layers by backends that have a forward mode and a double backward."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    backends: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn] if recurrent else []
    before = [backend.enabled for backend in backends]
    try:
        for backend in backends:
            backend.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for backend, enabled in zip(backends, before, strict=True):
            backend.enabled = enabled


def forward_mode(
    losses: Tensor, parameters: Mapping[str, Tensor], calls: Sequence[ForwardCall], batching: BatchingMode
) -> Project:
    """Returns J v through the model's own forward, which is repeated for every call of the result."""
    edges = [edge for call in calls for edge in call.edges]
    if not edges:
        raise RuntimeError("the losses were not computed from a tensor that model(...) returned")
    gradients, u = _linear_in_u(losses, edges)

    def project(v: Mapping[str, Tensor]) -> Tensor:
        tangents = [t for call in calls if call.edges for t in call.tangents(v, parameters, batching)]
        return _derivative_in_u(gradients, u, tangents, batching)

    return project


def project_prefetched(losses: Tensor, calls: Sequence[ForwardCall], batching: BatchingMode) -> Iterator[Tensor]:
    """Yields J v, (n, g), for every group of directions with prefetched tangents."""
    gradients, u = _linear_in_u(losses, [edge for call in calls for edge in call.edges])
    for group in range(len(calls[0].prefetched)):
        tangents = [call.prefetched[group][k] for call in calls for k in call.positions]
        yield _derivative_in_u(gradients, u, tangents, batching)


def double_vjp(
    losses: Tensor, parameters: Mapping[str, Tensor], calls: Sequence[ForwardCall], batching: BatchingMode
) -> Project:
    """Returns J v from the graph of the losses alone, for any computation of the losses."""
    gradients, u = _linear_in_u(losses, list(parameters.values()))
    return lambda v: _derivative_in_u(gradients, u, [v[name] for name in parameters], batching)


def _linear_in_u(losses: Tensor, inputs: Sequence[Any]) -> tuple[list[Tensor | None], Tensor]:
    """Returns the gradients of ``u · losses``, with a graph, and u."""
    u = torch.ones_like(losses, requires_grad=True)
    return list(torch.autograd.grad(losses, inputs, u, create_graph=True, allow_unused=True)), u


def _derivative_in_u(
    gradients: Sequence[Tensor | None], u: Tensor, v: Sequence[Tensor], batching: BatchingMode
) -> Tensor:
    """Returns (n, g): the derivative in u of the product of the gradients with each direction."""
    count = len(v[0])
    pairs = [(g, d.to(g.dtype)) for g, d in zip(gradients, v, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return u.new_zeros(len(u), count)
    heads, directions = [g for g, _ in pairs], [d for _, d in pairs]
    if batching is BatchingMode.TOGETHER:
        (columns,) = torch.autograd.grad(heads, u, directions, retain_graph=True, is_grads_batched=True)
    else:
        each = zip(*directions, strict=True)
        columns = torch.stack([torch.autograd.grad(heads, u, one, retain_graph=True)[0] for one in each])
    return columns.mT


@dataclass(frozen=True)
class Strategy:
    """One method for J v: (losses, parameters, forward calls) -> a function of the directions."""

    prepare: Callable[..., Project]
    batching: BatchingMode

    @property
    def repeats_forward(self) -> bool:
        """True if the model's forward is repeated."""
        return self.prepare is forward_mode

    def __call__(self, losses: Tensor, parameters: Mapping[str, Tensor], calls: Sequence[ForwardCall]) -> Project:
        return self.prepare(losses, parameters, calls, self.batching)


STRATEGIES = {
    f"{name}, {batching.value}": Strategy(prepare, batching)
    for name, prepare, modes in (
        ("forward mode", forward_mode, BatchingMode),
        ("double vjp", double_vjp, (BatchingMode.TOGETHER, BatchingMode.EACH)),
    )
    for batching in modes
}
