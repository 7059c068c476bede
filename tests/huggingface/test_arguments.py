# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``Trainer`` that would break the guarantee are refused by name, with the cure."""

import sys
from typing import Any

import pytest
import torch
from hugging import arguments, bert, encoded, trainer_of
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import torch_privacy as tp
from torch_privacy import huggingface
from torch_privacy.huggingface import PrivateTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch_compile.*")


class OwnLoss(PrivateTrainer):
    def compute_loss(self, model, inputs, **_):
        return model(**inputs).loss


class Drawing(PrivateTrainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.WeightedRandomSampler([1.0], 60)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from encoded()


class Packed(TrainingArguments):
    packing = True


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {  # name -> (arguments, message)
    "gradient clipping": ({"max_grad_norm": 0.5}, "max_grad_norm=0.5: it would rescale every update"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing=..., reduction='none'"),
    "batch size by trial": ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    "grouped by length": ({"train_sampling_strategy": "group_by_length"}, "batches are Poisson samples"),
    "in order": ({"train_sampling_strategy": "sequential"}, "batches are Poisson samples"),
    "compiled outside": ({"torch_compile": True}, "a private step runs uncompiled"),
    "noise by the padded length": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: its noise is scaled"),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    "steps in the backward": ({"optim": "lomo"}, "updates weights during the backward"),
    "layerwise": ({"optim": "galore_adamw_layerwise"}, "updates weights during the backward"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_argument_is_refused_by_name(case, tmp_path):
    settings, message = ARGUMENTS[case]
    with pytest.raises(tp.Refused, match=f"PrivateTrainer: these arguments cannot be kept.*{message}"):
        trainer_of(tmp_path, bert(), encoded(), **settings)


@pytest.mark.parametrize("name", ["fp16", "deepspeed", "_n_gpu", "fsdp"])
def test_other_machinery_is_refused_by_name(name, tmp_path):
    args = arguments(tmp_path)
    args.n_gpu  # noqa: B018  found before it is changed
    setattr(args, name, {"_n_gpu": 2, "deepspeed": {"zero": 2}}.get(name, True))
    args.fsdp_config = {"fsdp_version": 1}
    with pytest.raises(tp.Refused, match=f"{name.strip('_')}="):
        PrivateTrainer(bert(), args, train_dataset=encoded(), privacy={"clipping": tp.Flat(1.0)})


def test_all_offenders_are_named_at_once(tmp_path):
    with pytest.raises(tp.Refused, match=r"max_grad_norm=2.0.*label_smoothing_factor=0.1"):
        trainer_of(tmp_path, bert(), encoded(), max_grad_norm=2.0, label_smoothing_factor=0.1)


def test_packing_is_refused(tmp_path):
    with pytest.raises(tp.Refused, match="a packed row holds several examples"):
        PrivateTrainer(bert(), Packed(output_dir=str(tmp_path)), train_dataset=encoded(), privacy={})


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "joined rows": ({"collator": DataCollatorWithFlattening()}, "joins all examples of a batch in one row"),
    "iterable data": ({"data": Endless()}, "train_dataset is iterable"),
    "own sampler": ({"kind": Drawing}, "Drawing._get_train_sampler would not be used in training: batches are Poisson"),
    "own loss of a batch": ({"kind": OwnLoss}, "OwnLoss.compute_loss would not be used in training: override losses"),
}


@pytest.mark.parametrize("case", PARTS)
def test_part_is_refused(case, tmp_path):
    settings, message = PARTS[case]
    with pytest.raises(tp.Refused, match=message):
        trainer_of(tmp_path, bert(), settings.pop("data", encoded()), **settings)


PRIVACY: dict[str, tuple[dict[str, Any], str]] = {
    "of the trainer": ({"collate_fn": list}, r"'collate_fn' \(set by PrivateTrainer\(data_collator=...\)\)"),
    "misspelt": (
        {"noise_multplier": 1.0},
        "'noise_multplier' .did you mean 'noise_multiplier'..\\. Allowed: .*noise_multiplier",
    ),
    "of the examples": ({"dataset": []}, r"'dataset' \(set by PrivateTrainer\(train_dataset=...\)\)"),
    "two numbers of steps": ({"num_steps": 7}, "num_steps=7 and max_steps=3"),
}


@pytest.mark.parametrize("case", PRIVACY)
def test_keyword_of_privacy_is_refused(case, tmp_path):
    privacy, message = PRIVACY[case]
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, bert(), encoded(), privacy=privacy)


def test_examples_leave_to_the_trainer_what_it_sets(tmp_path):
    for own in ({"collate_fn": list}, {"num_workers": 1}):
        with pytest.raises(ValueError, match=r"leave (collate_fn|num_workers)= out of Examples: it is set by"):
            trainer_of(tmp_path, bert(), tp.Examples(encoded(), **own))
    with pytest.raises(
        TypeError,
        match=r"views= is now tp.Examples\(dataset, views=...\) in place of train_dataset; memory_budget= is now p",
    ):
        trainer_of(tmp_path, bert(), encoded(), privacy={"views": 2, "memory_budget": 2.0})


def test_missing_package_is_named_with_its_extra(monkeypatch):
    for name in [*sys.modules]:
        if name.startswith("torch_privacy.huggingface.") and not name.endswith(".losses"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"PrivateTrainer needs transformers.*torch-privacy\[huggingface\]"):
        _ = huggingface.PrivateTrainer


def test_search_of_settings_is_refused(tmp_path):
    with pytest.raises(tp.Refused, match=r"tp\.search_privately"):
        trainer_of(tmp_path, bert(), encoded()).hyperparameter_search()


def test_clipping_by_none_is_none(tmp_path):
    args = arguments(tmp_path, max_grad_norm=None)
    PrivateTrainer(bert(), args, train_dataset=encoded(), privacy={"clipping": tp.Flat(1.0)})


def test_default_clipping_is_switched_off_in_a_copy(tmp_path):
    args = arguments(tmp_path)
    trainer = PrivateTrainer(bert(), args, train_dataset=encoded(), privacy={"clipping": tp.Flat(1.0)})
    assert (args.max_grad_norm, trainer.args.max_grad_norm) == (1.0, 0.0)
    assert isinstance(trainer, Trainer)
    assert trainer.training is None
    with pytest.raises(tp.Refused, match="Call train\\(\\) first"):
        trainer.privacy_statement()
