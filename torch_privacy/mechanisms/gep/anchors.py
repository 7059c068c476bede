# SPDX-License-Identifier: Apache-2.0
"""Computes the anchor gradients, those of auxiliary examples, and the subspace that they span."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset

from ...jacobian.layouts.known import Layouts
from ...jacobian.recording.paths import check_losses
from ...jacobian.rows.operator import Jacobian
from ...jacobian.tape import Tape
from ...model_check.rehearsal.comparison import written_into
from ...sampling.batches import Batches, BatchRequest, Collate
from ...sampling.datasets import check_map_style
from ...support.model_state import ModelState, ModelTensors, MutationGuard
from ...support.own_draws import randint, randn, randperm
from ...support.random_state import RandomState, recording_disabled, seed_random_numbers
from ...support.torch_modes import UNCOMPILED, without_autocast
from ...support.validate import Refused, whole
from .basis import Basis, Columns, balanced_groups, groups_by_prefix, quotas
from .orthonormal import OrthonormalBasis, RandomStart, orthonormal_combinations, orthonormalize

NUM_GROUPS = 5  # default number of groups of parameters
KEPT_BYTES = 2**29  # of anchor gradients that are kept: others are multiplied at once, in each power iteration anew

Rows = list[Tensor]  # (c, size) for every parameter of a group


Labels = Callable[[Any, Any, torch.Generator], Any]  # (batch, the model's outputs, generator) -> labels
Loss = Callable[[Any, Any], Tensor]  # (the model's outputs, labels) -> (m,)


def random_labels(batch: Any, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a uniform random class for every example (and position); classes are the outputs' last dimension."""
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or outputs.shape[-1] < 2:
        got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
        raise Refused(
            f"random labels need outputs (m, ..., classes) with at least 2 classes; the model's have {got}. Pass "
            "labels= and loss= as in the model's training."
        )
    labels = randint(outputs.shape[-1], outputs.shape[:-1], generator=generator)
    return labels.to(outputs.device, non_blocking=True)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of every example, (m,), averaged over its positions if any; classes come last."""
    losses = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(outputs), -1).mean(1)


@dataclass(frozen=True, eq=False)
class AnchorSubspace:
    """The subspace of the gradients of m auxiliary examples: k directions, computed anew for every step.

    The examples are public data that resemble the private data; they need no labels. Power iteration on their
    gradients G (m x p) gives ``V ← orthonormal rows of (G Vᵀ)ᵀ G``, separately in each group of parameters. A group
    gets directions in proportion to the root of its size. G is made in chunks; at most 512 MiB of it are kept.

    Args:
        auxiliary: a tensor of inputs, examples first; or a map-style dataset with items that are inputs or begin with
            them. Inputs may be a tensor, a tuple of arguments or a mapping of named ones.
        num_basis: k, the number of directions of all groups together. There are fewer if the anchors span less.
        groups: prefixes of parameters' names, one for each group, ``""`` for all remaining parameters; or a number of
            runs of consecutive parameters of about the same size; five by default.
        num_anchors: m, drawn anew for every step from the auxiliary data; by default all of it.
        power_iterations: 1 as in the paper. 0 gives random directions, for comparison: they capture little of a
            gradient.
        labels: (batch, outputs, generator) -> labels. By default uniform classes, drawn anew for every step; use
            ``lambda batch, outputs, generator: batch[1]`` for the labels of the dataset.
        loss: (outputs, labels) -> (m,), the loss of the training; cross entropy by default.
        chunk_size: number of examples that the model processes at once.
        collate_fn: see ``torch.utils.data.DataLoader``.

    Guarantees:
        - The rows of the basis are orthonormal up to 1e-5, and those of a group are zero outside of it.
        - It depends only on the auxiliary data, the model's weights and a key.
        - Computing it changes neither the model, nor its gradients, nor any random state.

    Edge cases: a gradient that is not finite counts as zero; with gradients of lower rank there are fewer directions.
        The model's own forward hooks also see the auxiliary examples.

    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Algorithm 1, first stage.

    Example:
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> subspace = AnchorSubspace(torch.randn(100, 5), num_basis=12, groups=["0", "2"])
        >>> subspace.basis(model).num_directions
        {'0': 7, '2': 5}
    """

    auxiliary: Tensor | Dataset = field(repr=False)
    num_basis: int = 1000
    groups: int | Sequence[str] | None = None
    num_anchors: int | None = None
    power_iterations: int = 1
    labels: Labels = field(default=random_labels, repr=False)
    loss: Loss = field(default=cross_entropy, repr=False)
    chunk_size: int = 64
    collate_fn: Collate | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        where = "AnchorSubspace"
        whole(where, num_basis=self.num_basis, chunk_size=self.chunk_size, at_least=1)
        whole(where, power_iterations=self.power_iterations)
        self._check_auxiliary()
        self._check_groups()
        if self.num_anchors is not None:
            whole(where, num_anchors=self.num_anchors, at_least=1)
            if self.num_anchors > len(self.dataset):
                raise ValueError(
                    f"{where}: num_anchors={self.num_anchors!r} must be at most {len(self.dataset)}, the auxiliary "
                    "examples."
                )

    def _check_auxiliary(self) -> None:
        if isinstance(self.auxiliary, Tensor) and (not self.auxiliary.ndim or self.auxiliary.layout != torch.strided):
            raise Refused(
                f"AnchorSubspace: auxiliary of shape {tuple(self.auxiliary.shape)} and {self.auxiliary.layout}: must "
                "be a dense tensor with examples first, or a map-style dataset."
            )
        check_map_style(self.dataset, "auxiliary")

    def _check_groups(self) -> None:
        groups = self.groups
        if groups is None:
            return
        if isinstance(groups, int):
            whole("AnchorSubspace", groups=groups, at_least=1)
        elif isinstance(groups, str) or not isinstance(groups, Sequence) or not all(isinstance(g, str) for g in groups):
            raise ValueError(
                f"AnchorSubspace: groups={groups!r} must be a number of groups or a list of prefixes of parameters' "
                "names, such as ['features', 'head']."
            )

    @property
    def dataset(self) -> Any:
        """The auxiliary data as a map-style dataset."""
        return TensorDataset(self.auxiliary) if isinstance(self.auxiliary, Tensor) else self.auxiliary

    @property
    def count(self) -> int:
        """m, the number of anchors of a step."""
        return len(self.dataset) if self.num_anchors is None else self.num_anchors

    def basis(self, model: nn.Module, *, seed: int = 0) -> Basis:
        """Returns the basis for a model's current weights; all parameters that require a gradient are trained."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        key = hashlib.sha256(f"basis {seed}".encode()).digest()
        return Anchors(self, trained).basis(
            model, ModelTensors(trained, {**frozen, **dict(model.named_buffers())}), key, 0
        )

    def statement(self) -> dict[str, Any]:
        """Returns the settings as plain data, for the privacy statement."""
        return {
            "num_basis": self.num_basis,
            "groups": list(self.groups) if isinstance(self.groups, Sequence) else self.groups,
            "num_anchors": self.count,
            "num_auxiliary": len(self.dataset),
            "power_iterations": self.power_iterations,
            "labels": getattr(self.labels, "__name__", repr(self.labels)),
        }

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the auxiliary data: a digest of tensors, the size of other datasets."""
        tensors = self.dataset.tensors if isinstance(self.dataset, TensorDataset) else ()
        digest = hashlib.sha256(str(len(self.dataset)).encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


class Anchors:
    """Computes the basis of each step of one model: a function of its weights, the auxiliary data, a key and the step.

    Args:
        setting: the user's choice.
        parameters: the trained parameters, by name.
    """

    def __init__(self, setting: AnchorSubspace, parameters: Mapping[str, Tensor]):
        self._setting, self._key = setting, b""
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self.groups = parameter_groups(setting, parameters)
        self._sizes = {group: sum(parameters[name].numel() for name in names) for group, names in self.groups.items()}
        self.quotas = quotas(setting.num_basis, self._sizes)
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)
        self._like = torch.empty(0, dtype=dtype, device=next(iter(parameters.values())).device)
        self._fetch = Batches(setting.dataset, setting.collate_fn, num_workers=0)
        self._layouts = Layouts()

    def basis(self, model: nn.Module, tensors: ModelTensors, key: bytes, step: int) -> Basis:
        """Returns the basis for the model's current weights; leaves the model and the random state unchanged.

        Key and step determine labels, the choice of examples, augmentation, dropout and the first directions.

        Raises:
            Refused: the forward writes into a parameter, or the tape refuses the model.
        """
        self._key = key
        guard, state, before = MutationGuard(model), RandomState(), ModelState(model)
        try:
            with recording_disabled(), UNCOMPILED:
                basis = self._basis(model, tensors, step)
        except Refused as error:
            raise Refused(f"AnchorSubspace, on the auxiliary data: {error}") from None
        except Exception as error:
            error.add_note("AnchorSubspace: this is an error of the model, labels= or loss= on the auxiliary data.")
            raise
        finally:
            state.restore()
            before.restore()
        written, _ = guard.changed()
        if written:
            raise Refused(f"AnchorSubspace, on the auxiliary data: {written_into(written)}")
        return basis

    @torch.no_grad()
    def _basis(self, model: nn.Module, tensors: ModelTensors, step: int) -> Basis:
        """Runs power iterations: V becomes the orthonormalized rows of (G Vᵀ)ᵀ G, with the anchor gradients G."""
        draw, iterations = self._generator("directions", step), self._setting.power_iterations
        if not iterations:
            return self._random_basis(draw)
        directions: Mapping[str, RandomStart | OrthonormalBasis] = {
            group: RandomStart(size, self.quotas[group], draw, self._like) for group, size in self._sizes.items()
        }
        columns: dict[str, Columns] = {}
        orthonormal: dict[str, OrthonormalBasis] = {}
        to_keep, kept = self._groups_to_keep(), dict[str, list[Rows]]()
        for left in reversed(range(iterations)):
            made = self._gradients(model, tensors, step, columns, excluded=set(kept))
            products = self._product(_keep_some(made, to_keep, kept), directions)
            rows, kept = kept, kept if left else {}
            found = orthonormalize(products, draw) | orthonormal_combinations(rows, directions, draw)
            directions = orthonormal = {group: found[group] for group in self.groups}
        return Basis(columns, orthonormal)

    def _random_basis(self, draw: torch.Generator) -> Basis:
        drawn = {
            group: randn(self.quotas[group], size, generator=draw).to(self._like) for group, size in self._sizes.items()
        }
        columns = {g: Columns({name: self._shapes[name] for name in names}) for g, names in self.groups.items()}
        return Basis(columns, orthonormalize(drawn, draw))

    def _groups_to_keep(self) -> set[str]:
        """Returns the groups, largest first, with anchor gradients that fit in memory."""
        left, groups = KEPT_BYTES, set()
        for group in sorted(self._sizes, key=self._sizes.__getitem__, reverse=True):
            size = self._setting.count * self._sizes[group] * self._like.itemsize
            if size <= left:
                groups.add(group)
                left -= size
        return groups

    def _product(
        self, gradients: Iterable[tuple[str, Rows]], directions: Mapping[str, RandomStart | OrthonormalBasis]
    ) -> dict[str, Tensor]:
        """Returns (G Vᵀ)ᵀ G, (k, p) for every group, from the gradients chunk by chunk."""
        total: dict[str, Tensor] = {}
        for group, rows in gradients:
            with without_autocast(self._like.device.type):  # only here, because the model runs in the loop
                embedding, first = directions[group].coordinates(rows), group not in total
                if first:
                    total[group] = self._like.new_empty(embedding.shape[1], self._sizes[group])
                products = total[group].split([part.shape[1] for part in rows], 1)
                for product, part in zip(products, rows, strict=True):
                    product.addmm_(embedding.T, part, beta=0 if first else 1)
        return total

    def _gradients(
        self, model: nn.Module, tensors: ModelTensors, step: int, columns: dict[str, Columns], excluded: Collection[str]
    ) -> Iterator[tuple[str, Rows]]:
        """Yields the anchor gradients of each chunk of examples in each group that is not excluded.

        The first gradients of a group determine the order of its ``columns``.
        """
        groups = {group: names for group, names in self.groups.items() if group not in excluded}
        if not groups:
            return
        order = randperm(len(self._setting.dataset), generator=self._generator("examples", step))
        chosen = order[: self._setting.count].sort().values
        for number, part in enumerate(chosen.split(self._setting.chunk_size)):
            jacobian = self._jacobian(model, tensors, part, (step, number))
            for group, names in groups.items():
                rows = jacobian.restricted(names).rows()
                if group not in columns:
                    columns[group] = Columns.of({name: rows[name] for name in names})
                yield group, _finite([part.to(self._like) for part in columns[group].flat(rows)])
            del jacobian

    @torch.enable_grad()
    def _jacobian(self, model: nn.Module, tensors: ModelTensors, examples: Tensor, which: tuple[int, int]) -> Jacobian:
        seed = self._digest("random", *which)
        draw = BatchRequest(examples.numpy(), 1, seed)
        batch = self._fetch.collate(self._fetch.items(draw), draw)
        seed_random_numbers(seed)  # for dropout
        there = self._like.device
        batch = tree_map(lambda t: t.to(there, non_blocking=True) if isinstance(t, Tensor) else t, batch)
        with Tape(tensors.trained, tensors.constants, self._layouts, len(examples)) as tape:
            outputs = _forward(model, batch if isinstance(batch, (Tensor, Mapping)) else batch[0])
            labels = self._setting.labels(batch, outputs, self._generator("labels", *which))
            losses = self._setting.loss(outputs, labels)
        check_losses(losses)
        if len(losses) != len(examples):
            raise Refused(f"loss returned {len(losses)} losses for {len(examples)} examples; return one for each.")
        return tape.jacobian(losses, may_miss=tensors.trained, verify=True)

    def _generator(self, purpose: str, *numbers: int) -> torch.Generator:
        return torch.Generator().manual_seed(int.from_bytes(self._digest(purpose, *numbers)[:8], "big") >> 1)

    def _digest(self, purpose: str, *numbers: int) -> bytes:
        return hashlib.blake2b(f"anchor {purpose} {numbers}".encode(), key=self._key, digest_size=32).digest()


def _keep_some(
    gradients: Iterable[tuple[str, Rows]], groups: Collection[str], kept: dict[str, list[Rows]]
) -> Iterator[tuple[str, Rows]]:
    """Appends the gradients of some groups to ``kept``, and yields those of the others."""
    for group, rows in gradients:
        if group in groups:
            kept.setdefault(group, []).append(rows)
        else:
            yield group, rows


def parameter_groups(setting: AnchorSubspace, parameters: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Returns the groups of parameters that the user wants, label -> names."""
    sizes = {name: p.numel() for name, p in parameters.items()}
    wanted = setting.groups
    if not sizes:
        raise ValueError("AnchorSubspace: the model has no parameter with requires_grad=True, hence no gradients.")
    if wanted is None:
        wanted = min(NUM_GROUPS, setting.num_basis)
    groups = balanced_groups(sizes, wanted) if isinstance(wanted, int) else groups_by_prefix(sizes, wanted)
    if len(groups) > setting.num_basis:
        raise ValueError(
            f"AnchorSubspace: num_basis={setting.num_basis!r} is less than the number of groups, {len(groups)}. "
            "Each needs at least one direction."
        )
    return groups


def _forward(model: nn.Module, inputs: Any) -> Any:
    """Returns the model's output for one tensor, several, or a mapping of arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*inputs)


def _finite(rows: Rows) -> Rows:
    """Returns the rows, with zeros for every example that has an entry that is not finite."""
    finite = torch.stack([part.sum(1).isfinite() for part in rows]).all(0)
    return (
        rows
        if finite.device.type == "cpu" and finite.all()
        else [torch.where(finite[:, None], part, 0) for part in rows]
    )
