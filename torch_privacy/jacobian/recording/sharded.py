# SPDX-License-Identifier: Apache-2.0
"""Records ops on the distributed tensors of a tensor-parallel model, each as this rank runs it on its own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...ops import Use
from ...support.model_state import Versions
from ..parallel.shards import PartsOfCall, WayBack, is_distributed, is_internal, on_this_rank, splits_positions
from .calls import RunCall, uses_by_fallback, uses_by_rule
from .functions import tensors_among
from .tensors import KnownTensors

_PLAIN = {Tensor, nn.Parameter, nn.Buffer}  # types of tensors that are whole on this rank


class ShardedTensors:
    """The distributed tensors of one forward.

    Args:
        known: the tensors of the forward.
        parameters: name -> parameter.
    """

    def __init__(self, known: KnownTensors, parameters: Mapping[str, Tensor]):
        self._known, self._parameters = known, parameters
        self.meshes: list[Any] = []  # over which the tensors of some op were distributed
        self.splits_positions = False  # attention runs on a part of every example's positions
        self._inputs: list[Versions] = []  # of the model, at each call
        self._pieces: dict[int, tuple[int, Tensor]] = {}  # id of a distributed weight -> its version, this rank's part

    def note_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Takes the tensors that the model is called with."""
        self._inputs.append(Versions(tensors))

    def unchanged_inputs(self) -> list[Tensor]:
        """Returns the tensors that the model was called with, except for those changed in place since."""
        return [t for inputs in self._inputs for t in inputs.unchanged()]

    def is_internal(self, func: Callable, values: tuple, frame: Any) -> bool:
        """True for calls by which torch moves shards about. Also notes over which mesh tensors are distributed."""
        tensors = tensors_among(values)
        for t in tensors:
            if is_distributed(t) and t.device_mesh not in self.meshes:  # pyright: ignore[reportAttributeAccessIssue]
                self.meshes.append(t.device_mesh)  # pyright: ignore[reportAttributeAccessIssue]
        self.splits_positions |= splits_positions(func, tensors)
        return is_internal(frame)

    def are_met(self, *tensors: Tensor) -> bool:
        """True unless all of the tensors are whole on this rank."""
        return not all(type(t) in _PLAIN for t in tensors)

    def uses(self, run: RunCall) -> list[tuple[Tensor, tuple[Use, ...]]]:
        """Returns the uses of a call with distributed tensors, each of this rank's part of the weight."""
        known, result = self._known, run.result
        call = PartsOfCall(run.func, known.all_names(run.weights), run.data, run.results[0])
        pieces = {id(t): self.piece(t) for t in run.weights}
        whole = {id(piece): t for piece, t in zip(pieces.values(), run.weights, strict=True)}
        args, kwargs = call.localized((run.args, run.kwargs), pieces)
        y = tree_map(lambda t: on_this_rank(t) if isinstance(t, Tensor) else t, result)  # of ordinary type
        here = replace(run, args=args, kwargs=kwargs, weights=[*pieces.values()], result=y)
        uses = uses_by_rule(here, known)
        if uses is not None:
            return [(result, tuple(call.use(use, whole[id(use.weight)], args, kwargs) for use in uses))]
        if not call.is_replicated or run.in_place:
            return []
        return uses_by_fallback(here)

    def piece(self, weight: Tensor) -> Tensor:
        """Returns this rank's part of a weight, as a source; an ordinary weight is whole."""
        if not is_distributed(weight):
            return weight
        version, piece = self._pieces.get(id(weight), (None, weight))
        if version != weight._version:
            sources = self._known.sources
            source = sources[id(weight)]
            piece = on_this_rank(weight).detach().requires_grad_(weight.requires_grad)
            self._pieces[id(weight)] = weight._version, piece
            leaves = tuple(self._parameters[name] for name in source.names)
            way_back = None if source.direct else WayBack(weight, leaves)
            sources[id(piece)] = replace(source, tensor=piece, version=piece._version, way_back=way_back)
        return piece
