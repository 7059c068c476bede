# SPDX-License-Identifier: Apache-2.0
"""Provides ``EmbeddedSum``, the mechanism of gradient embedding perturbation: sums of embeddings and of residuals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ... import privacy
from ...jacobian.layouts.known import Merging
from ...jacobian.rows.operator import Jacobian, RowsOfBatch
from ...support.model_state import ModelTensors
from ...support.torch_modes import product_rounding
from ...support.units import ONE_EXAMPLE
from ...support.validate import Refused
from ..base import RELATION, Mechanism, sums_or_zeros
from ..clipping import ClippingRule
from ..sums import BoundCheck, Summation, checked_factors
from .anchors import Anchors
from .basis import Basis
from .settings import BGEP, GEP

ROUNDING = 64  # in units of the dtype's epsilon: added to squared residual norms, relative to the gradient's
COARSE = 2**-7  # the same if torch may multiply with less than float32 precision


class ReleasedSum:
    """One of the two released sums: its clipping rule, and the rule's group for each group of the subspace.

    Args:
        rule: the clipping rule of the sum.
        groups: those of the subspace, label -> names of parameters.
    """

    def __init__(self, rule: ClippingRule, groups: Mapping[str, Sequence[str]]):
        names = [name for inside in groups.values() for name in inside]
        self.rule = rule.bind(names)
        self.labels = {name: label for label, inside in self.rule.groups(names).items() for name in inside}
        overlapping = [group for group, inside in groups.items() if len({self.labels[name] for name in inside}) > 1]
        if overlapping:
            raise ValueError(
                f"AnchorSubspace: group {', '.join(map(repr, overlapping))} has parameters of several groups of "
                f"{rule!r}. Give the subspace groups that lie inside of the rule's, e.g. the same prefixes."
            )
        self.members: dict[str, list[str]] = {}  # label -> groups of the subspace
        for group, inside in groups.items():
            self.members.setdefault(self.labels[inside[0]], []).append(group)

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of the sum between neighboring data sets."""
        return self.rule.sensitivity(RELATION)

    def factors(self, squares: Mapping[str, Tensor], bound: BoundCheck) -> dict[str, Tensor]:
        """Returns the factors (n,) of every group of the subspace from its squared norms (n,); updates the bound."""
        factors = {}
        for label, groups in self.members.items():
            norms = torch.stack([squares[group] for group in groups]).sum(0).sqrt()
            c = checked_factors(self.rule, norms, label)
            bound.note(label, c, norms)
            factors |= dict.fromkeys(groups, c)
        return factors


class EmbeddedSum(Mechanism):
    """The sum of the clipped embeddings and, with `GEP`, the sum of the clipped residuals.

    Args:
        setting: the user's choice.
        parameters: the trained parameters, by name.
        expected_batch_size, views, unit: see `Mechanism`.
    """

    treated_as_public = ("the auxiliary data of the anchor subspace",)
    needs_whole_release = True

    def __init__(
        self,
        setting: GEP | BGEP,
        parameters: Mapping[str, Tensor],
        expected_batch_size: float,
        views: int = 1,
        unit: str = ONE_EXAMPLE,
    ):
        super().__init__(expected_batch_size, views, unit)
        self._setting, self._parameters = setting, dict(parameters)
        self.anchors = Anchors(setting.subspace, parameters)
        groups = self.anchors.groups
        self._embedding = ReleasedSum(setting.embedding_clipping, groups)
        self._residual = ReleasedSum(setting.residual_clipping, groups) if isinstance(setting, GEP) else None
        self._keys = {group: f"embedding in {group}" for group in groups}  # parameters' names have no spaces
        self.basis: Basis | None = None  # of the current step

    @property
    def _embedding_share(self) -> float:
        """Share of the budget for the embedding; None chooses the least noise energy, √k S₁ : √(p - k) S₂."""
        if self._residual is None:
            return 1.0
        assert isinstance(self._setting, GEP)
        if self._setting.embedding_share is not None:
            return self._setting.embedding_share
        k, p = sum(self.anchors.quotas.values()), sum(parameter.numel() for parameter in self._parameters.values())
        embedding = math.sqrt(k) * self._embedding.sensitivity
        residual = math.sqrt(max(p - k, 1)) * self._residual.sensitivity
        return embedding / (embedding + residual)

    def _multipliers(self, noise_multiplier: float) -> tuple[float, ...]:
        """Returns the noise multiplier of each sum."""
        if self._residual is None:
            return (noise_multiplier,)
        return noise_multiplier / math.sqrt(2 * self._embedding_share), noise_multiplier / math.sqrt(
            2 * (1 - self._embedding_share)
        )

    def event(self, noise_multiplier: float, sampling_probability: float) -> privacy.Event:
        if self._residual is None:
            return privacy.SubsampledGaussian(noise_multiplier, sampling_probability, unit=self.unit)
        if self._embedding_share == 0.5:
            return privacy.SubsampledGEP(noise_multiplier, sampling_probability, unit=self.unit)
        return privacy.SubsampledBlocks(self._multipliers(noise_multiplier), sampling_probability, unit=self.unit)

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the embedding; with residuals √2, that of both sums in units of the training's noise."""
        return self._embedding.sensitivity if self._residual is None else math.sqrt(2)

    def statement(self) -> dict[str, Any]:
        parts = {"embedding": self._embedding, "residual": self._residual}
        return {
            "rule": type(self._setting).__name__,
            "released": {
                name: {"clipping": part.rule.statement(), "sensitivity": part.sensitivity}
                for name, part in parts.items()
                if part is not None
            },
            "embedding_share": self._embedding_share,
            **({"keeps_residual_noise": True} if self._keeps_residual_noise else {}),
            "subspace": self._setting.subspace.statement(),
        }

    def settings(self) -> dict[str, Any]:
        return {
            "clipping": None,
            "jacobian": repr(None),
            "perturbation": repr(self._setting),
            "keeps_residual_noise": self._keeps_residual_noise,
            "auxiliary": self._setting.subspace.fingerprint,
        }

    @property
    def _keeps_residual_noise(self) -> bool:
        return isinstance(self._setting, GEP) and self._setting.keeps_residual_noise

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        return {"all": tuple(names)}

    def begin(self, model: nn.Module, tensors: ModelTensors, key: bytes, step: int) -> None:
        self.basis = None  # frees memory for the next one
        self._check_trained(tensors.trained)
        key = hashlib.blake2b(b"anchors", key=key, digest_size=32).digest()
        basis = self.anchors.basis(model, tensors, key, step)
        if not any(basis.num_directions.values()):
            raise Refused(
                "AnchorSubspace: every anchor gradient is zero or not finite, so there is no direction. Check the "
                "auxiliary data, labels= and loss=: they must fit the model as in its training."
            )
        self.basis = basis

    def _check_trained(self, names: Iterable[str]) -> None:
        """Refuses other parameters than at the start, also if the loop froze some after its step began."""
        if list(names) != list(self._parameters):
            changed = ", ".join(map(repr, sorted(set(names) ^ set(self._parameters))))
            raise Refused(
                f"PrivateTraining: parameter {changed} was frozen or unfrozen during training, but the groups of the "
                "anchor subspace are fixed at its start. Start another PrivateTraining after changing requires_grad."
            )

    def equal_tensors(self) -> list[Tensor]:
        return [part for basis in self._current_basis.directions.values() for part in (basis.mixing, basis.vectors)]

    @property
    def _current_basis(self) -> Basis:
        assert self.basis is not None, "no step has begun"
        return self.basis

    def summation(self, units: np.ndarray | None, size: int) -> Summation:
        merging = self.merging(units, size)
        return _EmbeddingAndResidual(self._current_basis, self._keys, self._embedding, self._residual, merging)

    def complete(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._check_trained(parameters)
        embedded = {
            self._keys[group]: sums.get(self._keys[group], zeros)
            for group, zeros in self._current_basis.zeros().items()
        }
        return embedded if self._residual is None else embedded | sums_or_zeros(sums, parameters)

    def stddevs(self, names: Iterable[str], noise_multiplier: float) -> dict[str, float]:
        multipliers = self._multipliers(noise_multiplier)
        embedded = set(self._keys.values())
        stddev = {True: multipliers[0] * self._embedding.sensitivity}
        if self._residual is not None:
            stddev[False] = multipliers[1] * self._residual.sensitivity
        return {name: stddev[name in embedded] for name in names}

    def gradient(self, release: dict[str, Tensor]) -> dict[str, Tensor]:
        basis, self.basis = self._current_basis, None
        coordinates = {group: release.pop(key) for group, key in self._keys.items()}
        if self._residual is not None and not self._keeps_residual_noise:  # its part in the subspace is only noise
            coordinates = {group: coordinates[group] - w for group, w in basis.coordinates(release).items()}
        total = basis.expand(coordinates)
        for name, residual in release.items():
            total[name] = residual + total[name].to(residual.device)
        return {name: part.div_(self.expected_batch_size) for name, part in total.items()}

    def explain(self) -> str:
        subspace, quotas = self._setting.subspace, self.anchors.quotas
        listed = ", ".join(f"{count} in {group!r}" for group, count in quotas.items())
        released = "embedding alone" if self._residual is None else "embedding and residual, noise on each"
        return (
            f"{type(self._setting).__name__}: {released}; up to {sum(quotas.values())} directions from "
            f"{subspace.count} public auxiliary examples a step ({listed}); exact norms by the tape"
        )


class _EmbeddingAndResidual(Summation):
    """Embeds the rows of one (micro)batch, clips embeddings and residuals, and sums them.

    Args:
        basis: that of the step.
        keys: group of the subspace -> the name of its sum.
        embedding: clips the embeddings.
        residual: clips the residuals; None if they are not summed.
        merging: groups the views that are averaged to one row.
    """

    def __init__(
        self,
        basis: Basis,
        keys: Mapping[str, str],
        embedding: ReleasedSum,
        residual: ReleasedSum | None,
        merging: Merging | None = None,
    ):
        super().__init__()
        self.basis, self._keys, self._embedding, self._residual = basis, keys, embedding, residual
        self.merging = merging
        self._bounds: list[BoundCheck] = []
        self._squares: Mapping[str, Tensor] = {}  # of the released rows by group, or of their embeddings
        self._longest: list[float] | None = None  # of the rows of each bound, if they were read already
        self._left_out = 0
        self._finite = torch.ones(
            0, dtype=torch.bool, device="cpu"
        )  # the rows of the last group that were clipped and summed

    @property
    def num_left_out(self) -> int:
        return self._left_out

    @torch.no_grad()
    def __call__(self, jacobian: RowsOfBatch, group: str) -> dict[str, Tensor]:
        jacobian, w, a, c = self._clip(cast(Jacobian, jacobian))
        sums = {self._keys[group]: a[group].to(part.dtype) @ part for group, part in w.items()}
        return sums if c is None else sums | self._residual_sum(jacobian, w, c)

    @torch.no_grad()
    def responses(
        self, jacobian: RowsOfBatch, group: str, release: Mapping[str, Tensor], stddevs: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        count = jacobian.num_examples
        jacobian, w, a, c = self._clip(cast(Jacobian, jacobian))
        device = next(iter(w.values())).device
        products, squares = torch.zeros(2, jacobian.num_examples, dtype=torch.float64, device=device)
        for label, part in w.items():
            key, factors = self._keys[label], a[label].double() / stddevs[self._keys[label]]
            products += factors * (part @ release[key].to(part)).double() / stddevs[key]
            squares += factors.square() * part.double().square().sum(1)
        if c is not None:
            residual = {name: release[name] for name in jacobian.shapes}
            inside = self.basis.coordinates(residual)
            for label, names in self.basis.groups.items():
                factors = c[label].double() / stddevs[names[0]]
                rows = jacobian.restricted(names)
                along = rows.project({name: release[name][None] for name in names})[:, 0] - w[label] @ inside[label]
                outside = rows.squared_norms().double() - w[label].double().square().sum(1)
                products += factors * along.double() / stddevs[names[0]]
                squares += factors.square() * outside.clamp(min=0)
        if jacobian.num_examples == count:
            return products, squares
        kept = self._finite.nonzero().flatten()
        return products.new_zeros(count).index_copy(0, kept, products), squares.new_zeros(count).index_copy(
            0, kept, squares
        )

    def _clip(
        self, jacobian: Jacobian
    ) -> tuple[Jacobian, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor] | None]:
        """Returns the finite rows, their embeddings, and the clip factors of embeddings and residuals by group."""
        w = {group: self.basis.embed(jacobian, group) for group in self.basis.groups}
        inside = {group: part.double().square().sum(1) for group, part in w.items()}
        whole = self._squared_norms(jacobian, final=False)
        finite = torch.stack([*inside.values(), *whole.values()]).isfinite().all(0)
        if finite.device.type != "cpu":  # one wait for all that must be known before the sum
            of_finite = [{group: torch.where(finite, t, 0) for group, t in part.items()} for part in (inside, whole)]
            a, c = self._weigh(jacobian, w, of_finite[0], of_finite[1], finite)
            all_finite, *longest = torch.stack([finite.double().min(), *(b.longest() for b in self._bounds)]).tolist()
            if all_finite:
                self._longest = longest
                return jacobian, w, a, c
            self._bounds, whole = [], self._squared_norms(jacobian, final=True)
            finite = torch.stack([*inside.values(), *whole.values()]).isfinite().all(0)
        if not finite.all():
            kept = finite.nonzero().flatten()
            self._left_out = len(finite) - len(kept)
            jacobian = jacobian.select(kept)
            w, inside, whole = ({group: t[kept] for group, t in part.items()} for part in (w, inside, whole))
        return jacobian, w, *self._weigh(jacobian, w, inside, whole, finite)

    def norms(self) -> Tensor:
        norms = torch.stack([part.double() for part in self._squares.values()]).sum(0).sqrt()
        return torch.full(self._finite.shape, torch.nan, dtype=norms.dtype, device=norms.device).masked_scatter(
            self._finite, norms
        )

    def _squared_norms(self, jacobian: Jacobian, *, final: bool) -> dict[str, Tensor]:
        """Returns the squared norms of the rows in each group of the subspace, if residuals are wanted."""
        groups = {} if self._residual is None else self.basis.groups
        return {group: jacobian.squared_norms(names, final=final).double() for group, names in groups.items()}

    def _weigh(
        self,
        jacobian: Jacobian,
        w: Mapping[str, Tensor],
        inside: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        finite: Tensor,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Returns the clip factors of embeddings and residuals by group, from squared norms of embeddings and rows."""
        self._finite, self._squares = finite, whole or inside
        a = self._factors(self._embedding, inside)
        self._note("embedding", a, finite)
        if self._residual is None:
            return a, None
        slack = {group: _slack(jacobian.rounding(names), w[group]) for group, names in self.basis.groups.items()}
        outside = {group: (whole[group] - inside[group]).clamp(min=0) + slack[group] * whole[group] for group in w}
        c = self._factors(self._residual, outside)
        self._note("residual", c, finite)
        return a, c

    def check_bound(self) -> None:
        for number, bound in enumerate(self._bounds):
            bound.check(None if self._longest is None else self._longest[number])

    def _factors(self, part: ReleasedSum, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._bounds.append(BoundCheck(part.rule))
        return part.factors(squares, self._bounds[-1])

    def _note(self, part: str, factors: Mapping[str, Tensor], finite: Tensor) -> None:
        for group, values in factors.items():
            if len(values) < len(finite):
                zeros = torch.zeros(len(finite), dtype=values.dtype, device=values.device)
                values = zeros.masked_scatter(finite, values)
            self.factors[f"{part} {group}"] = values

    def _residual_sum(self, jacobian: Jacobian, w: Mapping[str, Tensor], c: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns Σᵢ cᵢ gᵢ - Vᵀ Σᵢ cᵢ wᵢ by name."""
        assert self._residual is not None
        inside = self.basis.expand({group: c[group].to(part.dtype) @ part for group, part in w.items()})
        total: dict[str, Tensor] = {}
        for groups in self._residual.members.values():
            names = [name for group in groups for name in self.basis.groups[group]]
            total |= jacobian.restricted(names).weighted_sum(c[groups[0]])
        return {name: part - inside[name].to(part.device) for name, part in total.items()}


def _slack(rounding: float, embedding: Tensor) -> float:
    """Returns a bound on the rounding error of a squared residual norm, relative to the gradient's squared norm."""
    eps = max(rounding, torch.finfo(embedding.dtype).eps)
    return COARSE if eps > 1e-8 and product_rounding(embedding.device, of_matrices=True) else ROUNDING * eps
