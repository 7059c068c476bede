# SPDX-License-Identifier: Apache-2.0
"""Tests the generator for GPUs, on the CPU: ChaCha20 bit for bit, and its normal numbers."""

import importlib
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from torch_privacy.mechanisms.noise import Noise, chacha, gaussian, generators, grid_unit
from torch_privacy.mechanisms.noise.chacha import ROUNDING, DeviceNormals, box_muller, chacha20, normals, state_of

CPU = torch.device("cpu")
VECTORS = {  # RFC 8439: key, nonce, counter, key stream
    "section 2.3.2": (
        bytes(range(32)).hex(),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "appendix A.1, 1": (
        "00" * 32,
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "appendix A.1, 2": (
        "00" * 32,
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "appendix A.1, 3": (
        "00" * 31 + "01",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "appendix A.1, 4": (
        "00ff" + "00" * 30,
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "appendix A.1, 5": (
        "00" * 32,
        "00" * 11 + "02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def stream(key, step, first, count):
    return chacha20(key, step, first, count, CPU).numpy().astype("<i4").tobytes()


def reference(key, step, first, count):
    nonce = (first % 2**32).to_bytes(4, "little") + (first >> 32).to_bytes(4, "little") + step.to_bytes(8, "little")
    return Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(64 * count))


def expected_normals(words):
    """Two numbers for every 16 bytes, by Box-Muller in numpy."""
    pairs = np.frombuffer(words, "<u8").reshape(-1, 2)
    radius = np.sqrt(-2 * np.log(((pairs[:, 0] & np.uint64(2**63 - 1)) + 0.5) * 2.0**-63))
    angle = pairs[:, 1].view(np.int64) * (math.pi * 2.0**-63)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)


@pytest.mark.parametrize("case", VECTORS)
def test_words_are_those_of_the_standard(case):
    key, nonce, counter, expected = VECTORS[case]
    high, step = (int.from_bytes(part, "little") for part in (bytes.fromhex(nonce)[:4], bytes.fromhex(nonce)[4:]))
    assert stream(bytes.fromhex(key), step, (high << 32) + counter, 1).hex() == expected


@pytest.mark.parametrize("first", [0, 5, 2**31 - 3, 2**32 + 9, 2**45])
@pytest.mark.parametrize("step", [0, 7, 2**63])
def test_words_are_those_of_another_implementation(step, first):
    key = bytes(range(100, 132))
    assert stream(key, step, first, 200) == reference(key, step, first, 200)


def test_the_upper_half_of_the_block_s_number_follows_the_lower_one():
    assert stream(bytes(32), 1, 2**32 - 2, 4) == reference(bytes(32), 1, 2**32 - 2, 2) + reference(
        bytes(32), 1, 2**32, 2
    )


@pytest.fixture
def kernel(monkeypatch):
    """The kernel in triton's interpreter, on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.reload(importlib.import_module("torch_privacy.mechanisms.noise.chacha_kernel"))


@pytest.mark.parametrize(("step", "first", "count"), [(7, 2**32 - 3, 130), (2**64 - 1, 2**45 + 5, 1), (0, 0, 2)])
def test_the_numbers_of_the_kernel_are_those_of_another_implementation(step, first, count, kernel):
    key, numbers = bytes(range(100, 132)), torch.full((count, 8), math.nan, dtype=torch.float64)
    kernel.write_normals(numbers, state_of(key, step, first), first)
    words = b"".join(reference(key, step, first + block, 1) for block in range(count))
    np.testing.assert_allclose(numbers.numpy().reshape(-1), expected_normals(words), rtol=0, atol=ROUNDING)


@pytest.mark.thorough
@pytest.mark.parametrize("size", ["i32", "i64"])
def test_the_kernel_compiles_for_cards_without_one(size, monkeypatch):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    function = importlib.reload(importlib.import_module("torch_privacy.mechanisms.noise.chacha_kernel"))._kernel
    types = {**dict.fromkeys(function.arg_names, size), "out": "*fp64", "count": "i32", "SIZE": "constexpr"}
    for architecture in (80, 90):
        source = ASTSource(fn=function, signature=types, constexprs={(len(types) - 1,): 128})
        assert compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]


CARD = torch.device("cuda:0")


@pytest.fixture
def card(monkeypatch):
    """Takes the CPU for a card."""
    ops = chacha.chacha20
    chacha.normals_of.cache_clear()
    monkeypatch.setattr(chacha, "chacha20", lambda key, step, first, count, _: ops(key, step, first, count, CPU))
    yield normals
    chacha.normals_of.cache_clear()


@pytest.mark.parametrize("reason", [None, "not those of ChaCha20 and Box-Muller", "Failed to find C compiler"])
def test_a_kernel_is_used_that_gives_the_right_numbers(reason, card, kernel, monkeypatch):
    write, empty = kernel.write_normals, torch.empty

    def damaged(numbers, state, first):
        if reason == "Failed to find C compiler":
            raise RuntimeError(reason)
        write(numbers, state, first)
        numbers[-1, 3] += 1e-7 * (reason is not None)

    monkeypatch.setattr(kernel, "write_normals", damaged)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    assert chacha.normals_of(CPU) is card
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = chacha.normals_of(CARD)
        assert found is chacha.normals_of(CARD)
    assert (found is card) == (reason is not None)
    assert len(warned) == (reason is not None)
    assert all(reason in str(one.message) for one in warned)
    asked = bytes(32), 3, 7, 9, CARD
    torch.testing.assert_close(found(*asked), card(*asked), rtol=0, atol=ROUNDING)


def test_without_triton_numbers_are_made_by_ops(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_privacy.mechanisms.noise.chacha_kernel", None)
    assert chacha.normals_of(CARD) is card


def device_noise(size, stddev=1.0, step=0, dtype=torch.float64):
    total = torch.zeros(size, dtype=dtype)
    DeviceNormals(bytes(32)).add(step, [(total, 0, stddev)])
    return total


def test_numbers_are_those_of_box_muller_in_another_implementation_within_a_grid_unit():
    size, stddev = 8 * 5000, 0.7
    generator, unit = DeviceNormals(bytes(32)), grid_unit(stddev)
    expected = expected_normals(reference(generator._key, 0, 0, size // 8))
    counts = device_noise(size, stddev).numpy() / unit
    assert np.abs(counts - np.rint(expected * (stddev / unit))).max() <= 1


def test_the_largest_number_has_64_bits():
    """63 zero bits give the largest normal number, sqrt(2 ln 2^64)."""
    assert box_muller(torch.zeros(4, dtype=torch.int32))[0].item() == pytest.approx((2 * 64 * np.log(2)) ** 0.5)


def test_numbers_are_standard_normal():
    z = device_noise(10**6).numpy()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    for limit in (2, 3, 4):
        assert stats.binomtest(int((np.abs(z) > limit).sum()), len(z), 2 * stats.norm.sf(limit)).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_release_is_on_the_grid_of_its_noise(dtype):
    unit, noise = grid_unit(0.3), device_noise(1000, 0.3)
    assert torch.equal(noise / unit, (noise / unit).round())
    sums = (torch.randn(1000, dtype=torch.float64) * torch.logspace(-12, 4, 1000, dtype=torch.float64)).to(dtype)
    released = sums.clone()
    DeviceNormals(bytes(32)).add(0, [(released[:77], 0, 0.3), (released[77:], 77, 0.3)])
    assert torch.equal(released, (noise + unit * (sums.double() / unit).round()).to(dtype))


def test_fill_overwrites_with_the_same_numbers():
    z = torch.full((1001,), math.nan, dtype=torch.float64)
    DeviceNormals(bytes(32)).fill(0, [(z, 0, 1.0)])
    torch.testing.assert_close(z, device_noise(1001), rtol=0, atol=2.0**-32)


def test_its_key_is_not_that_of_the_other_generator():
    assert DeviceNormals(bytes(32))._key != bytes(32)


def test_the_device_of_a_tensor_chooses_its_generator(monkeypatch):
    """Here a GPU's tensors are those in float64."""
    monkeypatch.setattr(gaussian, "has_generator", lambda tensor: tensor.dtype == torch.float64)
    sums = {"a": torch.zeros(9).float(), "b": torch.zeros(11).double(), "c": torch.zeros(5).float()}
    filled = {name: total.clone() for name, total in sums.items()}
    Noise(bytes(32)).add_to(0, sums, 1.0)
    Noise(bytes(32)).fill(0, filled)
    here = torch.zeros(25).float()
    Noise(bytes(32)).add_to(0, {"w": here}, 1.0)
    there = device_noise(25)
    for found, tolerance in ((sums, 0.0), (filled, 1e-6)):
        torch.testing.assert_close(found["a"], here[:9], rtol=0, atol=tolerance)
        torch.testing.assert_close(found["b"], there[9:20], rtol=0, atol=tolerance)
        torch.testing.assert_close(found["c"], here[20:], rtol=0, atol=tolerance)
    assert generators(sums.values()) == "AES-256-CTR, ziggurat"  # so few are made on the CPU in a training
    monkeypatch.setattr(gaussian, "FEW_NUMBERS", 24)
    assert generators(sums.values()) == "AES-256-CTR, ziggurat and ChaCha20, Box-Muller"


def test_noise_of_devices_without_float64_is_made_on_the_cpu():
    class Apple:
        is_cpu, device = False, torch.device("mps")

        def numel(self):
            return gaussian.FEW_NUMBERS + 1

    assert generators([Apple()]) == "AES-256-CTR, ziggurat"
    assert generators([torch.empty(gaussian.FEW_NUMBERS + 1, device="meta")]) == "ChaCha20, Box-Muller"
