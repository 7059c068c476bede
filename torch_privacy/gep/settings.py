# SPDX-License-Identifier: Apache-2.0
"""Provides the public settings of gradient embedding perturbation: ``GEP``, ``BGEP`` and ``AnchorSubspace``.

The gradients of public data that resemble the private data, the anchors, span a subspace. Most of a private gradient
lies in it: k coordinates, the embedding. The rest, the residual, has a small norm and therefore needs little noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .._model_state import ModelTensors
from .._validate import Refused, strictly_between, whole
from ..batches import Collate, check_map_style
from ..clipping import Adaptive, ClippingRule, Flat, MicroBatches, check_rule
from .anchors import Anchors
from .basis import Basis

PAPER_EMBEDDING, PAPER_RESIDUAL = Flat(10.0), Flat(2.0)  # bounds S₁ and S₂ in the paper's experiments
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
    labels = torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=generator)
    return labels.to(outputs.device)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of every example, (m,), averaged over its positions if any; classes come last."""
    losses = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(outputs), -1).mean(1)


@dataclass(frozen=True, eq=False)
class AnchorSubspace:
    """The subspace of the gradients of m auxiliary examples: k directions, computed anew for every step.

    The examples are public data that resemble the private data; they need no labels. Power iteration on their
    gradients G (m x p) gives ``V ← orthonormal rows of (G Vᵀ)ᵀ G``, separately in each group of parameters. A group
    gets directions in proportion to the root of its size. G is processed in chunks and never held as a whole.

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


@dataclass(frozen=True)
class BGEP:
    """Biased gradient embedding perturbation: the noisy embedding alone, for ``PrivateTraining(perturbation=...)``.

    With V the orthonormal basis of the step's anchor subspace, the embedding of gradient gᵢ is ``wᵢ = V gᵢ``. A step
    releases ``Σᵢ aᵢ wᵢ + noise``, with ``aᵢ`` from the clipping rule; the gradient is Vᵀ times the release. The part
    of a gradient outside of the subspace is lost: the bias is the mean of these residuals.

    Args:
        subspace: the anchor subspace.
        embedding_clipping: bounds the embedding of each example, S₁ in the paper.

    Guarantees: one step is a `SubsampledGaussian` with the training's noise multiplier.

    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Remark 1.
    """

    subspace: AnchorSubspace
    embedding_clipping: ClippingRule = PAPER_EMBEDDING

    def __post_init__(self) -> None:
        _check_subspace("BGEP", self.subspace)
        _check_rule("BGEP", "embedding_clipping", self.embedding_clipping)


@dataclass(frozen=True)
class GEP:
    """Gradient embedding perturbation, for ``PrivateTraining(perturbation=...)``: noisy embedding and noisy residual.

    With V the orthonormal basis of the step's anchor subspace, gradient gᵢ is split into its embedding ``wᵢ = V gᵢ``
    and its residual ``rᵢ = gᵢ - Vᵀ wᵢ``. A step releases two sums over one Poisson sample, ``Σᵢ aᵢ wᵢ`` and
    ``Σᵢ cᵢ rᵢ``, each with its own clipping rule and with noise in proportion to its own sensitivity. The gradient is
    ``Vᵀ w̃ + (1 - Vᵀ V) r̃``: residuals have no component in the subspace, so their noise there is removed.

    No residual is formed: ``‖rᵢ‖² = ‖gᵢ‖² - ‖wᵢ‖²`` and ``Σᵢ cᵢ rᵢ = Σᵢ cᵢ gᵢ - Vᵀ Σᵢ cᵢ wᵢ``.

    Args:
        subspace: the anchor subspace.
        embedding_clipping: bounds the embedding of each example, S₁ in the paper. The groups of a rule with groups must
            be groups of the subspace, or unions of these.
        residual_clipping: the same for residuals, S₂.
        embedding_share: share of the budget, 1/σ², for the embedding, in (0, 1): its noise multiplier is
            ``σ / √(2 share)`` and that of the residual ``σ / √(2 (1 - share))``, with the training's σ. The paper's
            1/2 gives both the same. None takes the share with the least total noise.

    Guarantees:
        - One step is a `SubsampledGEP` with the training's noise multiplier σ, or with another share
          `SubsampledBlocks`: in both cases one Gaussian with noise multiplier ``σ / √2``, because both sums are over
          one sample.
        - One example changes each sum by at most its rule's sensitivity (1 + 1e-5). In float32 the difference of
          squares is inaccurate for short residuals: so ``‖rᵢ‖²`` is increased by 8e-6 ‖gᵢ‖², more than the rounding
          error. That affects only gradients with a norm above 360 S₂.

    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Algorithm 1. We replace its accounting, and remove its
        noise for residuals inside the subspace.

    Example:
        >>> data = TensorDataset(torch.randn(1000, 5), torch.randint(3, (1000,)))
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> gep = GEP(AnchorSubspace(torch.randn(100, 5), num_basis=12), Flat(1.0), Flat(0.2))
        >>> from torch_privacy import PrivateTraining
        >>> training = PrivateTraining(model, optimizer, data, expected_batch_size=50, num_steps=20, perturbation=gep,
        ...                            noise_multiplier=1.5, delta=1e-5)
        >>> for x, y in training:
        ...     losses = F.cross_entropy(model(x), y, reduction="none")
        ...     released = training.step(losses)
        >>> print(training.spent())
        epsilon in [1.729, 1.730] at delta = 1e-05 (add/remove one example, Poisson sampling)
    """

    subspace: AnchorSubspace
    embedding_clipping: ClippingRule = PAPER_EMBEDDING
    residual_clipping: ClippingRule = PAPER_RESIDUAL
    embedding_share: float | None = 0.5

    def __post_init__(self) -> None:
        _check_subspace("GEP", self.subspace)
        _check_rule("GEP", "embedding_clipping", self.embedding_clipping)
        _check_rule("GEP", "residual_clipping", self.residual_clipping)
        if self.embedding_share is not None:
            strictly_between("GEP", 0, 1, embedding_share=self.embedding_share)


def _check_subspace(where: str, subspace: Any) -> None:
    if not isinstance(subspace, AnchorSubspace):
        raise ValueError(
            f"{where}: subspace of type {type(subspace).__name__} given; must be an AnchorSubspace(auxiliary data)."
        )


def _check_rule(where: str, name: str, rule: Any) -> None:
    check_rule(where, name, rule)
    if isinstance(rule, (Adaptive, MicroBatches)):
        raise Refused(
            f"{where}: {name}={rule!r}: {type(rule).__name__} releases or groups more than the accountant's event of a "
            "step states. Take Flat, Automatic or Groups."
        )
