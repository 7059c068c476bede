# SPDX-License-Identifier: Apache-2.0
"""Norms of the rows by random projections of the gradients, of anything that differentiates: what watches each batch.

It needs a vector of per-example losses and no more: no table of ops, no layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from .._replay import RandomState
from .._validate import Refused
from ..jacobian.agreement import Check
from ..jacobian.calls import Reached
from ..jacobian.code_path import CodePath
from ..jacobian.graph import Graph
from ..jacobian.layout import PROOFS, Merging, told_by
from ..jacobian.tape import check_losses
from ..jacobian.torch_functions import numbers_in
from ..ops._base import is_half
from .directions import Directions
from .jvp import WAYS, Manner, Run, against_ahead, differentiable_twice
from .projections import SketchedJacobian

if TYPE_CHECKING:
    from .._model_state import ModelTensors
    from .choose import Sketched

SMALL = 2**14  # entries of the forward's values in the mean; with fewer a call of torch costs more than its work
AHEAD_ENTRIES = 2**22  # of tangents of the model's outputs that are kept through its forward, at most


class Sketching:
    """What batches have taught about one model: which way projections are made, and which graphs were looked at.

    Args:
        setting: the user's choice.
    """

    def __init__(self, setting: Sketched):
        self.setting = setting
        self.way: str | None = None  # chosen on the first batch that has examples
        self._reasons: dict[str, str] = {}  # why faster ways were not taken
        self._looked_at: Counter[tuple[int, bool]] = Counter()  # batches of a graph, and whether of one example
        self._output_entries: int | None = None  # of a forward, where the way is known

    @property
    def needs_runs(self) -> bool:
        """Whether the model's forwards have to be remembered."""
        return self.way is None or WAYS[self.way].needs_runs

    @property
    def needs_backends(self) -> bool:
        """Whether the model's forward has to run with backends that can be differentiated twice."""
        return self.way is None or not WAYS[self.way].needs_runs

    def settled(self, size: int) -> bool:
        """Whether some graph was looked at often enough to trust the model with so many examples."""
        return any(count >= PROOFS for (_, one), count in self._looked_at.items() if one in told_by(size))

    def recorder(self, tensors: ModelTensors, size: int, directions: Directions) -> Sketch:
        """What looks on at the forward on a (micro)batch of so many examples."""
        return Sketch(self, tensors.trained, directions)

    @property
    def pushes_ahead(self) -> bool:
        """Whether tangents are pushed before the forward, beside no graph, and kept: outputs have to be small."""
        if self.way is None or self._output_entries is None or not WAYS[self.way].needs_runs:
            return False
        return self.setting.num_projections * self._output_entries <= AHEAD_ENTRIES

    def is_new(self, graph: Graph, num_examples: int) -> bool:
        """Whether a batch has to show that its examples do not depend on each other; counts it."""
        path = hash(tuple(node.name() for node in graph.nodes()))
        known = any(self._looked_at[path, one] >= PROOFS for one in told_by(num_examples))
        self._looked_at[path, num_examples == 1] += 1
        return not known

    def explain(self) -> str:
        """How the projections are made, and why not faster."""
        if self.way is None:
            return "to be chosen on the first batch"
        text = f"{self.setting.num_projections} projections by {self.way}"
        return "; ".join([text, *(f"not by {way}: {reason}" for way, reason in self._reasons.items())])

    def jacobian(
        self,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        runs: Sequence[Run],
        directions: Directions,
        ahead: Mapping[str, Tensor] | None = None,
    ) -> SketchedJacobian:
        """The sketch of one batch, and what its sums must agree with.

        ``ahead``: the last of the directions along which the runs were pushed ahead, if they were.
        """
        self._output_entries = sum(size for run in runs for size in run.sizes)
        if self.way is not None and ahead is not None:
            projections = against_ahead(losses, runs, WAYS[self.way].manner)
            return self._of(self.way, losses, parameters, runs, ((ahead, found) for found in projections))
        if self.way is not None:
            try:
                return self._by(self.way, losses, parameters, runs, directions)
            except RuntimeError as error:
                raise _changed(error) from error
        reasons: dict[str, str] = {}
        for way in self._ways():
            try:
                self._reasons = reasons
                jacobian = self._by(way, losses, parameters, runs, directions)
                jacobian.look_at_single_rows()
                self._check_worth(way, runs)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
                reasons[way] = str(error).strip().partition("\n")[0][:200]
                continue
            self.way = way
            return jacobian
        listed = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
        raise Refused(
            f"Sketched: no way to project the gradients of these losses. {listed}. Give custom functions a jvp or a "
            "backward that can be differentiated; or use exact norms, without jacobian=."
        )

    def _ways(self) -> list[str]:
        """What is tried: forward mode first."""
        shared, together, each = Manner
        if self.setting.num_projections == 1:
            order = [each, together]
        elif self.setting.group_size is None:
            order = [shared, together, each]
        else:
            order = [shared, each] if self.setting.group_size == 1 else [together, shared, each]
        ways = [(order.index(way.manner), name) for name, way in WAYS.items() if way.manner in order]
        return [name for _, name in sorted(ways, key=lambda pair: (not WAYS[pair[1]].needs_runs, pair[0]))]

    def _check_worth(self, way: str, runs: Sequence[Run]) -> None:
        """Refuse to share forwards of small tensors unless memory counts: directions together take less time there."""
        if WAYS[way].manner is Manner.SHARED and self.setting.group_size is None:
            if max(run.mean_entries for run in runs) < SMALL:
                raise RuntimeError("its tensors are so small that directions together take less time")

    def groups(self, way: str, directions: Directions, parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The directions of a batch, as many at a time as the way takes together."""
        size = self.setting.group_size if WAYS[way].manner is Manner.TOGETHER else 1
        return directions.in_groups(self.setting.num_projections, size, parameters)

    def _by(
        self,
        way: str,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        runs: Sequence[Run],
        directions: Directions,
    ) -> SketchedJacobian:
        project = WAYS[way](losses, parameters, runs)
        groups = self.groups(way, directions, parameters)
        return self._of(way, losses, parameters, runs, ((v, project(v)) for v in groups))

    def _of(
        self,
        way: str,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        runs: Sequence[Run],
        groups: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    ) -> SketchedJacobian:
        """From groups of directions (of which the last is there) and the projections on them."""
        v, projections, total = {}, losses.detach()[:, None], torch.zeros_like(losses)
        for v, found in groups:  # noqa: B007  (the last one is looked at below)
            projections = found.detach().to(losses)
            total += projections.square().sum(1)
        for run in runs:
            run.forget()
        r = self.setting.num_projections
        check = Check(v, projections, (total / r).sqrt())

        def project(v: Mapping[str, Tensor]) -> Tensor:
            return WAYS[way](losses, parameters, runs)(v)

        return SketchedJacobian(losses, parameters, total / r, project, check, f"{r} projections by {way}")


class Sketch(TorchFunctionMode):
    """Watches one batch: what the model is called with and gives; stands where a `Tape` does.

    Args:
        sketching: what earlier batches taught.
        parameters: the trained ones, by name.
        directions: of this batch alone.
    """

    def __init__(
        self,
        sketching: Sketching,
        parameters: Mapping[str, Tensor],
        directions: Directions,
    ):
        super().__init__()
        self.code, self.measured, self.reached = CodePath(), False, set[str]()
        self.parameters = dict(parameters)
        self._sketching, self._directions = sketching, directions
        self._runs: list[Run] = []
        self._ahead: dict[str, Tensor] | None = None  # the last of the directions that runs were pushed ahead along
        self._active: list[tuple[Run, ExitStack]] = []
        self._outputs: list[GradientEdge] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.code.note_call(func, numbers_in(args))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.code.note_shape(out.shape)
        return out

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The model's forward begins."""
        run = Run(model, args, kwargs, RandomState() if self._sketching.needs_runs else None)
        context = ExitStack()
        self._active.append((run, context))
        if self._sketching.pushes_ahead:
            self._push_ahead(run)
        if self._sketching.needs_backends:
            context.enter_context(differentiable_twice(model))
        context.enter_context(self)

    def _push_ahead(self, run: Run) -> None:
        way = self._sketching.way
        assert way is not None
        for v in self._sketching.groups(way, self._directions, self.parameters):
            try:
                run.push_ahead(v, self.parameters, WAYS[way].manner)
            except RuntimeError as error:
                raise _changed(error) from error
            self._ahead = v
        run.forget()

    def end(self, output: Any) -> None:
        """The model's forward came to its end; ``output`` is None where it raised."""
        run, context = self._active.pop()
        context.close()
        self._outputs += [edge for edge, _ in run.ended(output)]
        self._runs.append(run)

    def nodes_before_calls(self, graph: Graph) -> Iterator[Node]:
        """The nodes between the losses and the model's outputs."""
        return graph.before({edge.node for edge in self._outputs})

    def clipped_sum(
        self,
        losses: Tensor,
        groups: Mapping[str, Sequence[str]],
        clip: Callable[[SketchedJacobian, str], dict[str, Tensor]] | None,
        *,
        merging: Merging | None = None,
        may_miss: Iterable[str] = (),
        memory_budget: float = 0.0,
        observe: Callable[[SketchedJacobian, str], None] | None = None,
    ) -> dict[str, Tensor]:
        """Σᵢ cᵢ row_i by name, with cᵢ from the estimated norms; arguments as of ``Tape.clipped_sum``.

        Raises:
            Refused: half precision, a parameter that is never reached, no way to project, sums that the projections
                do not bear out.
        """
        check_losses(losses)
        graph = Graph(losses)
        self.code.note(node.name() for node in self.nodes_before_calls(graph))
        self._check_reached(graph, set(may_miss))
        if self._sketching.is_new(graph, len(losses)):
            self._check_precision(Reached(losses, graph, [], [], 0).dtypes())
        jacobian = self._sketching.jacobian(losses, self.parameters, self._runs, self._directions, self._ahead)
        (label,) = groups  # `check_rule` lets no other rule through
        if observe is not None:
            observe(jacobian, label)
        return {} if clip is None else clip(jacobian, label)

    def _check_reached(self, graph: Graph, may_miss: set[str]) -> None:
        leaves = {id(getattr(node, "variable", None)) for node in graph.nodes()}
        self.reached = {name for name, p in self.parameters.items() if id(p) in leaves}
        missing = [name for name in self.parameters if name not in self.reached | may_miss]
        if missing:
            raise Refused(
                f"Sketched: the losses never reach parameter {', '.join(map(repr, missing))}. Use it, freeze it with "
                "requires_grad_(False), or leave it out of the optimizer."
            )

    def _check_precision(self, dtypes: Iterable[torch.dtype]) -> None:
        names = [name for name, p in self.parameters.items() if is_half(p)]
        if names or any(torch.finfo(dtype).bits < 32 for dtype in dtypes):
            where = f"parameter {', '.join(map(repr, names))}" if names else "the forward"
            raise Refused(
                f"Sketched: half precision in {where}: rounding changes the law of the estimated norms, which the "
                "accountant prices. Compute in float32, or use exact norms, without jacobian=."
            )


def _changed(error: RuntimeError) -> Refused:
    """Of a batch on which the way that earlier ones took fails."""
    reason = str(error).partition(". ")[0]
    return Refused(
        f"Sketched: this batch cannot be projected as those before it: {reason}. Let it take the same ops as they did."
    )
