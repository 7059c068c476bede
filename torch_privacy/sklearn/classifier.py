# SPDX-License-Identifier: Apache-2.0
"""Provides `PrivateClassifier`, a scikit-learn classifier that trains with differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor
from torch.nn import functional as F

from .. import privacy
from ..privacy.rounding import round_up, short
from ..support.validate import Refused, quoted
from .arguments import naming_arguments
from .base import PrivateEstimator
from .classes import check_one_type, events_of, find_classes, noise_and_threshold
from .fitting import NetworkPlan, Target, prior_of

Array = NDArray[Any]

UNLISTED = -100  # the index of a class that was not found: F.cross_entropy gives such an example the loss 0


@naming_arguments
@dataclass(eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, PrivateEstimator):
    """Classifies by a network that is trained with differential privacy, with the interface of scikit-learn.

    ``fit`` trains by `PrivateTraining`: Poisson batches, per-example clipping, Gaussian noise. ``predict``,
    ``predict_proba`` and ``score`` add no noise. They reveal no more about the training data than the network does.

    Args:
        epsilon: calibrates the noise so that one ``fit`` spends at most this at ``delta``, prior releases included.
        delta: must be below 1/n; by default 1e-5, or 1/(10 n) if that is less.
        classes: the classes, if they are known without looking at the data. By default a part of epsilon is spent on
            finding those with enough examples (at epsilon 2 about 40). "public": those in ``y`` count as public.
        hidden_units: width of the hidden layer of ReLU units, or a sequence of widths; () for a linear model.
        module: makes a network of your own, in place of these layers: a function of the numbers of inputs and outputs
            that returns an ``nn.Module``, such as ``torch.nn.Linear``.
        epochs: passes over the data, on average.
        batch_size: mean size of the Poisson batches; by default n/50, at least 256, at most n.
        learning_rate: of the optimizer.
        clip_norm: bound on the L2 norm of each example's gradient. A small one pushes rows that are right already as
            hard as others, and the probabilities become too sure.
        clipping: another clipping rule in place of ``Flat(clip_norm)``, such as ``torch_privacy.Automatic()``.
        optimizer: ``optimizer(parameters, lr=learning_rate)`` makes the optimizer; by default ``torch.optim.Adam``.
        average: share of the steps that the moving average of the weights spans, in (0, 1]; None for the last weights.
        bounds: public bounds (low, high) of the features, numbers or arrays with one number per feature. Values are
            clipped to them, with a warning in ``fit``, and mapped to [-1, 1].
        refits: "refuse", "count" or "separate": what ``fit`` does if the data may have been trained on before (below).
        prior_releases: earlier releases of the same data that are used here, such as ``[pca.release_]``; or fitted
            transformers that made them. A `PrivateScaler` in front in a pipeline is fitted in time.
        budget: the budget of the data, ``tp.Budget.open(path, ...)``, from which ``fit`` draws once; one that does not
            fit is refused. It needs ``run_folder`` and ``classes``.
        microbatch_size: largest number of examples computed at once, to limit memory.
        run_folder: new folder for the files of the training.
        assume_independent: a reason, in words, why examples do not depend on each other in ``module``; no batch is
            rehearsed then.
        random_state: seed of the initial weights, which are public. Noise and batches never depend on it.
        test_seed: fixes noise and batches, for tests only; every statement then says NOT PRIVATE.

    Attributes:
        classes_: the classes, sorted.
        module_: the trained network, on scaled features.
        spent_: the privacy spent (`Spent`); prints as one line.
        statement_: everything that determines the guarantee, as plain data, and what was treated as public.
        n_iter_: number of steps.
        n_features_in_: number of features; also ``feature_names_in_`` if the data have names.

    Guarantees:
        - What ``fit`` keeps is (epsilon, delta)-private under zeroing out one row of X and y, given what
          ``statement_["treated_as_public"]`` lists, such as the number of rows.
        - By default each row is trained on once in a process. A further fit to a row is refused before anything is
          released, and so is every fit of a clone, as grids, cross-validation and ensembles make them: the message
          names the price of a private search. An estimator from another process is refused, too. With
          ``refits="count"`` ``spent_`` and ``statement_`` are about all fits to these data in the process, with
          "separate" about one fit each, and the statement says so.
        - An estimator can be pickled after ``fit``, and ``predict`` is deterministic.

    Edge cases: an example of a class that is not among ``classes_`` is not learned from. A standardized column (mean 0,
        standard deviation 1) shows that a scaler was fitted to these data: a warning, and the statement says NOT
        PRIVATE.

    Raises:
        Refused: a fit that would spend epsilon on the same data again, that does not fit into the budget, or to rows
            that were copied;
            ``sample_weight``; whatever `PrivateTraining` refuses.
        ValueError: a parameter out of range, labels that ``classes`` lacks, NaN entries, fewer than
            two classes.
        TypeError: sparse data, raised by scikit-learn.

    Source: Abadi et al. (2016), Algorithm 1, by `PrivateTraining`.

    Example:
        >>> import numpy as np
        >>> from torch_privacy.sklearn import PrivateClassifier
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(2000, 2))
        >>> classifier = PrivateClassifier(epsilon=2.0, classes=[False, True], hidden_units=())
        >>> classifier.fit(x, x[:, 0] > 0).score(x, x[:, 0] > 0) > 0.9
        True
        >>> print(classifier.spent_)  # doctest: +ELLIPSIS
        epsilon in [1.999..., 2.000] at delta = 1e-05 (zero out one example, Poisson sampling)
    """

    _: KW_ONLY
    clip_norm: float = 3.0
    classes: Sequence[Any] | str | None = None
    classes_: Array = field(init=False)

    def fit(self, X: Any, y: Any, **unsupported: Any) -> PrivateClassifier:
        """Trains on the rows of X (n, d) and their classes y (n,)."""
        if self.classes is None:
            check_one_type("PrivateClassifier.fit", y)
        self._fit(X, y, unsupported)
        return self

    def predict(self, X: Any) -> Array:
        """Returns the most probable class of each row, (n,)."""
        outputs = self._outputs(X)
        return self.classes_[outputs.argmax(1)]

    def predict_log_proba(self, X: Any) -> Array:
        """Returns the logarithms of `predict_proba`, (n, classes)."""
        return log_softmax(self._outputs(X), axis=1)

    def predict_proba(self, X: Any) -> Array:
        """Returns the probability of each class, (n, classes), in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    @property
    def _releases_of_targets(self) -> bool:
        return self.classes is None

    def _check_targets(self, where: str, y: Array) -> None:
        try:
            check_classification_targets(y)
        except TypeError as error:  # such as None among texts
            raise ValueError(
                f"{where}: y has labels that cannot be sorted ({error}). Give labels of one type."
            ) from None
        classes = self.classes
        if isinstance(classes, str) and classes != "public":
            raise ValueError(f'{where}: classes={classes!r} must be "public", or the classes in a sequence, or None.')
        if classes is None and self.budget is not None:
            raise Refused(
                f"{where}: budget= needs the classes, as finding them is a release that is made before the training "
                'draws from the budget. Give classes=[...]; classes="public" takes those in y.'
            )
        if classes is not None and not isinstance(classes, str):
            if len(np.unique(np.asarray(classes))) < len(classes):
                raise ValueError(f"{where}: classes={classes!r} has a class twice.")
            unknown = sorted(set(np.unique(y).tolist()) - set(np.asarray(classes).tolist()), key=repr)
            if unknown:
                raise ValueError(f"{where}: y has {quoted(unknown, at_most=3)}, which classes={classes!r} lacks.")

    def _target(self, where: str, y: Array, plan: NetworkPlan) -> Target:
        if self.classes is None:
            self._check_findable(where, len(y), plan)
            found = find_classes(y, float(self.epsilon), plan.delta, self.test_seed)
            classes, releases, public = found.classes, found.releases, ()
            statement = {"classes": {"noise_stddev": found.noise, "threshold": found.threshold}}
            spent = privacy.compose([(release.event, 1) for release in releases]).epsilon_high(plan.delta)
            why = (
                f" A class needs more than about {found.threshold:.0f} examples to be found, and looking has cost "
                f"epsilon {round_up(spent)} at delta = {short(plan.delta)}."
                ' Give classes=[...] if they are known without the data; classes="public" takes those in y.'
            )
        else:
            classes = np.unique(y if isinstance(self.classes, str) else np.asarray(self.classes))
            releases, public, statement, why = (), ("classes",), {}, ""
        if len(classes) < 2:
            of = Target(releases=releases)
            count = f"{len(classes)} class{'es' * (len(classes) != 1)} found"
            raise TooFewClasses(f"{where}: {count}, and at least 2 are needed.{why}", of)
        places = {label: place for place, label in enumerate(classes.tolist())}
        values = torch.tensor([places.get(label, UNLISTED) for label in y.tolist()])
        losses = partial(_cross_entropies, where, len(classes))
        return Target(values, len(classes), losses, classes, releases, public, statement)

    def _check_findable(self, where: str, n: int, plan: NetworkPlan) -> None:
        """Refuses to look for classes that cost too much, or are not found even if two have half of the examples."""
        noise, threshold = noise_and_threshold(float(self.epsilon), plan.delta)
        if prior := [(release.event, 1) for release in prior_of(self)]:
            both = privacy.compose([*prior, *((event, 1) for event in events_of(noise, plan.delta))])
            if (spent := both.epsilon_high(plan.delta)) >= self.epsilon:
                raise Refused(
                    f"{where}: epsilon={self.epsilon!r} leaves nothing for the training: prior_releases and finding "
                    f"the classes cost {round_up(spent)}. Nothing was released. Raise epsilon, or give classes=[...]."
                )
        if 2 * threshold > n:
            raise Refused(
                f"{where}: classes=None: at epsilon={self.epsilon!r} a class needs more than about {threshold:.0f} "
                f"examples to be found, and there are {n} in all. Nothing was released. Give classes=[...] if they are "
                'known without the data; classes="public" takes those in y.'
            )

    def _keep(self, target: Target) -> None:
        assert target.classes is not None
        self.classes_ = target.classes


class TooFewClasses(ValueError):
    """Raised if fewer than two classes were found; holds what that released."""

    def __init__(self, message: str, target: Target):
        super().__init__(message)
        self.target = target


def _cross_entropies(where: str, num_classes: int, outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape != (len(labels), num_classes):
        raise ValueError(
            f"{where}: module returned outputs of shape {tuple(outputs.shape)} for {len(labels)} rows: must be "
            f"{(len(labels), num_classes)}, a logit for each of {num_classes} classes."
        )
    return F.cross_entropy(outputs, labels, reduction="none", ignore_index=UNLISTED)
