# SPDX-License-Identifier: Apache-2.0
"""Scales features by centers and spreads that it learns privately within public bounds."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from .. import privacy
from ..mechanisms.histograms import SMALLEST, ends_of_numbers
from ..mechanisms.noise import Noise, key_from_test_seed
from ..mechanisms.scales import COARSE, Numbers, Scale, find_ranges, scale_of
from ..privacy.spent import NOT_PRIVATE, Spent, spent_at_once
from ..support.validate import positive, quoted
from ..training.bound_data import reserve
from .arguments import naming_arguments
from .features import FLOATS, Bounds, checked_bounds
from .fitting import default_delta, of_all_fits
from .refits import RemembersFits, begin_fit, note_scaled

Array = NDArray[Any]

SIZES = 10  # powers of ten between the largest bound and the smallest values that differ from 0
HISTOGRAMS = 2


@dataclass(frozen=True)
class FeatureScales:
    """Holds what becomes [-1, 1] of each feature, all (d,): see `PrivateScaler`."""

    center: Array
    scale: Array
    log_unit: Array
    is_learned: Array

    @classmethod
    def of(cls, scales: Sequence[Scale], found: Array, low: Array, high: Array) -> FeatureScales:
        """Returns those of the features, within their bounds; ``found`` says where something stood out."""
        unit = np.array([np.nan if scale.log_unit is None else scale.log_unit for scale in scales])
        ends = np.clip(np.array([[scale.low, scale.high] for scale in scales]).T, low, high)
        first, last = (_logarithms(end, unit) for end in ends)
        return cls(first / 2 + last / 2, last / 2 - first / 2, unit, found)

    def scaled(self, x: Array) -> Array:
        """Returns the rows (n, d), within their bounds, in [-1, 1]."""
        return np.clip((_logarithms(x, self.log_unit) - self.center) / self.scale, -1, 1)


def _logarithms(x: Array, unit: Array) -> Array:
    """Returns f of the rows (n, d), or of one (d,)."""
    return np.where(np.isnan(unit), x, np.log1p(np.maximum(x, 0) / np.nan_to_num(unit, nan=1.0)))


@naming_arguments
class PrivateScaler(RemembersFits, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Centers and scales features privately: ``clip((f(clip(x, low, high)) - center) / scale, -1, 1)``.

    It is for features with honest public bounds that are much wider than the values. ``fit`` learns where most values
    of each feature lie, from two noisy histograms of all d features: about two standard deviations to both sides of the
    middle become [-1, 1]. f is ``log(1 + x / unit)`` for features with ``low >= 0`` that turn out to be skewed, and
    otherwise the identity. The result suits the default bounds of `PrivateClassifier` and `PrivateRegressor`.

    Args:
        bounds: (low, high), each a number or an array with one number per feature. They must be known without looking
            at the data; values beyond are clipped before anything else.
        epsilon: what ``fit`` spends at most at ``delta``, alone: a small share of the whole, such as 0.2.
        noise_multiplier: in place of ``epsilon``: the noise of both histograms together, over their sensitivity.
        delta: below 1/n; by default 1e-5, or 1/(10 n) if that is less.
        refits: "refuse", "count" or "separate": what ``fit`` does if the data may have been used before, as for
            `PrivateClassifier`. In front of one with "count", its ``spent_`` covers both.
        budget: the budget of the data, ``tp.Budget.open(path, ...)``, from which each ``fit`` draws.
        test_seed: fixes the noise, for tests only; every statement then says NOT PRIVATE.

    Attributes:
        scales_: what was learned; of it:
        center_, scale_: (d,) middle and half length of what becomes [-1, 1], as values of f.
        log_unit_: (d,) unit of the logarithm; NaN for the identity.
        is_learned_: (d,) False where nothing stood out of the noise; the bounds are then taken for the scale.
        release_: the event with its fingerprint, for ``prior_releases=[scaler]`` or ``[scaler.release_]``.
        spent_: the privacy spent (`Spent`); prints as one line.
        n_features_in_: number of features d; also ``feature_names_in_`` if the data have names.

    Guarantees:
        - Each count has noise of standard deviation ``noise_multiplier √2 √d``. Adding, removing or zeroing out one row
          changes at most one count of each feature by 1 in each histogram: √d in the L2 norm. The two together are one
          Gaussian release with ``noise_multiplier``.
        - What ``fit`` keeps is computed from the noisy counts, the bounds and n alone, and may be published.
        - Each row of the result depends on that row and on what was kept.
        - An estimator that is fitted to the scaled rows in the same process is refused, unless it counts the release:
          by ``prior_releases=[scaler]``, its epsilon then covers both, or by ``refits="count"``. Steps in between that
          change the rows, such as ``PolynomialFeatures``, hide them: there ``prior_releases`` is yours to remember.

    Edge cases: NaN is in no count, and stays NaN: put ``SimpleImputer(strategy="constant", fill_value=0)``, the center,
        between this and an estimator, which refuses NaN. Infinite values are clipped like all others.

    Raises:
        Refused: a fit that would spend epsilon on the same data again, that does not fit into the budget, or to rows
            that were copied.
        ValueError: bounds that are no such pair, not exactly one of ``epsilon`` and ``noise_multiplier``, or a number
            out of range; nothing was released.
        TypeError: sparse data, raised by scikit-learn.

    Source: the histograms are those of `torch_privacy.tables.learn`.

    Example:
        >>> import numpy as np
        >>> from sklearn.pipeline import make_pipeline
        >>> from torch_privacy.sklearn import PrivateClassifier, PrivateScaler
        >>> x = np.random.default_rng(0).normal(170, 10, size=(5000, 2))
        >>> scaler = PrivateScaler(bounds=(0, 10_000), epsilon=0.3)
        >>> classifier = PrivateClassifier(epsilon=2.0, classes=[False, True], prior_releases=[scaler])
        >>> pipeline = make_pipeline(scaler, classifier).fit(x, x[:, 0] > 170)
        >>> bool((abs(scaler.center_ - 170) < 30).all()), bool(pipeline.score(x, x[:, 0] > 170) > 0.9)
        (True, True)
        >>> print(classifier.spent_)
        epsilon in [1.999, 2.000] at delta = 1e-05 (zero out one example, full batch + Poisson sampling)
    """

    release_: privacy.Release
    spent_: Spent
    scales_: FeatureScales

    def __init__(
        self,
        bounds: Bounds = (-1.0, 1.0),
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        refits: str = "refuse",
        budget: privacy.DataBudget | None = None,
        test_seed: int | None = None,
    ):
        self.bounds = bounds
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.refits = refits
        self.budget = budget
        self.test_seed = test_seed

    def fit(self, X: Any, y: Any = None) -> PrivateScaler:
        """Learns center and scale of the columns of X, (n, d). Each call is a release; ``y`` is ignored."""
        where = "PrivateScaler.fit"
        X = self._validated(X, reset=True)
        low, high = checked_bounds(where, "bounds", self.bounds, X.shape[1])
        delta = default_delta(where, self.delta, len(X))
        event = privacy.Gaussian(self._noise(where, delta))
        fit = begin_fit(where, self.refits, self._known_origin(), X, [(event, 1)], delta)
        warning, reservation = None if self.test_seed is None else NOT_PRIVATE, None
        try:
            if self.budget is not None:
                reservation = reserve(self.budget, [(event, 1)], "scales of features", X)
                reservation.begin()
        except BaseException:
            fit.end([], warning)
            raise
        fit.end([(event, 1)], warning)
        scales, found, digest = self._learned(X, low, high, event.noise_multiplier)
        if reservation is not None:
            reservation.settle(fingerprints=[digest], warning=warning or "")
        self.release_ = privacy.Release(event, digest, warning or "")
        self.scales_ = FeatureScales.of(scales, found, low, high)
        fit.fingerprint = digest
        note_scaled(X, self._scaled(X))
        spent = spent_at_once(privacy.compose([(event, 1)]), delta)
        self.spent_, _ = of_all_fits(fit, spent, {}, warning)
        if not found.all():
            names = getattr(self, "feature_names_in_", np.arange(X.shape[1]))[~found]
            warnings.warn(
                f"{where}: nothing stands out of the noise in {quoted(map(str, names), at_most=5)}, so the bounds are "
                "the scale there. More rows, a larger epsilon or fewer features help.",
                stacklevel=2,
            )
        return self

    def transform(self, X: Any) -> Array:
        """Returns the scaled rows, (n, d), in [-1, 1]; NaN stays."""
        check_is_fitted(self, "scales_")
        return self._scaled(self._validated(X, reset=False))

    @property
    def center_(self) -> Array:
        """Returns (d,) the middle of what becomes [-1, 1], as values of f."""
        return self.scales_.center

    @property
    def scale_(self) -> Array:
        """Returns (d,) half the length of what becomes [-1, 1], as values of f."""
        return self.scales_.scale

    @property
    def log_unit_(self) -> Array:
        """Returns (d,) the unit of the logarithm; NaN for the identity."""
        return self.scales_.log_unit

    @property
    def is_learned_(self) -> Array:
        """Returns (d,) False where nothing stood out of the noise."""
        return self.scales_.is_learned

    def _validated(self, X: Any, reset: bool) -> Array:
        return cast(Array, validate_data(self, X, reset=reset, dtype=FLOATS, ensure_all_finite=False))

    def _noise(self, where: str, delta: float) -> float:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"{where}: epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r}: give exactly one "
                "of the two, such as epsilon=0.2, a small share of the whole."
            )
        if self.noise_multiplier is not None:
            positive(where, noise_multiplier=self.noise_multiplier)
            return float(self.noise_multiplier)
        assert self.epsilon is not None
        positive(where, epsilon=self.epsilon)
        return privacy.calibrate(float(self.epsilon), delta, sampling_probability=1.0, num_steps=1)

    def _learned(self, X: Array, low: Array, high: Array, noise_multiplier: float) -> tuple[list[Scale], Array, str]:
        """Returns the scales, whether something stood out, and a digest of what was released."""
        d = X.shape[1]
        stddev = math.nextafter(noise_multiplier * math.sqrt(HISTOGRAMS * d), math.inf)
        noise = Noise(None if self.test_seed is None else key_from_test_seed(self.test_seed, "PrivateScaler"))
        released: list[Array] = []

        def release(counts: NDArray[np.int64]) -> Array:
            noisy = torch.from_numpy(counts.astype(np.float64))
            noise.add_to(len(released), {"counts": noisy}, stddev)
            released.append(noisy.numpy())
            return released[-1]

        # the bins are about sizes from 1e-15 on: in this unit they reach from the largest bound down
        sizes = np.ceil(np.log10(np.maximum(abs(low), abs(high))))
        units = 10.0 ** np.clip(sizes - (SIZES + SMALLEST), -300, 300)
        limits = [(float(a), float(b)) for a, b in zip(low / units, high / units, strict=True)]
        values = np.clip(X.astype(np.float64), low, high) / units  # first: a warning of an overflow would show one row
        columns = {j: Numbers(values[:, j], ends_of_numbers(COARSE), limits[j]) for j in range(d)}
        ranges = find_ranges(columns, stddev, release)
        scales = []
        for j, unit in enumerate(units):
            one = scale_of(ranges[j], limits[j], stddev, may_log=True) if j in ranges else Scale(*limits[j])
            log_unit = None if one.log_unit is None else one.log_unit * unit
            scales.append(Scale(one.low * unit, one.high * unit, log_unit))
        digest = hashlib.sha256(b"".join(part.tobytes() for part in released)).hexdigest()
        return scales, np.array([j in ranges for j in range(d)]), digest

    def _scaled(self, X: Array) -> Array:
        low, high = checked_bounds("PrivateScaler", "bounds", self.bounds, X.shape[1])
        values = np.clip(X.astype(np.float64), low, high)  # so that nothing overflows
        return self.scales_.scaled(values).astype(X.dtype)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        assert tags.transformer_tags is not None
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.allow_nan = True
        tags.non_deterministic = self.test_seed is None
        return tags
