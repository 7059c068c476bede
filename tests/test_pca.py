# SPDX-License-Identifier: Apache-2.0
"""Tests private PCA: sensitivity to one row, distribution of the noise, exact limit, price, sklearn's conventions."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from trainings import ZERO_OUT, private_training

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.noise import Noise, grid_unit
from torch_privacy.training.second_moment import add_symmetric_noise, bits_for, leading_eigenvectors, second_moment

ROOT = Path(__file__).parents[1]
LITTLE = 1e-6  # the smallest noise that can be priced


def random_rows(n: int = 300, d: int = 6, seed: int = 0) -> np.ndarray:
    """Returns rows with a different spread in each direction of a random basis."""
    generator = np.random.default_rng(seed)
    basis = np.linalg.qr(generator.normal(size=(d, d)))[0]
    return generator.normal(size=(n, d)) * 2.0 ** -np.arange(d) @ basis


def symmetric_noise(d: int, stddev: float = 1.0, key: bytes = bytes(32)) -> np.ndarray:
    matrix = np.zeros((d, d))
    add_symmetric_noise(matrix, stddev, Noise(key))
    return matrix


def all_of(rows: np.ndarray) -> np.ndarray:
    return second_moment(rows, np.arange(len(rows)))


ROWS: dict[str, Callable[[int], np.ndarray]] = {  # what an adversary might add
    "one entry": lambda d: np.eye(d)[0],
    "all equal": np.ones,
    "negative": lambda d: -np.ones(d),
    "huge": lambda d: np.full(d, 1.7e308),
    "tiny": lambda d: np.full(d, 1e-200),
    "subnormal": lambda d: np.full(d, 5e-324),
    "of all sizes": lambda d: 10.0 ** np.linspace(-300, 300, d),
    "random": lambda d: np.random.default_rng(1).normal(size=d),
}


@pytest.mark.parametrize("others", ["no others", "random", "equal to it"])
@pytest.mark.parametrize("row", ROWS)
def test_one_row_changes_the_sum_by_a_matrix_of_unit_norm_to_the_last_bit(row, others):
    added = ROWS[row](7)
    rows = {"no others": np.zeros((0, 7)), "random": random_rows(3000, 7), "equal to it": np.tile(added, (3000, 1))}
    neighbors = rows[others], np.insert(rows[others], len(rows[others]) // 2, added, axis=0)
    without, with_it, alone = (all_of(x) for x in (*neighbors, added[None, :]))
    np.testing.assert_array_equal(with_it - without, alone)
    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-3)
    assert np.linalg.norm(alone) <= 1 + 1e-12


@pytest.mark.parametrize("n", [1, 7, 127, 2047, 2048, 8191, 32_767])
def test_grid_of_the_sum_does_not_depend_on_the_number_of_rows(n):
    rows = np.tile(np.random.default_rng(0).uniform(0.5, 1, (1, 20)), (n + 1, 1))
    np.testing.assert_array_equal(all_of(rows) - all_of(rows[:n]), all_of(rows[:1]))


@pytest.mark.parametrize("noise", [0.4, 1.0, 7.0, 16.0, 1000.0, 2.0**20])
def test_sum_lies_on_the_grid_of_the_noise(noise):
    """Then the release is the sum plus independent noise, without further rounding."""
    rows = random_rows(500, 9)
    total = second_moment(rows, np.arange(500), bits_for(noise))
    released, alone = total.copy(), symmetric_noise(9, noise)
    add_symmetric_noise(released, noise, Noise(bytes(32)))
    np.testing.assert_array_equal(released - alone, total)
    np.testing.assert_array_equal(released, released.T)
    assert not (total / grid_unit(noise) % 1).any()
    assert bits_for(noise) == 16 or (4.0 ** -(bits_for(noise) + 1)) < grid_unit(noise)


def test_interrupted_fit_leaves_the_release_before_it_and_its_price(monkeypatch):
    pca = tp.PrivatePCA(2, noise_multiplier=1.0, delta=1e-5).fit(random_rows())
    before, components = pca.spent(), pca.components_
    pca.set_params(noise_multiplier=50.0)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for function in ("scaled_second_moment", "add_symmetric_noise", "leading_eigenvectors"):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch_privacy.training.pca.{function}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pca.fit(random_rows())
        assert pca.spent() == before
        assert pca.components_ is components
        assert pca.release_.event == pca.event_ == privacy.NoisyCovariance(1.0)


def test_no_row_is_longer_than_one_after_rounding():
    alone = [second_moment(random_rows(200, 50), np.array([i])) for i in range(200)]
    assert max(map(np.linalg.norm, alone)) <= 1 + 1e-12


@pytest.mark.parametrize("row", ROWS)
def test_replacing_a_row_changes_the_sum_by_at_most_root_two(row):
    old, new = (all_of(ROWS[name](7)[None, :]) for name in (row, "one entry"))
    assert np.linalg.norm(old - new) <= 2**0.5 + 1e-12


def test_bound_on_the_change_is_met_by_rows_at_right_angles():
    """No smaller sensitivity would suffice: 1 for adding or removing a row, √2 for replacing one."""
    one, other = all_of(np.eye(3)[:1]), all_of(np.eye(3)[1:2])
    assert np.linalg.norm(one) == 1
    assert np.linalg.norm(one - other) == pytest.approx(2**0.5, rel=1e-15)


def test_row_of_zeros_contributes_nothing():
    rows = random_rows()
    np.testing.assert_array_equal(all_of(np.vstack([rows, np.zeros((5, 6))])), all_of(rows))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_sum_is_that_of_unit_rows(dtype):
    rows = (100 * np.abs(random_rows(5000))).astype(dtype)
    unit = Normalizer().fit_transform(rows.astype(np.float64))
    np.testing.assert_allclose(
        all_of(rows), unit.T @ unit, atol=5000 * 2**-15, rtol=0
    )  # each entry is rounded to 2^-16


def test_sum_does_not_depend_on_the_order_of_the_rows():
    rows = random_rows(10_000)
    np.testing.assert_array_equal(all_of(rows), all_of(np.random.default_rng(0).permutation(rows)))


def test_noise_is_symmetric_and_isotropic_in_the_frobenius_norm():
    noise = symmetric_noise(d=700, stddev=3.0)
    np.testing.assert_array_equal(noise, noise.T)
    diagonal, above = noise.diagonal() / 3, noise[np.triu_indices(700, 1)] / 3 * 2**0.5
    for entries in (diagonal, above):
        assert stats.kstest(entries, "norm").pvalue > 1e-3
    assert above.std() == pytest.approx(1, abs=4 / (2 * len(above)) ** 0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("row", ["one entry", "all equal", "random"])
def test_noise_hides_every_direction_of_change_alike(row):
    """⟨Z, uuᵀ⟩ is standard normal for each unit u, so neighbors are as hard to distinguish as in a Gaussian release."""
    u = ROWS[row](5) / np.linalg.norm(ROWS[row](5))
    draws = [u @ symmetric_noise(5, key=i.to_bytes(32, "big")) @ u for i in range(4000)]
    assert stats.kstest(draws, "norm").pvalue > 1e-3


def test_noise_edge_is_where_eigenvalues_of_noise_end():
    zeros = np.zeros((10, 300))
    pca = tp.PrivatePCA(1, noise_multiplier=5.0, test_seed=0).fit(zeros)
    assert pca.eigenvalues_[0] == pytest.approx(pca.noise_edge_, rel=0.05)


def test_components_without_noise_are_those_of_scikit_learn():
    rows = random_rows()
    ours = tp.PrivatePCA(4, noise_multiplier=LITTLE).fit(rows)
    unit = Normalizer().fit_transform(rows)
    centered = np.vstack([unit, -unit])  # has mean zero, as PCA requires
    theirs = PCA(4, svd_solver="full").fit(centered)
    np.testing.assert_allclose(np.abs(ours.components_ @ theirs.components_.T), np.eye(4), atol=1e-4)
    np.testing.assert_allclose(ours.eigenvalues_[:4], theirs.singular_values_**2 / 2, rtol=1e-4)
    theirs = TruncatedSVD(4, algorithm="arpack").fit(unit)
    np.testing.assert_allclose(np.abs(ours.transform(rows)), np.abs(theirs.transform(rows)), atol=1e-4)


def test_components_are_orthonormal_eigenvectors_with_a_fixed_sign():
    matrix = symmetric_noise(40)
    values, components = leading_eigenvectors(matrix, 7)
    np.testing.assert_allclose(components @ components.T, np.eye(7), atol=1e-12)
    np.testing.assert_allclose(components @ matrix, values[:7, None] * components, atol=1e-12)
    assert (np.diff(values) <= 0).all()
    assert (components.max(axis=1) >= -components.min(axis=1)).all()


def test_some_rows_are_drawn_by_poisson_sampling():
    """The sum of the eigenvalues, the trace, is the number of rows."""
    rows, pca = random_rows(2000), tp.PrivatePCA(noise_multiplier=LITTLE, sampling_probability=0.3)
    counts = np.array([pca.fit(rows).eigenvalues_.sum() for _ in range(40)])
    np.testing.assert_allclose(counts, np.round(counts), atol=0.1)
    assert len(set(np.round(counts))) > 10
    assert abs(counts.mean() - 600) < 4 * (2000 * 0.3 * 0.7 / 40) ** 0.5


def test_sample_without_rows_releases_noise():
    pca = tp.PrivatePCA(2, noise_multiplier=1.0, sampling_probability=1e-9).fit(random_rows())
    assert pca.components_.shape == (2, 6)


@pytest.mark.parametrize("probability", [1.0, 0.05])
def test_price_is_that_of_one_gaussian_release(probability):
    pca = tp.PrivatePCA(2, noise_multiplier=4.0, sampling_probability=probability, delta=1e-5).fit(random_rows())
    assert pca.event_ == privacy.NoisyCovariance(4.0, probability)
    gaussian = privacy.compose([(privacy.SubsampledGaussian(4.0, probability), 1)])
    assert pca.spent().epsilon.high == pytest.approx(gaussian.epsilon(1e-5).high, rel=1e-9)
    assert "add/remove one example" in str(pca.spent())


def test_target_epsilon_is_reached_from_below():
    pca = tp.PrivatePCA(2, target_epsilon=0.3, delta=1e-5).fit(random_rows())
    assert 0.299 < pca.spent().epsilon.high <= 0.3
    assert pca.noise_multiplier_ == pca.event_.noise_multiplier


def test_every_fit_is_a_release_of_its_own():
    rows, pca = random_rows(), tp.PrivatePCA(2, noise_multiplier=5.0)
    first, second = pca.fit(rows).release_, clone(pca).fit(rows).release_
    assert first.event == second.event
    assert first.fingerprint != second.fingerprint


def test_test_seed_repeats_the_release_and_marks_it_as_not_private():
    rows, pca = random_rows(), tp.PrivatePCA(2, noise_multiplier=5.0, sampling_probability=0.5, test_seed=3, delta=1e-5)
    first = pca.fit(rows).components_
    np.testing.assert_array_equal(first, clone(pca).fit(rows).components_)
    assert not np.array_equal(first, clone(pca).set_params(test_seed=4).fit(rows).components_)
    assert str(pca.spent()).startswith("NOT PRIVATE")
    assert pca.release_.warning.startswith("NOT PRIVATE")


def test_global_seeds_do_not_affect_the_noise():
    rows = random_rows()

    def released() -> np.ndarray:
        torch.manual_seed(0)
        np.random.seed(0)
        return tp.PrivatePCA(2, noise_multiplier=5.0).fit(rows).components_

    assert not np.array_equal(released(), released())


def test_fitted_estimator_holds_no_secret_and_survives_pickling():
    pca = tp.PrivatePCA(2, noise_multiplier=5.0).fit(random_rows())
    public = {"components_", "eigenvalues_", "noise_edge_", "noise_multiplier_", "event_", "release_", "n_features_in_"}
    public.add("noisy_matrix_")
    assert set(vars(pca)) - set(pca.get_params()) == public | {"_n_features_out"}
    copy = pickle.loads(pickle.dumps(pca))
    assert copy.release_ == pca.release_
    np.testing.assert_array_equal(copy.transform(random_rows()), pca.transform(random_rows()))


def test_the_released_matrix_is_kept_and_all_else_is_computed_from_it():
    pca = tp.PrivatePCA(2, noise_multiplier=5.0).fit(random_rows())
    released = pca.noisy_matrix_
    np.testing.assert_array_equal(released, released.T)
    values, vectors = np.linalg.eigh(released)
    np.testing.assert_allclose(values[::-1], pca.eigenvalues_, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(np.abs(vectors[:, ::-1][:, :2].T), np.abs(pca.components_), atol=1e-9)
    assert hashlib.blake2b(released.tobytes(), digest_size=8).hexdigest() == pca.release_.fingerprint


@pytest.mark.parametrize("test_seed", [None, 0])
def test_scikit_learns_own_checks_pass(test_seed):
    """All checks pass except idempotence: without a test seed two fits must differ (and four checks are skipped)."""
    differs = {} if test_seed is not None else {"check_fit_idempotent": "every fit draws new noise"}
    estimator = tp.PrivatePCA(n_components=1, noise_multiplier=1.0, test_seed=test_seed)
    results = check_estimator(estimator, expected_failed_checks=differs, on_skip=None)
    assert {result["check_name"] for result in results if result["status"] == "xfail"} == set(differs)


def test_components_have_names_and_a_place_in_pipelines():
    pipeline = make_pipeline(StandardScaler(with_mean=False), tp.PrivatePCA(2, noise_multiplier=1.0))
    assert pipeline.fit_transform(random_rows()).shape == (300, 2)
    assert list(pipeline[-1].get_feature_names_out()) == ["privatepca0", "privatepca1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_tensors_give_tensors_of_their_type(dtype):
    rows = torch.from_numpy(10 + 10 * random_rows()).to(dtype)
    pca = tp.PrivatePCA(3, noise_multiplier=1.0).fit(rows)
    projected = pca.transform(rows)
    assert projected.dtype == (torch.float64 if dtype == torch.uint8 else dtype)
    exact = rows.double().numpy() @ pca.components_.T
    np.testing.assert_allclose(projected.double().numpy(), exact, rtol=2**-7, atol=0.1)


def test_tensor_and_array_give_the_same_release():
    rows = random_rows()
    array, tensor = (tp.PrivatePCA(noise_multiplier=1.0, test_seed=0).fit(x) for x in (rows, torch.from_numpy(rows)))
    assert array.release_ == tensor.release_


def test_all_components_can_be_undone():
    rows = random_rows()
    pca = tp.PrivatePCA(noise_multiplier=1.0).fit(rows)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(rows)), rows, atol=1e-12)


def test_layer_is_the_transform_and_is_not_trained():
    rows = torch.from_numpy(random_rows()).float()
    pca = tp.PrivatePCA(3, noise_multiplier=1.0).fit(rows)
    layer = pca.to_layer()
    assert not any(p.requires_grad for p in layer.parameters())
    torch.testing.assert_close(layer(rows), pca.transform(rows))


BROKEN = {
    "NaN": (np.array([[1.0, np.nan]]), "contains NaN"),
    "infinite": (np.array([[1.0, np.inf]]), "contains infinity"),
    "too large for float64": (np.array([[np.longdouble("1e400"), 1.0]]), "infinity"),
    "no rows": (np.zeros((0, 2)), "0 sample"),
    "three axes": (np.zeros((2, 2, 2)), "dim 3"),
    "text": (np.array([["a", "b"]]), "could not convert"),
    "complex": (np.array([[1j, 1.0]]), "Complex data"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_unusable_data_are_refused(case):
    data, message = BROKEN[case]
    pca = tp.PrivatePCA(1, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=message):
        pca.fit(data)
    assert not hasattr(pca, "release_")


MISTAKES = {
    "more components than features": ({"n_components": 7}, "n_components=7 must be at most the number of features, 6"),
    "no components": ({"n_components": 0}, "n_components=0 must be an integer of at least 1"),
    "half a component": ({"n_components": 0.5}, "n_components=0.5 must be an integer"),
    "yes": ({"n_components": True}, "n_components=True must be an integer"),
    "no noise": ({"noise_multiplier": None}, "give exactly one of the two"),
    "noise twice": ({"target_epsilon": 1.0}, "give exactly one of the two"),
    "zero noise": ({"noise_multiplier": 0.0}, "noise_multiplier=0.0 must be greater than 0"),
    "target without delta": ({"noise_multiplier": None, "target_epsilon": 1.0}, "target_epsilon needs delta"),
    "delta of a whole row": ({"delta": 0.1}, "delta=0.1 must lie in"),
    "probability": ({"sampling_probability": 1.5}, "sampling_probability=1.5 must lie in"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_settings_out_of_range_are_refused(case):
    changed, message = MISTAKES[case]
    pca = tp.PrivatePCA(**({"n_components": 2, "noise_multiplier": 1.0} | changed))
    with pytest.raises(ValueError, match=message):
        pca.fit(random_rows())
    assert not hasattr(pca, "release_")


def test_numpy_integers_are_numbers_of_components():
    assert tp.PrivatePCA(np.int64(2), noise_multiplier=1.0).fit(random_rows()).components_.shape == (2, 6)  # type: ignore[arg-type]


# PCA in front of a network, in one ledger with its training.


def classifier(pca: tp.PrivatePCA, num_steps: int = 3, **settings: Any) -> tuple[tp.PrivateTraining, nn.Module]:
    rows = torch.from_numpy(random_rows())
    data = TensorDataset(pca.transform(rows), (rows[:, 0] > 0).long())
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    training = private_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        expected_batch_size=30,
        num_steps=num_steps,
        clipping=tp.Flat(clip_norm=1.0),
        delta=1e-5,
        prior_releases=[pca.release_],
        **{"noise_multiplier": 1.0, **settings},
    )
    return training, model


def train(training: tp.PrivateTraining, model: nn.Module, num_steps: int | None = None) -> None:
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
        if training.step_count == num_steps:
            return


def test_one_epsilon_covers_components_and_training():
    pca = tp.PrivatePCA(2, noise_multiplier=4.0).fit(random_rows())
    training, model = classifier(pca)
    alone = privacy.compose([(pca.event_, 1)]).epsilon(1e-5).high
    assert training.spent().epsilon.high == pytest.approx(alone)  # spent before the first step
    train(training, model)
    releases = [(privacy.NoisyCovariance(4.0), 1), (privacy.SubsampledGaussian(1.0, 0.1, ZERO_OUT), 3)]
    assert training.ledger.events == releases
    assert training.spent().epsilon == privacy.compose(releases).epsilon(1e-5)
    assert "full batch + Poisson sampling" in str(training.spent())
    assert json.loads(json.dumps(training.statement()))["releases"][0]["event"]["type"] == "NoisyCovariance"


def test_target_epsilon_counts_the_components():
    pca = tp.PrivatePCA(2, noise_multiplier=8.0).fit(random_rows())
    training, model = classifier(pca, noise_multiplier=None, target_epsilon=2.0)
    train(training, model)
    assert 1.99 < training.spent().epsilon.high <= 2.0
    with pytest.raises(ValueError, match=r"target_epsilon=0.1 is spent by prior_releases, which cost 0\.4"):
        classifier(pca, noise_multiplier=None, target_epsilon=0.1)


def test_budget_counts_the_components():
    pca = tp.PrivatePCA(2, noise_multiplier=4.0).fit(random_rows())
    budget = privacy.Budget(epsilon=3.0, delta=1e-5)
    training, model = classifier(pca, num_steps=1000, examples={"budget": budget})
    train(training, model)
    step = privacy.SubsampledGaussian(1.0, 0.1)
    assert training.step_count == budget.remaining(step, after=[(pca.event_, 1)])
    assert 2.9 < training.spent().epsilon.high <= 3.0


def test_training_on_components_that_are_not_private_is_not_private():
    pca = tp.PrivatePCA(2, noise_multiplier=4.0, test_seed=0).fit(random_rows())
    training, _ = classifier(pca)
    assert str(training.spent()).startswith("NOT PRIVATE")
    assert training.statement()["private"] is False


@pytest.mark.thorough
def test_resumed_run_accepts_only_its_own_components(tmp_path):
    pca, other = (tp.PrivatePCA(2, noise_multiplier=4.0).fit(random_rows()) for _ in range(2))
    training, model = classifier(pca, run_folder=tmp_path)
    train(training, model, num_steps=2)
    state, weights = training.state_dict(), model.state_dict()
    with pytest.raises(tp.Refused, match="Two different releases would share"):
        classifier(other, run_folder=tmp_path)
    resumed, model = classifier(pickle.loads(pickle.dumps(pca)), run_folder=tmp_path)
    resumed.load_state_dict(state)
    model.load_state_dict(weights)
    train(resumed, model)
    assert resumed.ledger.events == [(pca.event_, 1), (resumed.event, 3)]
    elsewhere, _ = classifier(other)
    with pytest.raises(tp.Refused, match="prior_releases="):
        elsewhere.load_state_dict(state)


def test_prior_releases_of_another_type_are_refused():
    pca = tp.PrivatePCA(2, noise_multiplier=4.0).fit(random_rows())
    pca.release_, release = pca, pca.release_  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"prior_releases holds \[PrivatePCA"):
        classifier(pca)
    assert release.event == pca.event_


def test_projection_layer_is_released_before_training_and_stays_fixed():
    rows = torch.from_numpy(random_rows()).float()
    pca = tp.PrivatePCA(2, noise_multiplier=4.0).fit(rows)
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(pca.to_layer(), nn.Linear(2, 2))
    before = model[0].weight.clone()
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        TensorDataset(rows, (rows[:, 0] > 0).long()),
        expected_batch_size=30,
        num_steps=2,
        clipping=tp.Flat(clip_norm=1.0),
        noise_multiplier=1.0,
        prior_releases=[pca.release_],
    )
    train(training, model)
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
    assert len(training.ledger) == 3
