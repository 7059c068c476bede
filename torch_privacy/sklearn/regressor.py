# SPDX-License-Identifier: Apache-2.0
"""Provides `PrivateRegressor`, a scikit-learn regressor that trains with differential privacy."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from torch import Tensor

from ..support.validate import Refused
from .arguments import naming_arguments
from .base import PrivateEstimator
from .features import are_outside, checked_bounds, scaled
from .fitting import NetworkPlan, Target

Array = NDArray[Any]


@naming_arguments
@dataclass(eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):
    """Predicts numbers by a network that is trained with differential privacy, with the interface of scikit-learn.

    The network learns the targets, scaled to [-1, 1] by ``target_bounds``, by squared errors. Predictions are clipped
    to these bounds.

    Args:
        target_bounds: public bounds (low, high) of the targets, which must be given; targets are clipped to them.
        epsilon: this and all others are those of `PrivateClassifier`.

    Attributes:
        module_: the trained network, on scaled features, with outputs in [-1, 1] for targets within the bounds.
        spent_: this and all others are those of `PrivateClassifier`.

    Guarantees:
        those of `PrivateClassifier`.

    Raises:
        Refused: ``target_bounds`` is None; and as `PrivateClassifier` does.
        ValueError: targets that are missing or no numbers; and as `PrivateClassifier`.

    Example:
        >>> import numpy as np
        >>> from torch_privacy.sklearn import PrivateRegressor
        >>> x = np.random.default_rng(1).uniform(-1, 1, size=(2000, 2))
        >>> regressor = PrivateRegressor(epsilon=2.0, target_bounds=(0, 10), hidden_units=())
        >>> bool(regressor.fit(x, 5 + 3 * x[:, 0]).score(x, 5 + 3 * x[:, 0]) > 0.9)
        True
    """

    _numeric_targets = True
    _: KW_ONLY
    target_bounds: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any, **unsupported: Any) -> PrivateRegressor:
        """Trains on the rows of X (n, d) and their targets y (n,)."""
        self._fit(X, y, unsupported)
        return self

    def predict(self, X: Any) -> Array:
        """Returns the predicted target of each row, (n,)."""
        outputs = self._outputs(X).reshape(-1)
        low, high = checked_bounds("PrivateRegressor.predict", "target_bounds", self.target_bounds, 1)
        return (np.clip(outputs, -1, 1) + 1) * ((high - low) / 2) + low

    def _check_targets(self, where: str, y: Array) -> None:
        if self.target_bounds is None:
            raise Refused(
                f"{where}: target_bounds=None: give public bounds (low, high) of the targets, such as (0, 100). Bounds "
                "taken from the data would reveal the largest and the smallest target."
            )
        checked_bounds(where, "target_bounds", self.target_bounds, 1)
        if y.dtype.kind not in "biuf" or np.isnan(y).any():
            raise ValueError(f"{where}: y has targets that are missing or no numbers. Leave out these rows.")

    def _target(self, where: str, y: Array, plan: NetworkPlan) -> Target:
        low, high = checked_bounds(where, "target_bounds", self.target_bounds, 1)
        if are_outside(y, low, high):
            warnings.warn(
                f"{where}: values of y lie outside of target_bounds={self.target_bounds!r} and are clipped to them. "
                "Give wider public bounds. This warning is a fact about the private data, which epsilon does not "
                "cover: keep it to yourself.",
                stacklevel=4,
            )
        values = torch.from_numpy(scaled(y.astype(np.float64), low, high).astype(np.float32))
        return Target(values, 1, partial(_squared_errors, where), treated_as_public=("bounds of the targets",))

    def _keep(self, target: Target) -> None:
        pass


def _squared_errors(where: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape not in ((len(targets),), (len(targets), 1)):
        raise ValueError(
            f"{where}: module returned outputs of shape {tuple(outputs.shape)} for {len(targets)} rows: must be "
            f"{(len(targets), 1)}, a prediction for each."
        )
    return (outputs.reshape(len(targets)) - targets.to(outputs.dtype)).square()
