# SPDX-License-Identifier: Apache-2.0
"""Provides the public settings of gradient embedding perturbation: ``GEP``, ``BGEP`` and ``AnchorSubspace``.

The gradients of public data that resemble the private data, the anchors, span a subspace. Most of a private gradient
lies in it: k coordinates, the embedding. The rest, the residual, has a small norm and therefore needs little noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...support.validate import Refused, plain_numbers, strictly_between
from ..clipping import Adaptive, ClippingRule, Flat, MicroBatches, check_rule
from .anchors import AnchorSubspace

PAPER_EMBEDDING, PAPER_RESIDUAL = Flat(10.0), Flat(2.0)  # bounds S₁ and S₂ in the paper's experiments


@dataclass(frozen=True)
class BGEP:
    """Biased gradient embedding perturbation: the noisy embedding alone, for ``PrivateTraining(clipping=...)``.

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


@plain_numbers
@dataclass(frozen=True)
class GEP:
    """Gradient embedding perturbation, for ``PrivateTraining(clipping=...)``: noisy embedding and noisy residual.

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
        keeps_residual_noise: whether the gradient is ``Vᵀ w̃ + r̃``, as in the paper, with the residuals' noise in the
            subspace. It costs nothing in privacy and adds noise.

    Guarantees:
        - One step is a `SubsampledGEP` with the training's noise multiplier σ, or with another share
          `SubsampledBlocks`: in both cases one Gaussian with noise multiplier ``σ / √2``, because both sums are over
          one sample.
        - One example changes each sum by at most its rule's sensitivity (1 + 2e-5), which the noise covers. In float32
          the difference of squares is inaccurate for short residuals: so ``‖rᵢ‖²`` is increased by 8e-6 ‖gᵢ‖², more
          than the rounding error. That affects only gradients with a norm above 360 S₂.

    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Algorithm 1. We replace its accounting, and remove its
        noise for residuals inside the subspace unless ``keeps_residual_noise``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import torch_privacy as tp
        >>> data = torch.utils.data.TensorDataset(torch.randn(1000, 5), torch.randint(3, (1000,)))
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> gep = tp.GEP(tp.AnchorSubspace(torch.randn(100, 5), num_basis=12), tp.Flat(1.0), tp.Flat(0.2))
        >>> training = tp.PrivateTraining(model, optimizer, data, expected_batch_size=50, num_steps=20,
        ...                               clipping=gep, noise_multiplier=1.5, delta=1e-5)
        >>> for x, y in training:
        ...     losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        ...     released = training.step(losses)
        >>> print(training.spent())
        epsilon in [1.729, 1.730] at delta = 1e-05 (zero out one example, Poisson sampling)
    """

    subspace: AnchorSubspace
    embedding_clipping: ClippingRule = PAPER_EMBEDDING
    residual_clipping: ClippingRule = PAPER_RESIDUAL
    embedding_share: float | None = 0.5
    keeps_residual_noise: bool = field(default=False, repr=False)  # states have it beside the representation

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
