# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, vocabularies, and the reviews that they serve."""

import lzma
import re
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from drawn import draws
from hypothesis import example, given

from torch_privacy.data import DataError, HashedWords, TrainingWords, Vocabulary, encode, load_imdb, tokenize

TEXTS = {
    "It's GOOD!<br /><br />Not 'great', though: 7/10.": ["it's", "good", "not", "great", "though", "7", "10"],
    "": [],
    " ?! ' -- ": [],
    "'quoted' don't-stop": ["quoted", "don't", "stop"],
    "a clich\u00e9, na\u00efve": ["a", "clich\u00e9", "na\u00efve"],
    "tab\tand\nline<br />break": ["tab", "and", "line", "break"],
    "''twice'' 'n'' ''' rock''n'roll": ["twice", "n", "rock''n'roll"],
    "'other'\x85'kinds'\u2003'of'\xa0'spaces'": ["other", "kinds", "of", "spaces"],
}


@pytest.mark.parametrize("text", TEXTS)
def test_tokenize(text):
    assert tokenize(text) == TEXTS[text]


@draws(100)
@given(st.text(st.characters(max_codepoint=127)))
def test_tokenize_agrees_with_an_expression_on_ascii(text):
    text = text.replace("<br />", " ")
    assert tokenize(text) == re.findall(r"[a-z0-9]+(?:'+[a-z0-9]+)*", text.lower())


@draws(100)
@given(st.text(st.sampled_from("a0' \n\x85\u2003\xe9<br/>") | st.characters()))
@example("0'\x85")
@example("''0")
def test_tokenize_takes_any_text_and_leaves_its_words_alone(text):
    assert all(tokenize(word) == [word] for word in tokenize(text))


WORDS = st.lists(st.text("ab c", max_size=12), max_size=6)


@draws(100)
@given(
    WORDS,
    st.integers(3, 6),
    st.integers(1, 5),
    st.sampled_from(["first", "last"]),
    st.sampled_from(["before", "after"]),
)
def test_encode_agrees_with_a_loop(texts, size, length, keep, pad):
    vocabulary = Vocabulary.frequent(texts, size=size, origin="these texts", public=True)
    counts = Counter(word for text in texts for word in text.split())
    words = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    assert vocabulary.words == tuple(words)
    expected = np.zeros((len(texts), length), np.int64)
    for row, text in zip(expected, texts, strict=True):
        numbers = [words.index(word) + 2 if word in words else 1 for word in text.split()]
        numbers = numbers[:length] if keep == "first" else numbers[-length:]
        if numbers:
            row[slice(None, len(numbers)) if pad == "after" else slice(-len(numbers), None)] = numbers
    assert np.array_equal(encode(texts, vocabulary, length=length, keep=keep, pad=pad), expected)


def test_vocabulary_says_whether_it_is_private():
    private = Vocabulary.frequent(["a"], size=3, origin="counted on the reviews", public=False)
    public = Vocabulary.frequent(["a"], size=3, origin="counted on a newspaper", public=True)
    assert private.not_covered == ("the vocabulary, counted on the reviews",)
    assert public.not_covered == HashedWords(5).not_covered == ()


@draws(100)
@given(st.lists(st.text(), max_size=20), st.integers(3, 100))
def test_hashed_words_lie_in_range_and_depend_on_the_word_alone(words, size):
    numbers = HashedWords(size).numbers(words)
    assert ((numbers >= 2) & (numbers < size)).all()
    assert all(HashedWords(size).numbers([word])[0] == number for word, number in zip(words, numbers, strict=True))


@pytest.mark.parametrize("wrong", [{"length": 0}, {"keep": "middle"}, {"pad": "left"}])
def test_encode_refuses_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}="):
        encode(["a"], HashedWords(5), **{"length": 3, **wrong})


def test_encode_refuses_one_text_for_many():
    with pytest.raises(ValueError, match=r"must be a list of texts, not one text\. Pass \[text\]\."):
        encode("a text", HashedWords(5), length=3)


@pytest.mark.parametrize("make", [HashedWords, lambda size: Vocabulary.frequent([], size=size, origin="", public=True)])
def test_vocabulary_refuses_a_size_without_room_for_a_word(make):
    with pytest.raises(ValueError, match="size=2 must be an integer of at least 3"):
        make(2)


REVIEWS = {"train": "0\t1\t0\tbad bad\tfilm\n1\t10\t0\tgood film\n", "test": "0\t2\t0\tbad \u00e9\n1\t9\t0\tgood\n"}


def write_reviews(folder, **changed):
    for part, lines in (REVIEWS | changed).items():
        (folder / f"imdb_{part}.tsv.xz").write_bytes(lzma.compress(lines.encode()))


def test_load_imdb_reads_lines_of_reviews(tmp_path):
    write_reviews(tmp_path)
    data = load_imdb(tmp_path, vocabulary=TrainingWords(5), length=4, verify=False)  # bad, film, good
    assert data.train.tensors[0].tolist() == [[0, 2, 2, 3], [0, 0, 4, 3]]
    assert data.test.tensors[0].tolist() == [[0, 0, 2, 1], [0, 0, 0, 4]]
    assert data.train.tensors[1].tolist() == data.test.tensors[1].tolist() == [0, 1]
    assert data.num_ids == (5,)
    assert data.train.tensors[0].dtype == torch.int64
    assert "counted without noise" in data.not_covered[0]


def test_load_imdb_takes_a_vocabulary_that_saw_no_review(tmp_path):
    write_reviews(tmp_path)
    public = Vocabulary(("good",), origin="a dictionary", public=True)
    for words in (public, HashedWords(50)):
        data = load_imdb(tmp_path, vocabulary=words, length=3, pad="after", verify=False)
        assert data.test.tensors[0][1].tolist() == [*words.numbers(["good"]), 0, 0]
        assert data.not_covered == ()
        assert data.num_ids == (words.size,)


@pytest.mark.parametrize("base", ["aclImdb", "imdb/aclImdb", "."])
def test_load_imdb_reads_the_authors_folder(tmp_path, base):
    for part, lines in REVIEWS.items():
        for line in lines.splitlines():
            label, stars, number, text = line.split("\t", 3)
            path = tmp_path / base / part / ("pos" if label == "1" else "neg") / f"{number}_{stars}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    data = load_imdb(tmp_path, vocabulary=TrainingWords(5), length=4, verify=False)
    assert data.train.tensors[0].tolist() == [[0, 2, 2, 3], [0, 0, 4, 3]]
    (tmp_path / "lines").mkdir()
    write_reviews(tmp_path / "lines")
    lines = load_imdb(tmp_path / "lines", vocabulary=HashedWords(50), verify=False)
    folder = load_imdb(tmp_path, vocabulary=HashedWords(50), verify=False)
    assert torch.equal(lines.test.tensors[0], folder.test.tensors[0])
    with pytest.raises(DataError, match=r"train: is truncated or changed .* or its folder aclImdb"):
        load_imdb(tmp_path, vocabulary=HashedWords(50))
    (tmp_path / base / "test" / "pos" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"notes\.txt: is not called NUMBER_STARS\.txt"):
        load_imdb(tmp_path, vocabulary=HashedWords(50), verify=False)


@pytest.mark.parametrize("lines", ["", "0\t1\t0\n", "2\t1\t0\ttext\n", "0 1 0 text\n"])
def test_load_imdb_names_a_line_that_it_cannot_read(tmp_path, lines):
    write_reviews(tmp_path, test=REVIEWS["test"] + lines if lines else "")
    with pytest.raises(DataError, match=rf"imdb_test\.tsv\.xz: line {3 if lines else 1} is not a label 0 or 1"):
        load_imdb(tmp_path, vocabulary=HashedWords(50), verify=False)


def test_load_imdb_asks_for_a_choice_of_vocabulary(tmp_path):
    with pytest.raises(TypeError, match="vocabulary"):
        load_imdb(tmp_path)
