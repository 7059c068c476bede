# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's own checks of estimators, and what keeps to them."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from torch_privacy.sklearn import PrivateClassifier, PrivateRegressor, PrivateScaler, PublicScaler

# Little noise and a test seed, as the checks ask for 83 % accuracy on 300 examples, and for two equal fits to them.
SETTINGS = {
    "epsilon": 200.0, "epochs": 6, "learning_rate": 0.2, "hidden_units": (), "bounds": (-4, 4), "refits": "separate",
    "assume_independent": "a linear map", "test_seed": 1,
}  # fmt: skip
ESTIMATORS = [
    PrivateClassifier(classes="public", **SETTINGS),
    PrivateRegressor(target_bounds=(-5, 5), **SETTINGS),
]
SCALERS = [PublicScaler((-4, 4)), PrivateScaler((-4, 4), noise_multiplier=0.1, refits="separate", test_seed=1)]

CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}-{number}")
    for each in [*SCALERS, *ESTIMATORS]
    for number, (estimator, check) in enumerate(estimator_checks_generator(each))
    if check.func.__name__ != "check_array_api_input"  # of estimators that say that they support it
]


@pytest.mark.filterwarnings("ignore:PrivateClassifier.fit", "ignore:PrivateRegressor.fit", "ignore:PrivateScaler.fit")
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_checks_of_scikit_learn(estimator, check):
    """All of them pass: those that `parametrize_with_checks` runs, with no expected failure."""
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_noise_differs_from_fit_to_fit_without_a_test_seed(estimator):
    """So that the checks which compare two fits must fail; random_state changes nothing about that."""
    x = np.linspace(-1, 1, 60).reshape(20, 3)
    y = (x[:, 0] > 0).astype(int)
    weights = []
    for _ in range(2):
        fitted = clone(estimator).set_params(test_seed=None, random_state=0).fit(x, y)
        weights.append(fitted.module_[0].weight)
        assert fitted.__sklearn_tags__().non_deterministic
    assert (weights[0] != weights[1]).all()
