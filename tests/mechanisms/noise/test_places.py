# SPDX-License-Identifier: Apache-2.0
"""Noise is a function of key, step and place: not of tensors, chunks or threads."""

import numpy as np
import pytest
import torch

from torch_privacy.mechanisms.noise import Noise, chacha, processor
from torch_privacy.mechanisms.noise.processor import Keystream, ProcessorNormals, in_the_rest

SIZE = 150_001
KEY = bytes(range(32))


def generator(name):
    noise = Noise(KEY)
    return {"processor": noise._processor, "device": noise._device}[name]


def drawn(name, step=3, size=SIZE, first=0, scale=0.3):
    total = torch.zeros(size, dtype=torch.float64)
    generator(name).add(step, [(total, first, scale)])
    return total


by_each_generator = pytest.mark.parametrize("name", ["processor", "device"])


def whole():
    total = {"w": torch.linspace(-1, 1, SIZE, dtype=torch.float32)}
    Noise(KEY).add_to(3, total, 0.3)
    return total["w"]


@pytest.mark.parametrize("ends", [[1], [2, 3], [65_536], [65_535, 65_537, 100_000], list(range(0, SIZE, 777))])
def test_slices_have_the_noise_of_the_whole(ends):
    starts, ends = [0, *ends], [*ends, SIZE]
    parts = torch.linspace(-1, 1, SIZE, dtype=torch.float32)
    for start, end in zip(reversed(starts), reversed(ends), strict=True):  # each rank on its own, in any order
        Noise(KEY).add_to(3, {"slice": parts[start:end]}, 0.3, {"slice": start})
    assert torch.equal(parts, whole())


def test_slices_of_several_tensors_find_their_places_in_one_call():
    parts = torch.linspace(-1, 1, SIZE, dtype=torch.float32)
    bounds = {"b": (100, 70_001), "a": (0, 100), "d": (80_000, SIZE), "c": (70_001, 80_000)}
    slices = {name: parts[start:end] for name, (start, end) in bounds.items()}
    Noise(KEY).add_to(3, slices, 0.3, {name: start for name, (start, _) in bounds.items()})
    assert torch.equal(parts, whole())


def test_a_tensor_without_noise_keeps_its_places():
    sums = {"a": torch.zeros(5).float(), "b": torch.full((7,), 1e-12).float(), "c": torch.zeros(SIZE - 12).float()}
    Noise(KEY).add_to(3, sums, {"a": 0.3, "b": 0.0, "c": 0.3})
    expected = whole() - torch.linspace(-1, 1, SIZE, dtype=torch.float32)
    assert torch.equal(sums["b"], torch.full((7,), 1e-12).float())  # not even rounded to a grid
    torch.testing.assert_close(torch.cat([sums["a"], sums["c"]]), torch.cat([expected[:5], expected[12:]]))


@by_each_generator
@pytest.mark.parametrize("first", [1, 5, 8, 2**33 + 3])
def test_any_place_can_be_the_first(name, first):
    start = first // 16 * 16
    longer = drawn(name, first=start, size=200)
    assert torch.equal(drawn(name, first=first, size=100), longer[first - start : first - start + 100])


@by_each_generator
@pytest.mark.parametrize("chunk", [2, 7, 1000, 32_768])
def test_chunks_do_not_matter(name, chunk, monkeypatch):
    size = 20 * chunk + 1
    expected = drawn(name, size=size)
    monkeypatch.setattr(processor, "CHUNK", chunk)
    monkeypatch.setattr(chacha, "CHUNK", chunk)
    assert torch.equal(drawn(name, size=size), expected)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_matter(threads):
    size, before = 600_001, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = drawn("processor", size=size)
        torch.set_num_threads(threads)
        assert torch.equal(drawn("processor", size=size), expected)
    finally:
        torch.set_num_threads(before)


@by_each_generator
def test_scales_do_not_matter_to_the_numbers(name):
    """Scales that differ by a power of two give the same numbers, also in one call."""
    total = torch.zeros(SIZE, dtype=torch.float64)
    cuts = [(0, 10), (10, 70_000), (70_000, SIZE)]
    scales = [0.3, 0.6, 2.4]
    parts = [(total[a:b], a, scale) for (a, b), scale in zip(cuts, scales, strict=True)]
    generator(name).add(3, parts)
    divided = torch.cat([total[a:b] / (scale / 0.3) for (a, b), scale in zip(cuts, scales, strict=True)])
    assert torch.equal(divided, drawn(name))


@by_each_generator
def test_steps_and_places_are_unrelated(name):
    z = [drawn(name, step=step).numpy() for step in (0, 1, 2**40)]
    for a, b in [(z[0], z[1]), (z[1], z[2]), (z[0][1:], z[0][:-1]), (z[0][2:], z[0][:-2]), (z[0], z[0][::-1])]:
        keep = np.arange(len(a)) < len(a) // 2
        assert abs(np.corrcoef(a[keep], b[keep])[0, 1]) < 5 / keep.sum() ** 0.5
        assert abs(np.corrcoef(a[keep] ** 2, b[keep] ** 2)[0, 1]) < 5 / keep.sum() ** 0.5


def test_words_of_steps_places_and_attempts_are_all_different():
    keystream = Keystream(KEY)
    found = []
    for step in (0, 1, 2**63):
        found.append(keystream.words(step, 0, 64, bytearray(1000)).view(np.uint64).tolist())
        for attempt in (0, 1):
            found.append(keystream.further_words(step, np.arange(0, 2**46, 2**40), attempt).flatten().tolist())
    words = [word for part in found for word in part]
    assert len(set(words)) == len(words)


def test_a_place_outside_of_the_rectangles_has_the_number_of_its_first_accepted_attempt():
    places, keystream = np.arange(7, 2007), Keystream(KEY)
    numbers = ProcessorNormals(KEY)._in_the_rest(3, places)
    attempts = [in_the_rest(keystream.further_words(3, places, attempt)) for attempt in range(4)]
    first = np.argmax([accepted for _, accepted in attempts], axis=0)
    assert set(first) >= {0, 1, 2}
    np.testing.assert_array_equal(numbers, np.choose(first, [tried for tried, _ in attempts]))


def test_words_do_not_depend_on_what_was_asked_for_before():
    keystream, memory = Keystream(KEY), bytearray(1000)
    for first, count in [(0, 7), (0, 7), (5, 2), (4, 3), (0, 1), (7, 11)]:
        expected = Keystream(KEY).words(2, 0, 40, bytearray(1000))[first : first + count]
        assert keystream.words(2, first, count, memory).tolist() == expected.tolist()
        keystream.further_words(2, np.arange(3), 1)


def test_more_words_than_there_is_room_for_are_never_returned():
    with pytest.raises(AssertionError):
        Keystream(KEY).words(0, 0, 2**17 + 1, bytearray(2**21))
    with pytest.raises(ValueError, match="at least 800 bytes"):
        Keystream(KEY).words(0, 0, 100, bytearray(700))


def test_words_are_aes_in_counter_mode():
    """NIST SP 800-38A, F.5.5: the key stream of its first block is that of the block's counter."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    words = Keystream(key).words(counter >> 64, 2 * (counter & (2**64 - 1)), 2, bytearray(100))
    assert words.tobytes().hex() == "0bdf7df1591716335e9a8b15c860c502"


@pytest.mark.parametrize("places", [{"a": 0, "b": 4}, {"a": 3, "b": 0}, {"a": 7, "b": 7}])
def test_places_that_two_tensors_share_are_refused(places):
    sums = {"a": torch.zeros(5), "b": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"Noise.add_to: places .* overlap"):
        Noise().add_to(0, sums, 1.0, places)
    assert not any(total.any() for total in sums.values())


def test_a_tensor_without_a_place_is_refused():
    with pytest.raises(ValueError, match="places lacks 'b'"):
        Noise().add_to(0, {"a": torch.zeros(5), "b": torch.zeros(5)}, 1.0, {"a": 0})


@pytest.mark.parametrize("place", [-1, 1.5, 2**47 - 4])
def test_a_place_out_of_range_is_refused(place):
    with pytest.raises(ValueError, match=r"Noise.add_to: places\['a'\]="):
        Noise().add_to(0, {"a": torch.zeros(5)}, 1.0, {"a": place})


def test_the_last_place_has_noise():
    total = torch.zeros(5)
    Noise().add_to(0, {"a": total}, 1.0, {"a": 2**47 - 5})
    assert total.all()
