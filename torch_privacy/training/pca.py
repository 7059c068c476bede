# SPDX-License-Identifier: Apache-2.0
"""Provides private principal components, from a noisy second-moment matrix, as a scikit-learn transform.

Three short functions are the mechanism: `second_moment` sums, `add_symmetric_noise` makes the sum private,
`leading_eigenvectors` is post-processing. `PrivatePCA` joins them with sampling and the accountant.
"""

from __future__ import annotations

import hashlib
import numbers
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import privacy
from ..mechanisms.noise import KEY_BYTES, Noise, key_from_test_seed
from ..privacy.budget_runs import Reservation
from ..privacy.spent import NOT_PRIVATE, Spent, spent_at_once
from ..sampling.samplers import PoissonSampler
from ..support.ranks import Ranks, num_processes
from ..support.validate import Refused, one_of, plain_number, positive, strictly_between, whole
from ..support.version import __version__
from .bound_data import reserve
from .second_moment import (
    Array,
    add_symmetric_noise,
    bits_for,
    checksum,
    leading_eigenvectors,
    scaled_second_moment,
    unscaled,
)

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import Tags
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("PrivatePCA needs scikit-learn. Install it with: pip install 'torch-privacy[sklearn]'") from error


MOST_ROWS = 2**31 - 1  # sums of squares of as many rows, with 2 * 16 fractional bits, fit in an int64


class PrivatePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Projects rows onto their principal directions, computed with differential privacy.

    ``fit`` releases ``A = Σᵢ uᵢuᵢᵀ + noise_multiplier·Z`` over the rows i of one Poisson sample, with ``uᵢ = xᵢ/‖xᵢ‖``
    and Z symmetric with independent normal entries, of variance 1 on the diagonal and 1/2 off it. The k leading
    eigenvectors V of A are the components, and ``transform(X) = X Vᵀ``. Rows are not centered, and only ``fit``
    normalizes them to length one.

    Args:
        n_components: number of components k, at most the number of features d; None keeps all d.
        noise_multiplier: noise stddev over sensitivity; or give ``target_epsilon`` and ``delta``.
        target_epsilon: calibrates the noise multiplier so that this release alone spends at most this at ``delta``.
        delta: for ``target_epsilon`` and ``spent()``; must be below 1/n.
        sampling_probability: probability that a row joins the sample, in (0, 1]. By default all rows do.
        rows: for several processes (ranks) of ``torch.distributed``. ``"split"``: each passes its own part of the rows
            to ``fit``, and no row is on two of them; ``"same"``: each passes all rows. None for one process.
        budget: the budget of the data, ``tp.Budget.open(path, ...)``, from which each ``fit`` draws; one that does not
            fit is refused before a row is read. With several ranks every rank passes it.
        test_seed: fixes noise and sample, for tests only; every statement then says NOT PRIVATE.

    Attributes:
        components_: (k, d) orthonormal rows, float64; the largest entry of each is positive.
        noisy_matrix_: (d, d) the release A itself, float64: whatever is computed from it costs nothing more.
        eigenvalues_: (d,) all eigenvalues of A, the largest first.
        noise_edge_: ``noise_multiplier·√(2d)``, about the largest eigenvalue of noise alone: components with an
            eigenvalue at or below it are random directions.
        noise_multiplier_: the given or calibrated noise multiplier.
        event_: the event of the release, for the accountant.
        release_: the event with its fingerprint, for ``PrivateTraining(..., prior_releases=[pca.release_])``.
        n_features_in_: number of features d; also ``feature_names_in_`` if the data have names.

    Guarantees:
        - Adding or removing one row changes ``Σ uᵢuᵢᵀ`` by exactly ``uuᵀ`` (for up to 2 million rows), with Frobenius
          norm 1 (0 for a row of zeros). Replacing a row changes it by at most √2. The norm counts entries on both
          sides of the diagonal, and the density of the noise depends only on that norm.
        - Everything kept by the fitted estimator comes from A: it may be published, pickled or cloned.
        - Every ``fit`` draws sample and noise anew from the operating system's secret generator, and discards the keys.
        - Several ranks get one release, and its price. It equals, bit for bit, that of one process with all the rows
          (and the same keys). No row leaves its rank, and the key of the noise stays on rank 0.

    Edge cases: a row of zeros contributes nothing. An empty sample releases only noise. A takes 8 d² bytes: 800 MB for
        10,000 features. With ``rows="split"`` a rank may have none, and two ranks with the same rows are
        refused: these would count twice. Several ranks without ``rows=`` are refused.

    Raises:
        ValueError: NaN or infinite entries, another number of features than in ``fit``, k > d, or a number out of
            range; nothing was released. On several ranks a `Refused`, the same on all, also for ranks that differ in
            settings, features or dtype.
        TypeError: sparse data, raised by scikit-learn.
        ImportError: scikit-learn is not installed (``pip install 'torch-privacy[sklearn]'``).

    Source: Abadi et al. (2016), arXiv:1607.00133, section 4, after Dwork, Talwar, Thakurta & Zhang (2014), "Analyze
    Gauss", Algorithm 1. There all entries on and above the diagonal have variance 1, at the same price; variance 1/2
    off the diagonal results from symmetrizing noise on all d² entries, as in the code of 2016.

    Example:
        >>> import torch_privacy as tp
        >>> x = np.random.default_rng(0).normal(size=(10_000, 20)) * np.linspace(3, 0.1, 20)
        >>> pca = tp.PrivatePCA(n_components=5, noise_multiplier=16.0, delta=1e-5)
        >>> pca.fit_transform(x).shape
        (10000, 5)
        >>> print(pca.spent())
        epsilon in [0.2041, 0.2042] at delta = 1e-05 (add/remove one example, full batch sampling)
    """

    release_: privacy.Release
    noise_multiplier_: float
    event_: privacy.Event
    noisy_matrix_: Array
    eigenvalues_: Array
    components_: Array
    noise_edge_: float

    def __init__(
        self,
        n_components: int | None = None,
        *,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        sampling_probability: float = 1.0,
        rows: str | None = None,
        budget: privacy.DataBudget | None = None,
        test_seed: int | None = None,
    ):
        self.n_components = n_components
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.sampling_probability = sampling_probability
        self.rows = rows
        self.budget = budget
        self.test_seed = test_seed

    def fit(self, X: Any, y: None = None) -> PrivatePCA:
        """Releases the noisy matrix of the rows of X, (n, d), and computes its eigenvectors. Each call is a release.

        With ``rows=`` every rank must call it, and they wait for each other.

        Args:
            X: numpy array, torch tensor, data frame or nested list of finite numbers. Its size is treated as public.
            y: ignored.
        """
        ranks = self._ranks()
        with ranks.together("PrivatePCA.fit, rows"), _refusals(ranks):
            if self.budget is not None and ranks.is_first:
                self.budget.check([(privacy.NoisyCovariance(self._choose_noise(), self.sampling_probability), 1)])
            rows = self._validated(X, [np.float64, np.float32, np.uint8])
        if ranks.size > 1:
            self._check_agreement(rows, ranks)
            rows = rows if self.rows == "split" or ranks.is_first else rows[:0]
        counts = ranks.gather(len(rows))
        first_row, num_rows = sum(counts[: ranks.rank]), sum(counts)
        with ranks.together("PrivatePCA.fit, settings"), _refusals(ranks):
            if not 1 <= num_rows <= MOST_ROWS:
                raise Refused(f"PrivatePCA: {num_rows} rows; must be at least 1 and at most {MOST_ROWS}.")
            k = self._num_components(rows.shape[1])
            self._check_delta(num_rows)
            noise, key = self._choose_noise(), self._key("sampling")
        noise, key = ranks.from_first((noise, key))  # another machine might round the calibrated noise differently
        with ranks.together("PrivatePCA.fit, sums"), _refusals(ranks):
            event = privacy.NoisyCovariance(noise, self.sampling_probability)
            reservation = self._reserved(event, rows, ranks)
            chosen = PoissonSampler(num_rows, self.sampling_probability, key=key).indices(step=0)
            start, end = np.searchsorted(chosen, [first_row, first_row + len(rows)])
            sums = scaled_second_moment(rows, chosen[start:end] - first_row, bits_for(noise))
        ranks.add_at_first(torch.from_numpy(sums))
        with ranks.together("PrivatePCA.fit, release"), _refusals(ranks):
            fitted = self._release(sums, event, k) if ranks.is_first else None
            if reservation is not None and fitted is not None:
                release = fitted["release_"]
                reservation.settle(fingerprints=[release.fingerprint], warning=release.warning)
        vars(self).update(ranks.from_first(fitted))  # all at once: an interrupted fit keeps the earlier release
        return self

    def _reserved(self, event: privacy.Event, rows: Array, ranks: Ranks) -> Reservation | None:
        """Draws the release from the budget of the data, if there is one, on the first rank."""
        if self.budget is None or not ranks.is_first:
            return None
        if ranks.size > 1 and not self.budget.is_bound:
            raise Refused(
                "PrivatePCA: no rank has all rows, to compare them with those of the budget. Do it before: "
                "budget = tp.bind_data(budget, rows)."
            )
        reservation = reserve(self.budget, [(event, 1)], "principal components", rows)
        reservation.begin()
        return reservation

    def _release(self, sums: NDArray[np.int64], event: privacy.NoisyCovariance, k: int) -> dict[str, Any]:
        """Returns the fitted attributes from the exact sums of all rows. Draws the noise: rank 0 alone may do this."""
        noise = event.noise_multiplier
        released = unscaled(sums, bits_for(noise))
        add_symmetric_noise(released, noise, Noise(self._key("noise")))
        fingerprint = hashlib.blake2b(released.tobytes(), digest_size=8).hexdigest()
        eigenvalues, components = leading_eigenvectors(released, k)
        return {
            "release_": privacy.Release(event, fingerprint, "" if self.test_seed is None else NOT_PRIVATE),
            "noise_multiplier_": noise,
            "event_": event,
            "noisy_matrix_": released,
            "eigenvalues_": eigenvalues,
            "components_": components,
            "noise_edge_": noise * (2 * len(released)) ** 0.5,
            "_n_features_out": k,
        }

    def transform(self, X: Any) -> Any:
        """Returns the coordinates (n, k) of the rows of X, (n, d): float32 for float32, otherwise float64.

        A torch tensor gives a tensor on the same device, of the same dtype if that is floating-point.
        """
        check_is_fitted(self)
        rows = self._validated(X, [np.float64, np.float32], reset=False)
        return _like(X, rows @ self.components_.T.astype(rows.dtype))

    def inverse_transform(self, X: Any) -> Any:
        """Returns the points (n, d) with these coordinates (n, k) along the components."""
        check_is_fitted(self)
        least = self._least_rows()
        coordinates = cast(Array, check_array(as_array(X), dtype=[np.float64, np.float32], ensure_min_samples=least))  # pyright: ignore[reportArgumentType]
        if coordinates.shape[1] != len(self.components_):
            raise ValueError(
                f"PrivatePCA.inverse_transform: X has {coordinates.shape[1]} columns; must have one for each of the "
                f"{len(self.components_)} components."
            )
        return _like(X, coordinates @ self.components_.astype(coordinates.dtype))

    def to_layer(self) -> nn.Linear:
        """Returns ``transform`` as the first layer of a network: frozen, float32, without a bias."""
        check_is_fitted(self)
        num_components, num_features = self.components_.shape
        layer = nn.Linear(num_features, num_components, bias=False, device="meta")  # draws no random numbers
        weight = torch.tensor(self.components_, dtype=torch.float32, device="cpu")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    def spent(self, delta: float | None = None) -> Spent:
        """Returns the privacy spent by this release alone, at ``delta`` (by default the one given to the class)."""
        check_is_fitted(self)
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ValueError("PrivatePCA.spent: no delta was given. Pass delta, below 1/n, here or to PrivatePCA.")
        return spent_at_once(privacy.compose([(self.release_.event, 1)]), delta, self.release_.warning)

    def _ranks(self) -> Ranks:
        """Returns the ranks that make this release; refuses several that do not know of each other."""
        one_of("PrivatePCA", [None, "split", "same"], rows=self.rows)
        if self.rows is None and num_processes() > 1:
            raise Refused(
                f"PrivatePCA: rows=None in a group of {num_processes()} processes: each would make a release of its "
                "own, with other components. Pass rows='split' on all ranks if each has a part of the rows, or "
                "rows='same' if each has all of them, and call fit on all ranks. Then they get one release."
            )
        return Ranks.here("PrivatePCA")

    def _least_rows(self) -> int:
        """Returns the smallest number of rows that one process may pass."""
        return 0 if self.rows == "split" else 1

    def _validated(self, X: Any, dtypes: list[type], reset: bool = True) -> Array:
        least = self._least_rows()
        return cast(Array, validate_data(self, as_array(X), dtype=dtypes, ensure_min_samples=least, reset=reset))

    def _check_agreement(self, rows: Array, ranks: Ranks) -> None:
        """Refuses ranks with other settings, another kind of rows, or rows that are not what ``rows=`` says."""
        settings = {name: plain_number(value) for name, value in self.get_params().items() if name != "budget"}
        settings["budget"] = repr(self.budget)
        names = getattr(self, "feature_names_in_", None)
        of_rows = {
            "number of features": rows.shape[1],
            "dtype": str(rows.dtype),
            "names of features": None if names is None else repr(list(names)),
        }
        versions = {"version of torch_privacy": __version__, "version of numpy": np.__version__}  # of random numbers
        cure = "All ranks must have the same settings, and rows of the same kind."
        ranks.check_same("PrivatePCA", settings | of_rows | versions, cure)
        parts = ranks.gather(checksum(rows) if len(rows) else None)
        if self.rows == "same" and len(set(parts)) > 1:
            raise Refused(
                "PrivatePCA: rows='same', but the ranks have different rows. Pass the same rows on all ranks, or "
                "rows='split' if each has a part of them."
            )
        some = [part for part in parts if part is not None]
        if self.rows == "split" and len(set(some)) < len(some):
            same = [rank for rank, part in enumerate(parts) if some.count(part) > 1]
            raise Refused(
                f"PrivatePCA: rows='split', but ranks {', '.join(map(str, same))} have the same rows: each would count "
                "more than once, at the price of one. Pass each rank its own part, such as X[rank::num_ranks], or "
                "rows='same'."
            )

    def _num_components(self, num_features: int) -> int:
        if self.n_components is None:
            return num_features
        is_integer = isinstance(self.n_components, numbers.Integral) and not isinstance(self.n_components, bool)
        k = int(self.n_components) if is_integer else self.n_components  # grid searches pass numpy's integers
        whole("PrivatePCA", at_least=1, n_components=k)
        if k > num_features:
            raise ValueError(f"PrivatePCA: n_components={k} must be at most the number of features, {num_features}.")
        return k

    def _check_delta(self, num_rows: int) -> None:
        if self.delta is not None:
            hint = f"It must be below 1/n for the {num_rows} rows; 1 / (10 n) or less is usual."
            strictly_between("PrivatePCA", 0, 1 / num_rows, delta=plain_number(self.delta), hint=hint)

    def _choose_noise(self) -> float:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                f"PrivatePCA: noise_multiplier={self.noise_multiplier!r} and target_epsilon={self.target_epsilon!r}: "
                "give exactly one of the two."
            )
        if self.target_epsilon is None:
            assert self.noise_multiplier is not None
            positive("PrivatePCA", noise_multiplier=plain_number(self.noise_multiplier))
            return float(self.noise_multiplier)
        if self.delta is None:
            raise ValueError("PrivatePCA: target_epsilon needs delta, a number below 1/n such as 1e-5.")
        probability = self.sampling_probability
        return privacy.calibrate(self.target_epsilon, self.delta, sampling_probability=probability, num_steps=1)

    def _key(self, purpose: str) -> bytes:
        """Returns fresh secret bytes; with a test seed, bytes that depend only on seed and purpose."""
        return (
            secrets.token_bytes(KEY_BYTES)
            if self.test_seed is None
            else key_from_test_seed(self.test_seed, f"PrivatePCA {purpose}")
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.test_seed is None
        assert tags.transformer_tags is not None
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


@contextmanager
def _refusals(ranks: Ranks) -> Iterator[None]:
    """Raises scikit-learn's errors as refusals where there are several ranks, of which all then raise the same."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if ranks.size == 1 or isinstance(error, Refused):
            raise
        raise Refused(str(error)) from error


def as_array(x: Any) -> Any:
    """Converts a tensor of any device and dtype to numpy; returns anything else unchanged."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def _like(x: Any, result: Array) -> Any:
    """Returns the result as the kind of array, device and floating-point dtype of the input x."""
    if not isinstance(x, Tensor):
        return result
    dtype = x.dtype if x.is_floating_point() else torch.float64
    return torch.from_numpy(result).to(x.device, dtype)
