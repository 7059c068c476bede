# SPDX-License-Identifier: Apache-2.0
"""Scales features by public bounds, and notices features that were scaled by statistics of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from .refits import note_scaled

Array = NDArray[Any]
Bounds = tuple[Any, Any]  # low and high: numbers, or arrays with one number per feature

FLOATS = [np.float64, np.float32]
AS_STANDARDIZED = 1e-5  # how close to 0 and 1 a mean and a standard deviation are after a StandardScaler, in float32


def checked_bounds(where: str, name: str, bounds: Any, num_columns: int) -> tuple[Array, Array]:
    """Returns lower and upper bounds, (num_columns,) each; refuses what is no pair of finite numbers or arrays."""
    message = f"{where}: {name}={bounds!r} must be (low, high): two finite numbers with low < high"
    try:
        low, high = (np.broadcast_to(np.asarray(bound, np.float64), (num_columns,)) for bound in bounds)
    except (TypeError, ValueError):
        per_column = f", or two arrays with one number for each of {num_columns} features" if num_columns > 1 else ""
        raise ValueError(f"{message}{per_column}.") from None
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(f"{message}.")
    return low, high


def scaled(x: Array, low: Array, high: Array) -> Array:
    """Returns ``2 (clip(x, low, high) - low) / (high - low) - 1``, in [-1, 1]; keeps the dtype."""
    clipped = np.clip(x.astype(np.float64), low, high)
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    return np.clip((clipped - middle) / half, -1, 1).astype(x.dtype)


def are_outside(x: Array, low: Array, high: Array) -> bool:
    """True if a value lies outside the bounds by more than the rounding of float32."""
    slack = 1e-6 * (high - low)
    return bool(((x < low - slack) | (x > high + slack)).any())


def standardized_columns(x: Array) -> Array:
    """Returns the columns with mean 0 and standard deviation 1, which a scaler fitted to these very data leaves.

    Columns of -1 and 1 alone are left out: balanced answers have this mean and deviation, too.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(np.float64)
        is_standard = (abs(x.mean(0)) < AS_STANDARDIZED) & (abs(x.std(0) - 1) < AS_STANDARDIZED)
    return np.flatnonzero(is_standard & (abs(abs(x) - 1) > AS_STANDARDIZED).any(0))


def validated(estimator: Any, *arrays: Any, **rules: Any) -> Any:
    """Returns what `validate_data` returns; for missing values its error recommends imputers, which are not private."""
    try:
        return validate_data(estimator, *arrays, **rules)
    except ValueError as error:
        first, *_ = str(error).splitlines()
        if not first.startswith("Input X contains NaN"):
            raise
    scalers = [one for one in getattr(estimator, "prior_releases", ()) if hasattr(one, "center_")]
    kept = (
        f" What {type(scalers[0]).__name__} has released is not lost: put the imputer behind it, and "
        "sklearn.frozen.FrozenEstimator(scaler) in its place, which does not fit it again."
        if scalers
        else ""
    )
    raise ValueError(
        f"{type(estimator).__name__}: {first} Fill them with a public constant, SimpleImputer(strategy='constant', "
        f"fill_value=0); an imputer that learns from the data puts its numbers into the model without noise.{kept}"
    )


class PublicScaler(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Clips features to public bounds and maps these to [-1, 1]: ``2 (clip(x, low, high) - low) / (high - low) - 1``.

    It is the scaler to put before a `PrivateClassifier` or a `PrivateRegressor` in a pipeline. ``StandardScaler`` and
    others compute their numbers from the data, which no epsilon covers.

    Args:
        bounds: (low, high), each a number or an array with one number per feature. They must be known without looking
            at the data, such as 0 and 120 for an age.

    Attributes:
        n_features_in_: number of features; also ``feature_names_in_`` if the data have names.

    Guarantees:
        - The scaler keeps nothing of the data but the number and the names of the features.
        - Each row of the result depends on that row alone.

    Raises:
        ValueError: bounds that are no such pair, NaN or infinite entries.
        TypeError: sparse data, raised by scikit-learn.

    Example:
        >>> PublicScaler(bounds=([0, 0], [120, 10])).fit_transform([[30.0, 5.0], [150.0, -1.0]]).tolist()
        [[-0.5, 0.0], [1.0, -1.0]]
    """

    def __init__(self, bounds: Bounds = (-1.0, 1.0)):
        self.bounds = bounds

    def fit(self, X: Any, y: Any = None) -> PublicScaler:
        """Checks the bounds against the number of features; fits to scaled rows are noted as fits to these rows."""
        X = validated(self, X, dtype=FLOATS)
        note_scaled(X, scaled(X, *checked_bounds("PublicScaler", "bounds", self.bounds, X.shape[1])))
        return self

    def transform(self, X: Any) -> Array:
        """Returns the scaled rows, (n, d), in [-1, 1]."""
        check_is_fitted(self, "n_features_in_")
        X = validated(self, X, reset=False, dtype=FLOATS)
        return scaled(X, *checked_bounds("PublicScaler", "bounds", self.bounds, X.shape[1]))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        assert tags.transformer_tags is not None
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
