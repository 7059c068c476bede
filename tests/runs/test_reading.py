# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import re
import tracemalloc
import zipfile
from contextlib import suppress
from time import process_time

import json_schema
import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy.experiments.auditing import read_canaries
from torch_privacy.experiments.runner import Run
from torch_privacy.privacy import statement_schema
from torch_privacy.runs.folder import RunFolder
from torch_privacy.support.read_file import parse_json, read_bytes
from torch_privacy.support.schema import violation

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.thorough
@given(TREES)
def test_what_json_writes_is_read(tree):
    try:
        content = json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert parse_json(content) == tree


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is not JSON"),
        (b"\xef\xbb\xbf{}", "it is not JSON"),
        (b"\xff", "it is not UTF-8 from byte 0 on"),
        (b"[NaN]", "it has NaN in place of a finite number"),
        (b"[1e999]", "it has '1e999' in place of a finite number"),
        (b"1" + b"0" * 30, "it has an integer of 31 digits"),
        (b"1" + b"0" * 9000, "it has an integer of 9001 digits"),
        (rb'"\ud800"', "it has half a character"),
        (b'{"a":1,"a":2}', "it has the key 'a' twice"),
        (b"[" * 65 + b"]" * 65, "it has more than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "it has more than 64 levels"),
    ],
)
def test_unusual_json_is_refused(content, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_json(content)


def test_memory_follows_the_file_and_not_the_limit(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"x" * 5000)
    tracemalloc.start()
    try:
        assert read_bytes(path, 2**33) == b"x" * 5000
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="more than 4999 bytes"):
        read_bytes(path, 4999)


LARGE = {  # JSON of a megabyte or more, each of which is refused or read at once
    "a key twice among many": "{" + ",".join(f'"{k}":1' for k in range(100_000)) + ',"99999":2}',
    "levels": "[" * 500_000,
    "levels of objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "an integer": "1" * 2**20,
    "a number": "0." + "1" * 2**20,
    "an exponent": "1e" + "9" * 2**20,
    "not a number": "[" + "NaN," * 100_000 + "NaN]",
    "an infinity": '{"epsilon": -Infinity}',
    "a text without end": '"' + "x" * 2**20,
}


@pytest.mark.parametrize("content", LARGE.values(), ids=LARGE)
def test_large_json_takes_no_time(content):
    start = process_time()
    with suppress(ValueError):
        parse_json(content.encode())
    assert process_time() - start < 3


HEADER = b'{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,%s]}}'
TENSORS = {  # files of safetensors with a header that lies
    "a long header": (2**63).to_bytes(8, "little") + b"{}",
    "a header beyond the file": (2**20).to_bytes(8, "little") + b"{}",
    "a huge shape": len(found := HEADER % (b"%d" % 2**40, b"%d" % 2**42)).to_bytes(8, "little") + found,
    "a shape that overflows": len(found := HEADER % (b"4294967296,4294967296", b"0")).to_bytes(8, "little") + found,
    "levels": (10**5).to_bytes(8, "little") + b"[" * 10**5,
    "nothing": b"",
}


@pytest.mark.parametrize("content", TENSORS.values(), ids=TENSORS)
def test_tensors_that_lie_about_their_size_are_refused(content, tmp_path):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(content)
    (tmp_path / "canaries.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        read_canaries(str(tmp_path / "canaries.safetensors"))


def test_arrays_that_lie_about_their_size_are_refused(tmp_path):
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d,)}" % 2**50
    array = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    with zipfile.ZipFile(tmp_path / "canaries.npz", "w") as file:
        file.writestr("x.npy", array)
    with pytest.raises(ValueError, match="cannot be read"):
        read_canaries(str(tmp_path / "canaries.npz"))


def test_bytes_of_a_name_are_kept():
    assert parse_json(json.dumps({"data": "\udcff"}).encode()) == {"data": "\udcff"}


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for name, words in {"pipe": "a pipe", ".": "a folder", "huge": "more than 9 bytes", "none": "No such file"}.items():
        with pytest.raises(ValueError, match=words):
            read_bytes(tmp_path / name, 9)
    with pytest.raises(ValueError, match="a device"):
        read_bytes("/dev/zero", 9)


SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 3}, "b": {"enum": ["x", "y"]}},
    "additionalProperties": {"type": ["array", "null"], "items": {"type": "number", "exclusiveMinimum": 0}},
}


@pytest.mark.thorough
@given(st.dictionaries(st.sampled_from("abc"), TREES | st.integers(0, 4) | st.sampled_from(["x", [0.5], [0]])) | TREES)
def test_validator_agrees_with_the_one_of_the_tests(value):
    """Beside whole floating-point numbers, which are integers there."""
    wrong = not isinstance(value, dict) or isinstance(value.get("a"), float)
    assert bool(violation(SCHEMA, value)) == (wrong or bool(json_schema.violations(SCHEMA, value)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "has no 'a'"),
        ({"a": 4}, "a is 4: must be at most 3"),
        ({"a": True}, "a is True: must be integer"),
        ({"a": 1, "b": "z"}, "b is 'z': must be one of 'x', 'y'"),
        ({"a": 1, "c": [1, math.inf]}, "c[1] is inf: must be number"),
        ({"a": 1, "c": [1] * 2**21}, "c has 2097152 items"),
        ({"a": 1, "c": 7}, "c is 7: must be array or null"),
    ],
)
def test_violations_are_told_in_words(value, words):
    assert violation(SCHEMA, value) == words


def test_every_keyword_of_the_published_schema_is_known():
    assert violation(statement_schema(), {}).startswith("has no 'format'")
    assert violation({**statement_schema(), "required": []}, {"private": True, "num_examples": 1}) == ""


@pytest.mark.thorough
def test_changed_files_of_a_finished_run_are_refused(tmp_path):
    run = Run.start(tmp_path / "run", "adult", epochs=0.1, expected_batch_size=2000, baseline=False)
    list(run.steps())
    run.finish()
    folder = RunFolder(tmp_path / "run")
    digests = folder.read_results()["files"]
    assert set(digests) == {"settings.json", "ledger.jsonl", "metrics.csv", "model.safetensors", "privacy.json"}
    for path, read in ((folder.metrics, folder.read_metrics), (folder.privacy, folder.read_statement)):
        read(digests)
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(ValueError, match="its digest is not that in results"):
            read(digests)
    results = json.loads(folder.results.read_text())
    for changed in (results | {"test_score": 0.5}, results | {"check": "0" * 64}, results | {"format": 3}):
        folder.write_json(folder.results, changed)
        with pytest.raises(ValueError, match=r"digest does not fit|format is 3"):
            folder.read_results()
    del results["check"]
    folder.write_json(folder.results, results)
    with pytest.raises(ValueError, match="digest does not fit"):
        folder.read_results()
