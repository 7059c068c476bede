# SPDX-License-Identifier: Apache-2.0
"""A tiny language model: what it reads, that it is private, what it draws, how its texts are judged."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.cli import run as command
from torch_privacy.data.imdb import Texts
from torch_privacy.experiments import auditing
from torch_privacy.experiments.auditing import subject_of
from torch_privacy.runs.folder import RunFolder
from torch_privacy_papers.text import features as of_texts
from torch_privacy_papers.text import generator, judge, pretrained
from torch_privacy_papers.text.language import (
    CODES,
    END,
    IGNORED,
    PLAIN,
    LanguageModel,
    inputs_and_targets,
    losses,
    new_tokenizer,
)

LENGTH = 12
GOOD, BAD = "what a fine film it was", "a dull plot<br />and AWFUL acting"
SMALL = ["--epsilon", "8", "--epochs", "1", "--batch-size", "20", "--delta", "1e-3"]


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer([GOOD, BAD] * 5, 280)


@pytest.fixture
def model(tokenizer):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    return LanguageModel(tokenizer, LENGTH, units=16, layers=2)


def clear_caches():
    for cached in (generator.load_texts, generator.load_pretrained, generator._as_learned):
        cached.cache_clear()


def shrink(patch, folder):
    """Makes the reviews two sentences: 40 private, 20 public, 10 others, 10 real."""
    torch.set_default_dtype(torch.float32)
    labels = np.arange(40) % 2
    part = Texts([(BAD, GOOD)[label] for label in labels], labels, {"file": "digest"})
    patch.setattr(generator, "load_imdb_texts", lambda folder: (part, part))
    patch.setattr(generator, "NUM_PUBLIC", 20)
    patch.setattr(generator, "NUM_REAL", 10)
    defaults = replace(generator.DEFAULTS, length=LENGTH, vocabulary=300, num_public=20)
    patch.setattr(generator, "DEFAULTS", defaults)
    patch.setattr(generator, "STUDY", replace(generator.STUDY, defaults=defaults))
    patch.setattr(pretrained, "BATCH_SIZE", 4)
    patch.setenv(of_texts.VARIABLE, str(folder / "cache"))
    clear_caches()


@pytest.fixture
def small(tmp_path, monkeypatch):
    shrink(monkeypatch, tmp_path)
    yield
    clear_caches()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run on these reviews."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, folder)
        assert command(["train", "text-generator", *SMALL, "--run", str(folder / "run"), "--quiet"]) == 0
        clear_caches()
    return folder / "run"


@pytest.fixture
def trained(finished, small, tmp_path, capsys):
    """A copy of that folder, to be changed."""
    capsys.readouterr()
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_every_text_has_the_same_shape_and_ends(model):
    long = " ".join([GOOD] * 9)
    x, y = model.reader.examples(["", "fine", GOOD, long], [2, 3, 3, 2])
    assert x.shape == y.shape == (4, LENGTH - 1)
    assert x[:, 0].tolist() == [2, 3, 3, 2]
    for i, text in enumerate(["", "fine", GOOD, long]):
        tokens = model.reader.encode(text)[-(LENGTH - 2) :]
        counted = [*tokens, END]
        assert y[i, : len(counted)].tolist() == counted
        assert (y[i, len(counted) :] == IGNORED).all()
        assert x[i, 1 : len(tokens) + 1].tolist() == tokens


def test_names_of_codes_in_a_text_are_no_codes(model):
    tokens = model.reader.encode("<end> a <positive> film <plain>")
    assert min(tokens) > max(CODES.values())
    assert model.reader.decode(tokens).split() == ["a", "film"]


def test_network_looks_at_the_past_and_at_the_code_alone(model):
    x, _ = model.reader.examples([GOOD, BAD], [2, 3])
    before = model(x)
    changed = x.clone()
    changed[:, 5:] = PLAIN
    assert torch.allclose(model(changed)[:, :5], before[:, :5], atol=1e-6)
    assert not torch.allclose(model(changed)[:, 5:], before[:, 5:], atol=1e-3)
    changed = x.clone()
    changed[:, 0] = PLAIN
    assert ((model(changed) - before).abs().amax(2) > 1e-3).all()
    model.blocks = torch.nn.Sequential()  # without attention
    assert ((model(changed) - model(x)).abs().amax(2) > 1e-6).all()


def test_losses_are_means_over_the_tokens_of_each_text(model):
    texts = ["", "fine", GOOD]
    x, y = model.reader.examples(texts, [2, 3, 3])
    found = losses(model(x), y)
    for i, text in enumerate(texts):
        count = len(model.reader.encode(text)[-(LENGTH - 2) :]) + 1
        expected = torch.nn.functional.cross_entropy(model(x[i : i + 1])[0, :count], y[i, :count])
        torch.testing.assert_close(found[i], expected)


def test_drawn_texts_follow_the_networks_probabilities(model):
    torch.nn.init.normal_(model.words.weight, std=0.3)
    prompt = "what a"
    begun = torch.tensor([[2, *model.reader.encode(prompt)]])
    logits = model(begun)[0, -1]
    logits[PLAIN : max(CODES.values()) + 1] = -torch.inf
    expected = logits.softmax(0)
    first = []
    draw = torch.multinomial

    def watched(probabilities, *arguments, **more):
        torch.testing.assert_close(probabilities, expected.expand_as(probabilities)) if not first else None
        first.append(draw(probabilities, *arguments, **more))
        return first[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", watched)
        texts = model.draw([2] * 200, prompt, seed=3)
    assert texts == model.draw([2] * 200, prompt, seed=3) != model.draw([2] * 200, prompt, seed=4)
    assert all(text.startswith(prompt) for text in texts)
    counts = torch.bincount(first[0].flatten(), minlength=len(expected)) / 200
    assert (counts - expected).abs().max() < 0.2  # fails by chance with a probability of 2e-14 for each token


@pytest.mark.parametrize("owners", [None, [i // 3 for i in range(30)]])
def test_training_is_private_by_texts_and_by_owners(model, owners):
    x, y = model.reader.examples([GOOD, BAD, "fine"] * 10, [3, 2, 3] * 10)
    of_owners = {} if owners is None else {"owners": owners, "per_owner": 2}
    training = tp.PrivateTraining(
        model,
        torch.optim.Adam(model.parameters()),
        tp.Examples(TensorDataset(x, y), **of_owners),
        expected_batch_size=5,
        num_steps=3,
        clipping=tp.Automatic(clip_norm=1.0),
        noise_multiplier=1.0,
        delta=1e-3,
    )
    for inputs, targets in training:
        training.step(losses(training.model(inputs), targets))
    assert training.step_count == 3
    assert training.settings.num_units == (30 if owners is None else 10)


@pytest.mark.thorough
def test_pretraining_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv(of_texts.VARIABLE, str(tmp_path / "whole"))
    monkeypatch.setattr(pretrained, "BATCH_SIZE", 2)
    texts = [GOOD, BAD, GOOD + BAD] * 8
    whole = pretrained.pretrained(texts, LENGTH, 280)
    monkeypatch.setenv(of_texts.VARIABLE, str(tmp_path / "killed"))
    read, parts = pretrained._read, []

    def killed(*arguments):
        if len(parts) == 3:
            raise KeyboardInterrupt
        parts.append(arguments[-1])
        read(*arguments)

    monkeypatch.setattr(pretrained, "_read", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrained.pretrained(texts, LENGTH, 280)
    monkeypatch.setattr(pretrained, "_read", lambda *arguments: (parts.append(arguments[-1]), read(*arguments)))
    again = pretrained.pretrained(texts, LENGTH, 280)
    assert parts == list(range(pretrained.PARTS))
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight)
    pretrained.pretrained(texts, LENGTH, 280)
    assert len(parts) == pretrained.PARTS
    (file,) = (tmp_path / "killed").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_pieces_are_all_tokens_of_the_texts(model):
    texts = ["", GOOD, " ".join([BAD] * 4)]
    pieces = pretrained._pieces(model, texts)
    assert pieces.shape[1] == LENGTH
    x, y = inputs_and_targets(pieces)
    assert (x[:, 0] == PLAIN).all()
    read = [token for text in texts for token in model.reader.encode(text)]
    assert sorted(token for token in y.flatten().tolist() if token not in (END, IGNORED)) == sorted(read)


def test_codes_mean_nothing_before_private_training(small):
    found = generator.new_model(generator.DEFAULTS)
    x, _ = found.reader.examples([GOOD] * 3, [PLAIN, *CODES.values()])
    logits = found(x)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_generate_draws_from_the_run_alone(trained, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(generator, "load_imdb_texts", None)
    monkeypatch.setenv(of_texts.VARIABLE, str(tmp_path / "no cache"))
    out = tmp_path / "texts.jsonl"
    arguments = ["generate", str(trained), "--prompt", "A film", "--number", "5"]
    assert command([*arguments, "--seed", "7", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 7
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["label"] for line in lines] == ["negative", "positive", "negative", "positive", "negative"]
    assert all(line["seed"] == 7 and line["text"].startswith("a film") for line in lines)
    assert command([*arguments, "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == lines
    assert command([*arguments, "--label", "positive", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {text["label"] for text in found["texts"]} == {"positive"}
    again = [*arguments, "--label", "positive", "--json", "--seed", str(found["seed"])]
    assert command(again) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == found["texts"]


def of_adult(run):
    folder = RunFolder(run)
    results = {name: value for name, value in folder.read_results().items() if name not in ("check", "format")}
    folder.write_checked(folder.results, results | {"experiment": "adult"})


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda run: None, ["--prompt", "a film " * 40], "tokens, and texts of this network at most 11. Give one of"),
        (lambda run: None, ["--label", "bad"], "--label 'bad' must be one of 'negative', 'positive'"),
        (lambda run: (run / "model.safetensors").write_bytes(b"other"), [], "model.safetensors"),
        (lambda run: (run / "results.json").unlink(), [], "results.json"),
        (of_adult, [], "is no run of a language model. Name a folder that train text-generator has made"),
    ],
)
def test_generate_refuses(change, arguments, message, trained, capsys):
    change(trained)
    assert command(["generate", str(trained), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_distance_is_that_of_normal_distributions():
    torch.manual_seed(0)
    x = torch.randn(500, 4, dtype=torch.float64)
    assert judge.frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert judge.frechet_distance(x, x + 3) == pytest.approx(4 * 9)
    moved = (x - x.mean(0)) * 2 + x.mean(0)
    assert judge.frechet_distance(x, moved) == pytest.approx(float(torch.cov(x.T).trace()))


def test_novelty_counts_runs_of_words():
    assert judge.novelty(["a b c d e f"], ["x a b c d e", "f"]) == 0.5
    assert judge.novelty(["a b c d e"], ["a b c d e"]) == 0
    assert judge.novelty(["too short"], ["too short"]) == 0


def test_classifier_learns_from_generated_texts_alone():
    torch.manual_seed(0)
    labels = torch.arange(400) % 2
    x = torch.randn(400, 2, 5, dtype=torch.float64)
    x[:, 1, 2] += 3 * labels
    assert judge.accuracy(x[:200], labels[:200], x[200:], labels[200:]) > 0.85
    assert judge.accuracy(x[:200], 1 - labels[:200], x[200:], labels[200:]) < 0.15


@pytest.mark.thorough
def test_rows_judge_the_texts_of_every_network(small, trained, monkeypatch):
    monkeypatch.setattr(judge, "embedded", lambda texts: torch.randn(len(texts), 2, 3, dtype=torch.float64))
    few = {"num_judged": 8, "length": LENGTH, "vocabulary": 300, "num_public": 20}
    context = generator.Context(quick=False, seed=0, data=None)
    of_real = generator.of_real_texts(few, context)
    assert of_real[generator.NEW] == 0  # all texts are alike
    for numbers in (of_real, generator.of_public_network(few, context), generator.of_run(RunFolder(trained))):
        assert set(numbers) <= set(generator.COLUMNS)
        assert 0 <= numbers[generator.NEW] <= 1


@pytest.mark.thorough
def test_audit_has_secret_numbers_among_the_reviews(small, monkeypatch):
    monkeypatch.setattr(generator, "NUM_CANARIES", 12)
    audited = {"target_epsilon": 8.0, "expected_batch_size": 20, "delta": 1e-3, "length": 32, "num_examples": 30}
    monkeypatch.setattr(generator, "AUDITED", audited)
    audit, seen = generator.audit_experiment, []

    def watched(name, settings, canaries, **more):
        seen.append(canaries)
        return audit(name, settings, canaries, **more)

    monkeypatch.setattr(generator, "audit_experiment", watched)
    monkeypatch.setattr(auditing, "load_trainable", lambda name: generator.STUDY)
    numbers = generator.audited(generator.Context(quick=False, seed=0, data=None))
    assert 0 <= numbers[generator.FOUND] <= numbers[generator.EXACT].high <= 8
    (canaries,) = seen
    assert len(canaries) == 12
    reader = generator.new_model(replace(generator.DEFAULTS, length=32)).reader
    for x, y in (canaries[i] for i in range(12)):
        assert x.shape == y.shape == (31,)
        text = reader.decode(x[1:].tolist())
        assert text.startswith(generator.SECRET)
        secret = text.removeprefix(generator.SECRET).replace(" ", "")
        assert secret.isdecimal()
        assert len(secret) == 6


def test_a_run_is_audited_with_its_own_settings(trained):
    experiment, settings = subject_of(str(trained))
    assert experiment == "text-generator"
    assert settings["length"] == LENGTH
