# SPDX-License-Identifier: Apache-2.0
"""Tests the noise: its normal distribution, its grid, and that random bits are never shared or repeated."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from torch_privacy.mechanisms.noise import Noise, key_from_test_seed
from torch_privacy.mechanisms.noise.processor import edges

MILLION = 10**6
DRAWS = {  # the same million numbers, in differently shaped tensors
    "one tensor": [(MILLION,)],
    "odd sizes": [(333_333,), (7, 3, 11), (), (MILLION - 333_333 - 232,)],
    "many small": [(1000,)] * 1000,
}


def noise_of(shapes, step=0, dtype=torch.float32, seed=1):
    sums = {str(i): torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}
    Noise(key_from_test_seed(seed, "noise")).add_to(step, sums, stddev=1.0)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draw", DRAWS)
def test_noise_is_standard_normal(draw, dtype):
    parts = noise_of(DRAWS[draw], dtype=dtype)
    z = torch.cat([part.flatten() for part in parts.values()]).double().numpy()
    assert len(z) == MILLION
    assert abs(z.mean()) < 4 / MILLION**0.5
    assert abs(z.std() - 1) < 4 / (2 * MILLION) ** 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-3


@pytest.mark.thorough
def test_noise_is_standard_normal_to_the_sixth_moment():
    size, z = 10 * MILLION, torch.empty(10 * MILLION, dtype=torch.float64)
    Noise(key_from_test_seed(2, "noise")).fill(0, {"z": z})
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    for power in range(1, 7):
        expected, of_double = stats.norm.moment(power), stats.norm.moment(2 * power)
        error = ((of_double - expected**2) / size) ** 0.5
        assert abs(z.pow(power).mean().item() - expected) < 4 * error


@pytest.mark.thorough
def test_noise_has_the_normal_tail_far_out():
    """Counts draws among 6e7, also beyond the ziggurat's last edge."""
    limits, counts = (2.0, 3.0, 4.0, edges()[0], 5.0, 5.5), np.zeros(6, int)
    z, noise = torch.empty(10 * MILLION, dtype=torch.float64), Noise(key_from_test_seed(3, "noise"))
    for step in range(6):
        noise.fill(step, {"z": z})
        counts += [int((z.abs() > limit).sum()) for limit in limits]
    for limit, count in zip(limits, counts, strict=True):
        assert stats.binomtest(int(count), 60 * MILLION, 2 * stats.norm.sf(limit)).pvalue > 1e-4


def test_noise_of_different_steps_tensors_and_keys_is_unrelated():
    a = noise_of([(MILLION // 2,), (MILLION // 2,)])
    others = [a["1"], noise_of([(MILLION // 2,)], step=1)["0"], noise_of([(MILLION // 2,)], seed=2)["0"]]
    for other in others:
        assert abs(np.corrcoef(a["0"], other)[0, 1]) < 5 / (MILLION / 2) ** 0.5


def test_neighboring_places_are_unrelated():
    z = noise_of([(MILLION,)], dtype=torch.float64)["0"]
    for distance in (1, 2, 3, 8, 2**16):
        a, b = z[distance:], z[:-distance]
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / MILLION**0.5
        assert abs(np.corrcoef(a.square(), b.square())[0, 1]) < 5 / MILLION**0.5


def test_noise_repeats_bit_for_bit_for_one_key_and_step():
    shapes = [(1001,), (3, 5)]
    first, second = noise_of(shapes, step=7), noise_of(shapes, step=7)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_noise_is_added_to_the_given_sums():
    start, sums = torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 7)
    Noise(key_from_test_seed(1, "noise")).add_to(3, {"w": sums}, stddev=0.5)
    torch.testing.assert_close(sums, start + 0.5 * noise_of([(7,)], step=3, dtype=torch.float64)["0"])


def test_fill_overwrites_tensors_with_the_noise_of_the_step():
    shapes = (200_001,), (3, 5)
    filled = {str(i): torch.full(shape, float("nan"), dtype=torch.float32) for i, shape in enumerate(shapes)}
    Noise(key_from_test_seed(1, "noise")).fill(2, filled)
    torch.testing.assert_close(filled, noise_of(shapes, step=2), rtol=0, atol=1e-6)


def test_noise_ignores_and_leaves_the_user_s_seed():
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first, second = torch.zeros(8), torch.zeros(8)
    Noise().add_to(0, {"w": first}, stddev=1.0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(0)
    Noise().add_to(0, {"w": second}, stddev=1.0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("step", [-1, 1.0, True, 2**64])
def test_noise_refuses_a_bad_step(step):
    with pytest.raises(ValueError, match=r"Noise.add_to: step="):
        Noise().add_to(step, {}, stddev=1.0)


def test_noise_refuses_a_short_key():
    with pytest.raises(ValueError, match="key of 3 bytes"):
        Noise(b"abc")


@pytest.mark.parametrize("stddev", [1.0, 0.3, 7e-5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_release_is_a_function_of_a_grid_that_the_noise_alone_determines(stddev, dtype):
    """Low bits of the sum never appear in the release, at any scale (Mironov 2012)."""
    unit = 2.0 ** (math.floor(math.log2(stddev)) - 32)
    size = (1 << 17) + 77  # more than a chunk
    sums = torch.randn(size, dtype=torch.float64) * torch.logspace(-12, 4, size, dtype=torch.float64) * stddev
    noise, exact, released = torch.zeros_like(sums), sums.clone(), sums.to(dtype, copy=True)
    for tensor in (noise, exact, released):
        Noise(bytes(32)).add_to(3, {"a": tensor[:100], "b": tensor[100:]}, stddev)
    assert torch.equal(noise / unit, (noise / unit).round())
    assert torch.equal(exact, noise + unit * (sums / unit).round())
    assert torch.equal(released, (noise + unit * (sums.to(dtype).double() / unit).round()).to(dtype))


def test_grid_of_a_small_release_does_not_show_one_example():
    """If a sum of 1 and its noise nearly cancel, the release has bits as fine as without cancellation."""
    for present in (0.0, 1.0):
        total = torch.full((200_000,), present)
        Noise().add_to(0, {"w": total}, stddev=1.0)
        small = total[total.abs() < 2**-3].double()
        fine = (small * 2**27 % 1 != 0).double().mean()
        assert fine > 0.9


def test_each_sum_gets_noise_of_its_own_standard_deviation():
    stddev = {"a": 2.0, "b": 0.5, "c": 0.0, "d": 2.0}
    sums = {name: torch.ones(MILLION // 10) for name in stddev}
    Noise(bytes(32)).add_to(1, sums, stddev)
    for name, scale in stddev.items():
        assert abs((sums[name] - 1).std() - scale) <= 5 * scale / (2 * MILLION / 10) ** 0.5
    assert abs(np.corrcoef(sums["a"], sums["d"])[0, 1]) < 5 / (MILLION / 10) ** 0.5


@pytest.mark.parametrize("stddev", [-1.0, float("nan"), float("inf"), 1e-300])
def test_noise_refuses_a_bad_deviation_and_adds_nothing(stddev):
    sums = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match="stddev="):
        Noise().add_to(0, sums, {"a": 1.0, "b": stddev})
    assert not any(total.any() for total in sums.values())


def test_noise_beyond_the_range_of_a_type_is_infinite_without_a_warning():
    total = torch.full((99,), 3e38, dtype=torch.float32)
    Noise(bytes(32)).add_to(0, {"w": total}, stddev=1e38)
    assert total.isinf().any()


def test_noise_is_made_on_the_cpu_with_any_default_device():
    with torch.device("meta"):
        total = torch.zeros(5, device="cpu")
        Noise().add_to(0, {"w": total}, stddev=1.0)
    assert total.all()
