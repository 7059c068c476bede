# SPDX-License-Identifier: Apache-2.0
"""J v for directions v of the parameters, where all there is is a vector of losses and the model's own forward.

Two ways, either for several directions together (vmap) or for one after the other:

* forward mode: the model's forward runs again with the directions as tangents of its parameters, which gives those of
  its outputs; ``losses`` as a function of the outputs alone then takes the second way. One after the other, directions
  can share what none of them enters;
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

from .._replay import RandomState
from ..ops.recurrent_tangents import FastTangents
from .shared_forward import SharedForward

# name -> (g, *shape): g directions; -> (n, g)
Project = Callable[[Mapping[str, Tensor]], Tensor]


class Manner(Enum):
    """How several directions are taken."""

    SHARED = "one direction after the other, sharing the forward"
    TOGETHER = "directions together"
    EACH = "one direction after the other"


@dataclass
class Run:
    """One forward of the model in the user's loop, which can be made again."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random_state: RandomState | None  # as it was before the forward; None where it need not be made again
    edges: list[GradientEdge] = field(default_factory=list)  # of the outputs that losses can depend on
    sizes: list[int] = field(default_factory=list)  # their numbers of entries
    places: list[int] = field(default_factory=list)  # and their numbers among the leaves of the output
    ahead: list[dict[int, Tensor]] = field(default_factory=list)  # for groups of directions: place -> tangents
    shared: SharedForward | None = None  # while directions share it
    mean_entries: float = 0.0  # of its values

    def __post_init__(self) -> None:
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        self._versions = [(t, t._version) for t in tensors]

    def ended(self, output: Any) -> list[tuple[GradientEdge, torch.Size]]:
        """Note where the output's tensors hang in the graph; gives that and their shapes."""
        leaves = tree_leaves(output)
        self.places = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.grad_fn is not None]
        outputs = [leaves[k] for k in self.places]
        self.edges, self.sizes = [edge_of(t) for t in outputs], [t.numel() for t in outputs]
        return [(edge, t.shape) for edge, t in zip(self.edges, outputs, strict=True)]

    def push_ahead(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], manner: Manner) -> None:
        """Keep the tangents of all outputs along g directions, before the forward: no graph stands beside their making.

        Raises:
            RuntimeError: the forward changes its input in place, and cannot be made twice.
        """
        tangents = self.push(v, parameters, manner)
        self.ahead.append(dict(zip(self.places, tangents, strict=True)))
        self._check_versions()

    def push(self, v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], manner: Manner) -> list[Tensor]:
        """Tangents (g, *shape) of the outputs along g directions of the parameters."""
        self._check_versions()
        assert self.random_state is not None
        own = {name: p.detach() for name, p in parameters.items()}
        after = RandomState()
        try:
            with torch.no_grad(), differentiable_twice(self.model), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, as it loads its forward mode
                if manner is Manner.TOGETHER:
                    self.random_state.restore()
                    return list(vmap(lambda one: jvp(self._outputs, (own,), (one,))[1], randomness="same")(v))
                if manner is Manner.SHARED:
                    self.shared = self.shared or SharedForward()
                count = len(next(iter(v.values())))
                each = [self._push_one({name: d[j] for name, d in v.items()}, own) for j in range(count)]
                return [torch.stack(tangents) for tangents in zip(*each, strict=True)]
        finally:
            after.restore()

    def forget(self) -> None:
        """No more directions are coming: give back the memory that they shared."""
        if self.shared is not None:
            self.mean_entries, self.shared = self.shared.entries_per_op, None

    def _check_versions(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError("the forward changed its input in place, and cannot be made again")

    def _push_one(self, v: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[Tensor]:
        assert self.random_state is not None
        self.random_state.restore()
        sharing = nullcontext() if self.shared is None else self.shared.along(v.values())
        with forward_ad.dual_level(), sharing, FastTangents():
            outputs = self._outputs({name: forward_ad.make_dual(p, v[name]) for name, p in own.items()})
            pairs = [forward_ad.unpack_dual(y) for y in outputs]
            return [torch.zeros_like(y) if tangent is None else tangent for y, tangent in pairs]

    def _outputs(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = tree_leaves(functional_call(self.model, dict(parameters), self.args, self.kwargs))
        if not self.edges:  # the forward is still to come: which outputs the losses can depend on is not known
            self.places = [k for k, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        return tuple(leaves[k] for k in self.places)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor that requires a gradient hangs in the graph."""
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


@contextmanager
def differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers by backends that have a forward mode and a backward of their backward."""
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


def forward_mode(losses: Tensor, parameters: Mapping[str, Tensor], runs: Sequence[Run], manner: Manner) -> Project:
    """J v through the model's own forward, made again once for every call."""
    edges = [edge for run in runs for edge in run.edges]
    if not edges:
        raise RuntimeError("the losses were not computed from a tensor that model(...) gave")
    gradients, u = _linear_in_u(losses, edges)

    def project(v: Mapping[str, Tensor]) -> Tensor:
        pushed = [t for run in runs if run.edges for t in run.push(v, parameters, manner)]
        return _against(gradients, u, pushed, manner)

    return project


def against_ahead(losses: Tensor, runs: Sequence[Run], manner: Manner) -> Iterator[Tensor]:
    """J v (n, g) for every group of directions along which tangents were pushed ahead."""
    gradients, u = _linear_in_u(losses, [edge for run in runs for edge in run.edges])
    for number in range(len(runs[0].ahead)):
        yield _against(gradients, u, [run.ahead[number][k] for run in runs for k in run.places], manner)


def double_vjp(losses: Tensor, parameters: Mapping[str, Tensor], runs: Sequence[Run], manner: Manner) -> Project:
    """J v from the graph of the losses alone, whatever it was made by."""
    gradients, u = _linear_in_u(losses, list(parameters.values()))
    return lambda v: _against(gradients, u, [v[name] for name in parameters], manner)


def _linear_in_u(losses: Tensor, inputs: Sequence[Any]) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of ``u · losses``, with a graph of their own."""
    u = torch.ones_like(losses, requires_grad=True)
    return list(torch.autograd.grad(losses, inputs, u, create_graph=True, allow_unused=True)), u


def _against(gradients: Sequence[Tensor | None], u: Tensor, v: Sequence[Tensor], manner: Manner) -> Tensor:
    """(n, g): derivative in u of the product of gradients and each direction."""
    count = len(v[0])
    pairs = [(g, d.to(g.dtype)) for g, d in zip(gradients, v, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return u.new_zeros(len(u), count)
    heads, directions = [g for g, _ in pairs], [d for _, d in pairs]
    if manner is Manner.TOGETHER:
        (columns,) = torch.autograd.grad(heads, u, directions, retain_graph=True, is_grads_batched=True)
    else:
        each = zip(*directions, strict=True)
        columns = torch.stack([torch.autograd.grad(heads, u, one, retain_graph=True)[0] for one in each])
    return columns.mT


@dataclass(frozen=True)
class Way:
    """One way to J v: (losses, parameters, runs of the model) -> a function of the directions."""

    prepare: Callable[..., Project]
    manner: Manner

    @property
    def needs_runs(self) -> bool:
        """Whether the model's forward is made again."""
        return self.prepare is forward_mode

    def __call__(self, losses: Tensor, parameters: Mapping[str, Tensor], runs: Sequence[Run]) -> Project:
        return self.prepare(losses, parameters, runs, self.manner)


WAYS = {
    f"{name}, {manner.value}": Way(prepare, manner)
    for name, prepare, manners in (
        ("forward mode", forward_mode, Manner),
        ("double vjp", double_vjp, (Manner.TOGETHER, Manner.EACH)),
    )
    for manner in manners
}
