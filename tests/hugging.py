# SPDX-License-Identifier: Apache-2.0
"""Provides tiny random models of transformers, IMDb reviews for them, and private trainings of both kinds."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import torch_privacy as tp
from torch_privacy.data.files import DataError
from torch_privacy.data.imdb import SOURCE
from torch_privacy.data.text import tokenize
from torch_privacy.huggingface import PrivateTrainer, per_example_loss

WORDS = 40
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "eos_token": "[EOS]"}
PRIVACY = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "delta": 1e-3, "expected_batch_size": 6}


@cache
def reviews(count: int = 60) -> list[dict[str, Any]]:
    """Returns the first reviews of each class of IMDb, text and label; made-up ones if there is no IMDb here."""
    try:
        lines = SOURCE.folder(None).read("imdb_train.tsv.xz").content.decode().split("\n")
    except DataError:
        lines = [f"{i // 12500}\t5\t{i}\t{'the film is a movie that was ' * (i % 3 + 1)}" for i in range(25000)]
    half = count // 2
    chosen = [*lines[:half], *lines[12500 : 12500 + half]]
    return [{"text": line.split("\t", 3)[3], "label": int(line[0])} for line in chosen]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whitespace and a few public words; no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = "the a and of to is in it i this that was as with for but film movie on not you his are have be he".split()
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, **SPECIAL)


def encoded(length: int = 12, labels: bool = True, count: int = 60) -> list[dict[str, Any]]:
    """Returns reviews of different lengths as word ids, unpadded, with their label if asked for."""
    rows = []
    for i, review in enumerate(reviews(count)):
        words = " ".join(tokenize(review["text"])[: length - i % 4])
        row = dict(tokenizer()(words, return_token_type_ids=False))
        rows.append(row | {"labels": review["label"]} if labels else row)
    return rows


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**small | ends | settings))


def bert_config(**settings: Any) -> BertConfig:
    small = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(**small | {"intermediate_size": 16, "max_position_embeddings": 16} | settings)


def bert(kind: type = BertForSequenceClassification, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(bert_config(**settings))


def masked_bert() -> BertForMaskedLM:
    return bert(BertForMaskedLM)


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0))


def arguments(folder: Any, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    sizes = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 0.01}
    return TrainingArguments(output_dir=str(folder), **quiet | sizes | settings)


def trainer_of(folder: Any, model: Any, data: Any, collator: Any = None, privacy: Any = None, **settings: Any):
    """Returns a private trainer with fixed keys; of the settings, those of ``Trainer`` begin with a known name.

    ``privacy`` may have ``assume_independent``, which becomes a field of `tp.Examples`.
    """
    data, privacy = _assuming(data, privacy)
    named = {
        name: settings.pop(name)
        for name in ("callbacks", "eval_dataset", "compute_metrics", "optimizers")
        if name in settings
    }
    named |= {name: settings.pop(name) for name in ("processing_class", "model_init") if name in settings}
    kind = settings.pop("kind", PrivateTrainer)
    return kind(
        model,
        arguments(folder, **settings),
        data_collator=collator,
        train_dataset=data,
        privacy=PRIVACY | {"test_seed": 1} | privacy,
        **named,
    )


def plainly_trained(folder: Any, model: Any, data: Any, collator: Any = None, privacy: Any = None, **settings: Any):
    """Returns the training after the plain loop with the optimizer and schedule of the same arguments."""
    args = arguments(folder, **settings)
    data, privacy = _assuming(data, privacy)
    given = data if isinstance(data, tp.Examples) else tp.Examples(data)
    helper = Trainer(model, args, data_collator=collator, train_dataset=given.dataset)
    helper.create_optimizer_and_scheduler(args.max_steps)
    training = tp.PrivateTraining(
        model,
        helper.optimizer,
        replace(given, collate_fn=helper.data_collator),
        num_steps=args.max_steps,
        performance=tp.Performance(microbatch_size=args.per_device_train_batch_size),
        scheduler=helper.lr_scheduler,
        **PRIVACY | {"test_seed": 1} | privacy,
    )
    model.train()
    for batch in training:
        losses = per_example_loss(model, batch)
        training.step(losses if training.settings.views == 1 else losses.view(-1, training.settings.views))
    return training


def _assuming(data: Any, privacy: Any) -> tuple[Any, dict[str, Any]]:
    privacy = dict(privacy or {})
    if reason := privacy.pop("assume_independent", None):
        given = data if isinstance(data, tp.Examples) else tp.Examples(data)
        data = replace(given, assume_independent=reason)
    return data, privacy


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def without_reports() -> Iterator[None]:
    """Leaves out the page of a run folder, whose plots take longer than these trainings."""
    with patch("torch_privacy.runs.report.render.render", lambda folders: "<html></html>"):
        yield


@contextmanager
def offline() -> Iterator[None]:
    """Lets a program find tiny random models, a whitespace tokenizer and 512 beginnings of reviews, for one step."""
    data = Dataset.from_list([row | {"text": row["text"][:50]} for row in (reviews() * 9)[:512]])
    quick = {"num_train_epochs": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "eval_on_start": False}
    found = {
        "datasets.load_dataset": lambda *_: {"train": data, "test": data.select(range(40))},
        "transformers.AutoTokenizer.from_pretrained": lambda *_: tokenizer(),
        "transformers.AutoModelForCausalLM.from_pretrained": lambda *_: gpt2(n_positions=64),
        "transformers.AutoModelForSequenceClassification.from_pretrained": lambda *_, **settings: bert(
            max_position_embeddings=64, **settings
        ),
        "transformers.trainer.PrinterCallback": TrainerCallback,
        "transformers.TrainingArguments": lambda **settings: TrainingArguments(**settings | quick),
    }
    with without_reports(), ExitStack() as stack:
        for name, replacement in found.items():
            stack.enter_context(patch(name, replacement))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*will be removed in v6", FutureWarning)  # by PEFT
            yield
