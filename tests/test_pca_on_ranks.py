# SPDX-License-Identifier: Apache-2.0
"""Private PCA of rows that are divided over ranks: one release, equal to that of one process bit for bit, or a refusal.

The oracle is a fit of one process on the rows of all ranks, one after the other.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from gloo_pool import Pool
from scipy.sparse import csr_array

import torch_privacy as tp
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.sampling.samplers import PoissonSampler
from torch_privacy.support.ranks import Ranks
from torch_privacy.training import pca as pca_module
from torch_privacy.training.second_moment import checksum

ROOT = Path(__file__).parents[1]
FITTED = ["components_", "eigenvalues_", "noise_edge_", "noise_multiplier_", "event_", "release_", "n_features_in_"]


def random_rows(n: int = 300, d: int = 6, dtype: Any = np.float64) -> np.ndarray:
    return (100 * np.abs(np.random.default_rng(0).normal(size=(n, d)) * np.arange(1, d + 1))).astype(dtype)


def divided(rows: np.ndarray, of_rank_0: int) -> list[np.ndarray]:
    return [rows[:of_rank_0], rows[of_rank_0:]]


def new_pca(**settings: Any) -> tp.PrivatePCA:
    return tp.PrivatePCA(**{"n_components": 3, "noise_multiplier": 2.0, "rows": "split", **settings})


def public(pca: tp.PrivatePCA) -> dict[str, Any]:
    return {name: getattr(pca, name) for name in FITTED}


def fit(rank: int, parts: Sequence[Any], settings: dict | list[dict]) -> dict[str, Any]:
    return public(new_pca(**(settings if isinstance(settings, dict) else settings[rank])).fit(parts[rank]))


def assert_same_release(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["release_"] == other["release_"]
    for name in FITTED:
        np.testing.assert_array_equal(one[name], other[name], strict=True)


@pytest.mark.thorough
@pytest.mark.parametrize("of_rank_0", [0, 1, 150, 299, 300])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_release_equals_that_of_one_process_bit_for_bit(dtype, of_rank_0, ranks2: Pool):
    rows, settings = random_rows(dtype=dtype), {"test_seed": 3, "sampling_probability": 0.4}
    whole = new_pca(rows=None, **settings).fit(rows)
    for part in ranks2.run(fit, divided(rows, of_rank_0), settings):
        assert_same_release(part, public(whole))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_same_rows_on_all_ranks_count_once_if_that_is_said(dtype, ranks2: Pool):
    rows, settings = random_rows(dtype=dtype), {"test_seed": 3, "sampling_probability": 0.4, "rows": "same"}
    whole = new_pca(**settings).fit(rows)
    assert_same_release(public(whole), public(new_pca(**settings | {"rows": None}).fit(rows)))
    for part in ranks2.run(fit, [rows, rows], settings):
        assert_same_release(part, public(whole))


def test_different_rows_that_are_said_to_be_the_same_are_refused(ranks2: Pool):
    for of_rank_0 in (0, 1, 150):
        text = ranks2.refusal(fit, divided(random_rows(), of_rank_0), {"rows": "same"})
        assert ("0 sample" if of_rank_0 == 0 else "rows='same', but the ranks have different rows") in text


SETTINGS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "rare rows": {"sampling_probability": 0.01},
    "a calibrated noise": {"noise_multiplier": None, "target_epsilon": 1.0, "delta": 1e-4},
    "a coarse grid": {"noise_multiplier": 1000.0},
    "all components": {"n_components": None},
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("case", SETTINGS)
def test_release_equals_that_of_one_process_with(case, ranks2: Pool):
    rows, settings = random_rows(5000), {"test_seed": 1, **SETTINGS[case]}
    whole = new_pca(rows=None, **settings).fit(rows)
    for part in ranks2.run(fit, divided(rows, 2100), settings):
        assert_same_release(part, public(whole))


def drawn_keys(rank: int, parts: Sequence[np.ndarray]) -> tuple[list[bytes], list[bytes], dict[str, Any]]:
    """Returns the keys of sample and noise that a rank used, and its release."""
    sample: list[bytes] = []
    noise: list[bytes] = []
    with (
        patch("torch_privacy.training.pca.PoissonSampler", noting(PoissonSampler, sample)),
        patch("torch_privacy.training.pca.Noise", noting(Noise, noise)),
    ):
        return sample, noise, fit(rank, parts, {"sampling_probability": 0.5})


def noting(kind: type, keys: list[bytes]) -> Callable[..., Any]:
    """Returns a class that notes its last argument, the key."""

    def called(*arguments: Any, **named: Any) -> Any:
        keys.append(named.get("key", arguments[-1]))
        return kind(*arguments, **named)

    return called


def test_ranks_share_the_key_of_the_sample_and_only_the_first_has_that_of_the_noise(ranks2: Pool):
    (sample, noise, first), (other_sample, other_noise, second) = ranks2.run(drawn_keys, divided(random_rows(), 100))
    assert_same_release(first, second)
    assert len(sample) == 1
    assert sample == other_sample
    assert len(noise) == 1
    assert other_noise == []
    assert noise != sample


def fit_twice(rank: int, parts: Sequence[np.ndarray]) -> list[str]:
    pca = new_pca()
    return [pca.fit(parts[rank]).release_.fingerprint for _ in range(2)]


def test_every_fit_is_a_release_of_its_own(ranks2: Pool):
    first, second = ranks2.run(fit_twice, divided(random_rows(), 100))
    assert first == second
    assert first[0] != first[1]


def test_ranks_that_are_not_told_are_refused(ranks2: Pool):
    text = ranks2.refusal(fit, divided(random_rows(), 100), {"rows": None})
    assert "rows=None in a group of 2 processes: each would make a release of its own" in text
    assert "Pass rows='split' on all ranks if each has a part of the rows, or rows='same'" in text


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"rows='all' must be one of None, 'split', 'same'"):
        new_pca(rows="all").fit(random_rows())


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "noise": ({}, {"noise_multiplier": 3.0}, "noise_multiplier (rank 0: 2.0, rank 1: 3.0)"),
    "components": ({}, {"n_components": 2}, "n_components (rank 0: 3, rank 1: 2)"),
    "probability": ({}, {"sampling_probability": 0.5}, "sampling_probability (rank 0: 1.0, rank 1: 0.5)"),
    "delta": ({"delta": 1e-5}, {"delta": 1e-6}, "delta (rank 0: 1e-05, rank 1: 1e-06)"),
    "seed": ({"test_seed": 0}, {"test_seed": 1}, "test_seed (rank 0: 0, rank 1: 1)"),
    "a seed on one rank": ({"test_seed": 0}, {}, "test_seed (rank 0: 0, rank 1: None)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_settings_are_refused(case, ranks2: Pool):
    *settings, text = DIFFERENT[case]
    refusal = ranks2.refusal(fit, divided(random_rows(), 100), settings)
    assert refusal.startswith(f"PrivatePCA: the ranks differ in {text}. All ranks must have the same settings")


OTHER_ROWS: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "fewer features": (lambda rows: rows[:, :5], "number of features (rank 0: 6, rank 1: 5)"),
    "another dtype": (lambda rows: rows.astype(np.float32), "dtype (rank 0: 'float64', rank 1: 'float32')"),
    "no rows of another dtype": (lambda rows: rows[:0].astype(np.uint8), "dtype (rank 0: 'float64', rank 1: 'uint8')"),
}


@pytest.mark.parametrize("case", OTHER_ROWS)
def test_rows_of_another_kind_are_refused(case, ranks2: Pool):
    change, text = OTHER_ROWS[case]
    first, second = divided(random_rows(), 100)
    assert f"the ranks differ in {text}. All ranks" in ranks2.refusal(fit, [first, change(second)], {})


def fit_named(rank: int, parts: Sequence[np.ndarray], names: list[list[str]]) -> dict[str, Any]:
    found = np.array(names[rank], dtype=object)
    with patch("sklearn.utils.validation._get_feature_names", return_value=found):  # as of a data frame
        return fit(rank, parts, {})


@pytest.mark.thorough
def test_other_names_of_features_are_refused(ranks2: Pool):
    parts, names = divided(random_rows(d=3), 100), [["age", "rent", "pay"], ["age", "pay", "rent"]]
    text = ranks2.refusal(fit_named, parts, names)
    assert "names of features (rank 0: \"['age', 'rent', 'pay']\", rank 1: \"['age', 'pay', 'rent']\")" in text
    first, second = ranks2.run(fit_named, parts, names[:1] * 2)
    assert_same_release(first, second)


def with_nan(rows: np.ndarray) -> np.ndarray:
    rows[7, 2] = np.nan
    return rows


BROKEN: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "NaN": (with_nan, "contains NaN"),
    "sparse": (csr_array, "Sparse data was passed"),
    "three axes": (lambda rows: rows[None], "dim 3"),
    "no features": (lambda rows: rows[:, :0], "0 feature"),
    "complex": (lambda rows: rows * 1j, "Complex data"),
}


@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("case", BROKEN)
def test_what_one_rank_refuses_all_refuse(case, broken_rank, ranks2: Pool):
    change, text = BROKEN[case]
    parts: list[Any] = divided(random_rows(), 100)
    parts[broken_rank] = change(parts[broken_rank])
    refusal = ranks2.refusal(fit, parts, {})
    assert text in refusal
    assert refusal.endswith(f"(on rank {broken_rank})")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too many components": ({"n_components": 7}, "n_components=7 must be at most the number of features, 6"),
    "no noise": ({"noise_multiplier": None}, "give exactly one of the two"),
    "probability": ({"sampling_probability": 1.5}, "sampling_probability=1.5 must lie in"),
    "delta of one of all rows": ({"delta": 1 / 250}, "must be below 1/n for the 300 rows"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_settings_out_of_range_are_refused(case, ranks2: Pool):
    settings, text = MISTAKES[case]
    assert text in ranks2.refusal(fit, divided(random_rows(), 150), settings)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_same_rows_on_two_ranks_are_refused(dtype, order, ranks2: Pool):
    rows = random_rows(dtype=dtype)
    text = ranks2.refusal(fit, [rows, np.asfortranarray(rows[order])], {})
    assert text.startswith(
        "PrivatePCA: rows='split', but ranks 0, 1 have the same rows: each would count more than once"
    )


def test_no_rows_at_all_are_refused(ranks2: Pool):
    none = random_rows()[:0]
    assert ranks2.refusal(fit, [none, none], {}).startswith("PrivatePCA: 0 rows; must be at least 1")
    with pytest.raises(tp.Refused, match="PrivatePCA: 0 rows; must be at least 1"):
        new_pca().fit(none)


def test_more_rows_than_integers_can_sum_are_refused(monkeypatch):
    monkeypatch.setattr("torch_privacy.training.pca.MOST_ROWS", 299)
    with pytest.raises(tp.Refused, match="PrivatePCA: 300 rows; must be at least 1 and at most 299"):
        new_pca().fit(random_rows())


def release_that_fails(rank: int, parts: Sequence[np.ndarray], function: str) -> tuple[str, bool]:
    pca = new_pca().fit(parts[rank])
    before = public(pca)

    def failing(*arguments: Any) -> None:
        raise np.linalg.LinAlgError("did not converge")

    with (
        patch(f"torch_privacy.training.pca.{function}", failing if rank == 0 else getattr(pca_module, function)),
        pytest.raises(tp.Refused) as refusal,
    ):
        pca.fit(parts[rank])
    return str(refusal.value), all(getattr(pca, name) is before[name] for name in FITTED if name != "n_features_in_")


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("function", ["scaled_second_moment", "add_symmetric_noise", "leading_eigenvectors"])
def test_failure_of_the_first_rank_leaves_the_release_before_it_on_all(function, ranks2: Pool):
    outcomes = ranks2.run(release_that_fails, divided(random_rows(), 100), function)
    assert outcomes == [("did not converge (on rank 0)", True)] * 2


def only_rank_1_fits(rank: int) -> None:
    if rank == 0:
        Ranks.here().exchange("a step")
    else:
        new_pca().fit(random_rows())


def test_a_rank_that_does_something_else_is_refused(ranks2: Pool):
    outcomes = ranks2.outcomes(only_rank_1_fits)
    assert outcomes[1].kind == "RefusedTogether"
    assert outcomes[1].text.startswith("PrivatePCA: the ranks have come to different places: rank 0 a step, rank 1")


def own_coordinates(rank: int, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    pca = new_pca(test_seed=0, n_components=None)
    coordinates = pca.fit_transform(parts[rank])
    return coordinates, pca.inverse_transform(coordinates)


@pytest.mark.parametrize("of_rank_0", [0, 100])
def test_each_rank_transforms_its_own_rows(of_rank_0, ranks2: Pool):
    rows = random_rows()
    whole = new_pca(test_seed=0, n_components=None, rows=None).fit(rows)
    outcomes = ranks2.run(own_coordinates, divided(rows, of_rank_0))
    for part, (coordinates, undone) in zip(divided(rows, of_rank_0), outcomes, strict=True):
        np.testing.assert_allclose(coordinates, part @ whole.components_.T, rtol=1e-12, atol=1e-9)
        np.testing.assert_allclose(undone, part, atol=1e-9)


def test_one_process_may_say_split():
    rows = random_rows()
    split, whole = (new_pca(rows=word, test_seed=0).fit(rows) for word in ("split", None))
    assert_same_release(public(split), public(whole))


def run_page(rank: int, program: str) -> tuple[dict[str, Any], int]:
    names: dict[str, Any] = {"__name__": "__main__"}
    with patch.object(dist, "init_process_group"):  # there is one already
        exec(program, names)
    return public(names["pca"]), len(names["own_inputs"])


def test_program_of_the_page_makes_one_release_of_all_rows(ranks2: Pool):
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/pca.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (program for program in programs if "torch.distributed" in program)
    (first, own), (second, others) = ranks2.run(run_page, program)
    assert_same_release(first, second)
    assert own == others == 1000
    assert first["eigenvalues_"].sum() == pytest.approx(2000, abs=6 * 8 * 64**0.5)  # the trace: the number of rows


@pytest.mark.thorough
@pytest.mark.parametrize("changed", [0, 2047, 2048, 4999])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_checksum_depends_on_every_row_and_not_on_the_order(dtype, changed):
    rows = random_rows(5000, dtype=dtype)
    other, mixed = rows.copy(), np.random.default_rng(1).permutation(rows)
    other[changed, 5] += 1
    assert checksum(mixed) == checksum(np.asfortranarray(rows)) == checksum(rows)
    assert checksum(other) != checksum(rows)
    assert checksum(rows[:-1]) != checksum(rows)
