# SPDX-License-Identifier: Apache-2.0
"""Provides what `PrivateClassifier` and `PrivateRegressor` share: checks, training, memory of fits."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import nn
from torch.utils.data import TensorDataset

from .. import privacy
from ..mechanisms.clipping import ClippingRule
from ..privacy.spent import Spent
from ..support.validate import Refused, positive
from .features import FLOATS, Bounds, are_outside, checked_bounds, standardized_columns, validated
from .fitting import (
    STANDARDIZED,
    NetworkPlan,
    Target,
    check_clipping,
    check_folder,
    check_makers,
    check_trainable,
    new_network,
    plan_of,
    prior_of,
    rows_for,
    train,
)
from .refits import RemembersFits, begin_fit

Array = NDArray[Any]

ROWS = 4096  # evaluated at once by a module of the user's own


@dataclass(eq=False, repr=False)
class PrivateEstimator(RemembersFits, BaseEstimator, ABC):
    """Holds what both estimators share: parameters, checks, training, memory of fits.

    As a dataclass, it stores the arguments as they are, which scikit-learn requires.
    """

    epsilon: float = 2.0
    delta: float | None = None
    _: KW_ONLY
    hidden_units: int | Sequence[int] = 64
    module: Callable[[int, int], nn.Module] | None = None
    epochs: float = 20
    batch_size: float | None = None
    learning_rate: float = 0.01
    clip_norm: float = 1.0
    clipping: ClippingRule | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    average: float | None = 0.1
    bounds: Bounds = (-1.0, 1.0)
    refits: str = "refuse"
    prior_releases: Sequence[privacy.Release | BaseEstimator] = ()
    budget: privacy.DataBudget | None = None
    microbatch_size: int | None = None
    run_folder: Path | str | None = None
    assume_independent: str | None = None
    random_state: Any = None
    test_seed: int | None = None

    _numeric_targets = False
    module_: nn.Module = field(init=False)
    spent_: Spent = field(init=False)
    statement_: dict[str, Any] = field(init=False)
    n_iter_: int = field(init=False)
    n_features_in_: int = field(init=False)

    def _fit(self, X: Any, y: Any, unsupported: dict[str, Any]) -> None:
        where = f"{type(self).__name__}.fit"
        self._check_arguments(where, unsupported)
        X, y = validated(self, X, y, dtype=FLOATS, ensure_min_samples=2, y_numeric=self._numeric_targets)
        low, high = checked_bounds(where, "bounds", self.bounds, X.shape[1])
        positive(where, epsilon=self.epsilon)
        self._check_targets(where, y)
        plan = plan_of(self, len(X))
        counted = [release.fingerprint for release in prior_of(self) if isinstance(release, privacy.Release)]
        fit = begin_fit(where, self.refits, self._known_origin(), X, plan.releases, plan.delta, counted)
        target = Target()
        try:
            fit.warning = self._warn_of(where, X, low, high)
            check_folder(self, fit)
            if self._releases_of_targets:
                check_trainable(self, plan, X, low, high)
            target = self._target(where, y, plan)
            network = new_network(self, X.shape[1], target.num_outputs)
            data = TensorDataset(rows_for(network, X, low, high), target.values)
        except BaseException as error:
            released = getattr(error, "target", target).releases
            fit.end([(release.event, 1) for release in released], fit.warning)
            raise
        fitted = train(self, plan, network, data, target, fit)
        self.module_, self.spent_, self.n_iter_ = fitted.module, fitted.spent, fitted.num_steps
        self.statement_ = self._stated(fitted.statement, target)
        self._keep(target)

    def _check_arguments(self, where: str, unsupported: dict[str, Any]) -> None:
        if "sample_weight" in unsupported:
            if unsupported.pop("sample_weight") is not None:
                raise Refused(
                    f"{where}: sample_weight is refused, since weights are usually computed from all examples, as "
                    "those of class_weight='balanced' are, and no epsilon covers that. Leave it out."
                )
        if unsupported:
            raise TypeError(f"{where}() got an unexpected keyword argument {next(iter(unsupported))!r}")
        check_makers(where, self.module, self.optimizer)
        check_clipping(where, self.clipping)

    @property
    def _releases_of_targets(self) -> bool:
        """True if something is released of the targets before the training, so that a mistake must be seen earlier."""
        return False

    @abstractmethod
    def _check_targets(self, where: str, y: Array) -> None:
        """Refuses targets that cannot be trained on; nothing was released yet."""

    @abstractmethod
    def _target(self, where: str, y: Array, plan: NetworkPlan) -> Target:
        """Returns the targets as a tensor, with their losses and with what finding them released."""

    @abstractmethod
    def _keep(self, target: Target) -> None:
        """Sets the fitted attributes that belong to the targets."""

    def _warn_of(self, where: str, x: Array, low: Array, high: Array) -> str | None:
        """Warns of values outside of the bounds, and of a scaler fitted to the data; returns the latter's statement."""
        if are_outside(x, low, high):
            warnings.warn(
                f"{where}: values of X lie outside of bounds={self.bounds!r} and are clipped to them. Give wider "
                "public bounds, or put PublicScaler(bounds) in front. This warning is a fact about the private data, "
                "which epsilon does not cover: keep it to yourself.",
                stacklevel=4,
            )
        columns = standardized_columns(x)
        if not len(columns):
            return None
        name = getattr(self, "feature_names_in_", np.arange(x.shape[1]))[columns[0]]
        warning = STANDARDIZED.format(repr(str(name)))
        warnings.warn(
            f"{where}: {warning}. Use PublicScaler or PrivateScaler with public bounds instead.", stacklevel=4
        )
        return warning

    def _stated(self, statement: dict[str, Any], target: Target) -> dict[str, Any]:
        """Returns the statement of the training with what the estimator adds to it."""
        not_covered = [
            "what was computed from the data before fit, such as the numbers of a StandardScaler",
            "scores on private data, such as those of score and cross_val_score",
            "warnings about values outside of the bounds",
            *(["other fits to the same data (refits='separate')"] if self.refits == "separate" else []),
        ]
        public = ["names and bounds of the features", "random_state", *target.treated_as_public]
        return statement | {
            "estimator": type(self).__name__,
            "target_epsilon": float(self.epsilon),
            "treated_as_public": [*statement["treated_as_public"], *public],
            "not_covered": [*statement["not_covered"], *not_covered],
            **target.statement,
        }

    def _outputs(self, X: Any) -> Array:
        """Returns the outputs of the network for these rows, float64; of the estimator's own layers in float64."""
        check_is_fitted(self, "module_")
        X = validated(self, X, reset=False, dtype=FLOATS)
        low, high = checked_bounds(type(self).__name__, "bounds", self.bounds, X.shape[1])
        rows = rows_for(self.module_, X, low, high)
        with torch.no_grad():
            if self.module is None:  # so that no output depends on the other rows in its last bits
                return copy.deepcopy(self.module_).double()(rows.double()).numpy()
            return torch.cat([self.module_(part) for part in rows.split(ROWS)]).double().numpy()

    @property
    def partial_fit(self) -> NoReturn:
        """Raises an ``AttributeError``, so that scikit-learn sees none."""
        raise AttributeError(
            f"{type(self).__name__} has no partial_fit: it would spend epsilon at every call. Fit all the data at "
            "once; microbatch_size limits memory, and PrivateTraining trains in a loop of your own."
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.test_seed is None
        return tags
