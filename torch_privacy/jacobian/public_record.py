# SPDX-License-Identifier: Apache-2.0
"""The public ``record``: a tape for any module, which remembers the module's layouts between recordings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

from torch import Tensor, nn

from ..support.gathered_weights import GatheredWeights, sharded_modules
from ..support.model_state import ModelTensors, attribute_tensors
from ..support.notes import NOTES
from ..support.script_modules import takes_hooks
from ..support.torch_modes import UNCOMPILED
from ..support.validate import whole
from .layouts.known import Layouts
from .rows.operator import Jacobian
from .rows.streamed_sum import Clip
from .tape import Tape


class record:
    """Records every use of the model's trainable parameters inside the ``with`` block.

    The layouts that batches have had are remembered while the model exists, so that from the third batch on each one
    costs one backward.

    A model that ``fully_shard`` has sharded is recorded with the examples of one rank. Its weights are gathered here,
    which every rank must do, and freed by `jacobian` or `clipped_sum`, unless the graph is retained. If weights are
    computed from parameters, as in weight normalization, they are freed with the Jacobian: delete it before an update.

    Args:
        model: any module; its parameters with ``requires_grad`` are recorded. Buffers, frozen parameters and tensors
            that are plain attributes when the model is recorded first count as constants.
        num_examples: size of the batch, which shows which tensors can have a part for each example. By default it is
            read off the model's first input, along the dimension that held the examples of earlier batches, at first
            the first one. A wrong size costs time, and may let a model be refused.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> with record(model) as tape:
        ...     losses = model(torch.ones(2, 3)).flatten()
        >>> tape.jacobian(losses).squared_norms()
        tensor([4., 4.])
    """

    def __init__(self, model: nn.Module, num_examples: int | None = None):
        if num_examples is not None:
            whole("record", num_examples=num_examples)
        memory = NOTES.of(model, _ModelMemory)
        self._weights = _gathered(model)
        named = dict(model.named_parameters())
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        tensors = ModelTensors(trainable, {**frozen, **dict(model.named_buffers())}, memory.attributes.unchanged())
        self._tape = Tape(tensors.trained, tensors.constants, memory.layouts, num_examples)
        self._model, self._contexts = model, ExitStack()

    def __enter__(self) -> Self:
        if not self._tape.is_active:
            self._contexts.enter_context(UNCOMPILED)
            if takes_hooks(self._model):
                hook = self._model.register_forward_pre_hook(_InputHook(self._tape), with_kwargs=True, prepend=True)
                self._contexts.callback(hook.remove)
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)
        if not self._tape.is_active:
            self._contexts.close()
            if error[0] is not None:
                self._let_go()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the recorded parameters by name."""
        return self._tape.parameters

    @property
    def measured(self) -> bool:
        """Returns whether layouts had to be measured, by additional backwards."""
        return self._tape.measured

    def jacobian(
        self, losses: Tensor, *, retain_graph: bool = False, may_miss: Iterable[str] = (), verify: bool = False
    ) -> Jacobian:
        """Returns the Jacobian of the per-example losses in the recorded parameters.

        Args:
            losses: (n,) one loss per example, computed inside the ``with`` block; the graph is freed unless retained.
            retain_graph: keep the graph for further backwards.
            may_miss: names of parameters that the losses need not reach; their rows are then zero.
            verify: compare with native backwards if layouts had to be measured, as on the first batches.

        Returns:
            A ``Jacobian`` with n rows, detached from the graph.

        Raises:
            Refused: losses of another shape; a parameter that is reached past the recorded ops, or never; an output in
                which examples cannot be separated; an input changed in place since it was used; disagreement with
                a native backward.
        """
        keeper = None if self._weights is None or retain_graph else _Keeper(self._weights)  # lets go if this raises
        jacobian = self._tape.jacobian(losses, retain_graph=retain_graph, may_miss=may_miss, verify=verify)
        jacobian.keep(keeper)
        return jacobian

    def clipped_sum(
        self, losses: Tensor, groups: Mapping[str, Sequence[str]], clip: Clip | None, **options: Any
    ) -> dict[str, Tensor]:
        """Returns Σᵢ cᵢ row_i with factors group by group; arguments as of ``Tape.clipped_sum``."""
        try:
            return self._tape.clipped_sum(losses, groups, clip, **options)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Frees the weights that were gathered from shards."""
        if self._weights is not None:
            self._weights.let_go()


class _Keeper:
    """Keeps gathered weights while anything refers to it."""

    def __init__(self, weights: GatheredWeights):
        self._weights = weights

    def __del__(self) -> None:
        self._weights.let_go()


def _gathered(model: nn.Module) -> GatheredWeights | None:
    """Gathers the weights of a model that ``fully_shard`` has sharded; None for other models."""
    if not sharded_modules(model):
        return None
    weights = GatheredWeights(model)
    weights.gather()
    return weights


class _ModelMemory:
    """The knowledge of a model that is kept between recordings."""

    def __init__(self, model: nn.Module):
        self.layouts, self.attributes = Layouts(), attribute_tensors(model)


class _InputHook:
    """A forward hook that gives the model's inputs to a tape; copies of it do nothing."""

    def __init__(self, tape: Tape | None = None):
        self._tape = tape

    def __call__(self, model: nn.Module, args: tuple, kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        # torch passes no kwargs while another thread removes its hook from the model.
        if self._tape is not None:
            self._tape.note_inputs(args, kwargs)

    def __deepcopy__(self, memo: dict) -> _InputHook:
        return _InputHook()

    def __reduce__(self) -> tuple:
        return _InputHook, ()
