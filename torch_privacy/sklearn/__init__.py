# SPDX-License-Identifier: Apache-2.0
"""Provides scikit-learn estimators that train with differential privacy, and scalers by public bounds."""

try:
    import sklearn as sklearn
except ImportError as error:
    raise ImportError(
        "torch_privacy.sklearn needs scikit-learn. Install it with: pip install 'torch-privacy[sklearn]'"
    ) from error

from .classifier import PrivateClassifier as PrivateClassifier
from .features import PublicScaler as PublicScaler
from .private_scaler import PrivateScaler as PrivateScaler
from .regressor import PrivateRegressor as PrivateRegressor
