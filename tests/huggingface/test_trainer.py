# SPDX-License-Identifier: Apache-2.0
"""``PrivateTrainer`` makes the steps of the plain loop, bit for bit, and shows releases only."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from hugging import (
    assert_equal,
    bert,
    encoded,
    gpt2,
    masked_bert,
    plainly_trained,
    t5,
    tokenizer,
    trainer_of,
    weights,
)
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    TrainerCallback,
)

import torch_privacy as tp
from torch_privacy.huggingface import PrivateTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),  # by PEFT
]


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


def adapted() -> Any:
    torch.manual_seed(1)
    return get_peft_model(
        gpt2(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def pairs() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][::-1][:5]} for row in encoded()]


def language(mlm: bool = False) -> Any:
    return DataCollatorForLanguageModeling(tokenizer(), mlm=mlm)


QUICK = {"assume_independent": "rehearsals are compared with the first two cases"}
CASES = {  # name -> (model, data, collator, privacy, further arguments)
    "gpt2": lambda: (gpt2, encoded(labels=False), language(), {}, {}),
    "masked bert": lambda: (masked_bert, encoded(labels=False), language(True), {}, {}),
    "gpt2 with LoRA": lambda: (adapted, encoded(labels=False), language(), QUICK, {}),
    "bert, classes": lambda: (bert, encoded(), DataCollatorWithPadding(tokenizer()), QUICK, {}),
    "t5": lambda: (t5, pairs(), DataCollatorForSeq2Seq(tokenizer(), model=t5()), QUICK, {}),
    "library datasets": lambda: (bert, Dataset.from_list(texts()), DataCollatorWithPadding(tokenizer()), QUICK, {}),
    "workers": lambda: (bert, encoded(), DataCollatorWithPadding(tokenizer()), QUICK, {"dataloader_num_workers": 1}),
    "checkpointing": lambda: (gpt2, encoded(labels=False), language(), QUICK, {"activation_checkpointing": True}),
    "two views": lambda: (masked_bert, tp.Examples(encoded(labels=False), views=2), language(True), QUICK, {}),
    "empty batches": lambda: (bert, encoded(), DataCollatorWithPadding(tokenizer()), QUICK | RARE, {"max_steps": 6}),
}
RARE = {"expected_batch_size": 0.7, "test_seed": 4}


def texts() -> list[dict[str, Any]]:
    """Returns reviews with a column that the model does not take."""
    return [row | {"text": "not an input"} for row in encoded()]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_plain_loop(case, tmp_path):
    new_model, data, collator, privacy, settings = CASES[case]()
    model, other = new_model(), new_model()
    trainer = trainer_of(tmp_path, model, data, collator, privacy, **{"max_steps": 2} | settings)
    before = weights(model)
    trainer.train()
    other.config.use_cache = False  # as the Trainer does
    if "activation_checkpointing" in settings:  # which takes other methods, so that the last bits differ
        other.gradient_checkpointing_enable({"use_reentrant": False})
    plain = data.remove_columns("text") if isinstance(data, Dataset) else data
    settings = {name: value for name, value in settings.items() if name == "max_steps"}
    expected = plainly_trained(tmp_path, other, plain, collator, privacy, **{"max_steps": 2} | settings)
    assert_equal(weights(model), weights(other))
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert trainer.training.spent().epsilon == expected.spent().epsilon
    assert trainer.state.global_step == trainer.training.step_count == settings.get("max_steps", 2)


class Events(TrainerCallback):
    """Notes what callbacks see, and the rehearsals that the training makes meanwhile."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.rates: list[float] = []
        self.gradients: list[bool] = []

    def on_step_begin(self, args, state, control, **_):
        self.events.append(("begin", state.global_step))

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append(all(p.grad is not None for p in model.parameters() if p.requires_grad))

    def on_substep_end(self, args, state, control, **_):
        self.events.append(("part", state.global_step))

    def on_step_end(self, args, state, control, lr_scheduler=None, **_):
        self.events.append(("end", state.global_step))
        self.rates.append(lr_scheduler.get_last_lr()[0])

    def on_log(self, args, state, control, logs=None, **_):
        self.events.append(("log", state.global_step))


@pytest.mark.thorough
def test_callbacks_logs_and_schedules_see_releases_only(tmp_path):
    events, turns = Events(), []
    trainer = trainer_of(
        tmp_path,
        bert(),
        encoded(),
        DataCollatorWithPadding(tokenizer()),
        {"expected_batch_size": 5},
        callbacks=[events],
        logging_strategy="steps",
        logging_steps=1,
        max_steps=3,
        include_num_input_tokens_seen="all",
    )
    step = trainer.training_step
    trainer.training_step = lambda *args: turns.append(trainer.state.global_step) or step(*args)
    trainer.train()
    seen = [event for event in events.events if event[0] != "part"]
    assert seen == [pair for k in range(3) for pair in (("begin", k), ("end", k + 1), ("log", k + 1))] + [("log", 3)]
    assert len(turns) > 2 * sum(name in ("part", "end") for name, _ in events.events)  # others are rehearsals
    assert events.rates == pytest.approx([0.01 * 2 / 3, 0.01 / 3, 0.0])
    assert events.gradients == [True] * 3  # the private ones
    drawn = sum(len(trainer.training._state.releases.draws.indices(k)) for k in range(3))
    tokens = trainer.state.num_input_tokens_seen
    assert 9 * drawn <= tokens <= 12 * drawn  # of reviews with 9 to 12 words, padded
    assert trainer.state.total_flos == 6 * tokens * trainer.model.num_parameters(exclude_embeddings=True)


@pytest.mark.thorough
def test_losses_in_logs_are_called_not_private_and_epsilon_stands_beside(tmp_path):
    settings = {"logging_strategy": "steps", "logging_steps": 1, "max_steps": 2}
    privacy = QUICK | {"test_seed": None}
    trainer = trainer_of(tmp_path, bert(), encoded(), DataCollatorWithPadding(tokenizer()), privacy, **settings)
    output = trainer.train()
    for logs in trainer.state.log_history:
        assert not {"loss", "train_loss", "grad_norm"} & logs.keys()
        assert logs["train_loss_not_private"] == pytest.approx(0.7, abs=0.2)
    first, *_, last = trainer.state.log_history
    assert first["epsilon"] < last["epsilon"]
    spent = trainer.training.spent().epsilon.high
    assert spent <= float(f"{last['epsilon']:.4g}") == last["epsilon"] < 1.001 * spent  # as transformers prints it
    assert "train_loss_not_private" in output.metrics


@pytest.mark.thorough
def test_steps_of_epochs_are_counted_in_whole_numbers(tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 1.5}
    privacy = QUICK | {"expected_batch_size": 25}  # 60 examples: 3 steps in an epoch, 3.6 in one and a half
    trainer = trainer_of(tmp_path, bert(), encoded(), DataCollatorWithPadding(tokenizer()), privacy, **settings)
    trainer.train()
    assert trainer.training.settings.num_steps == trainer.state.global_step == trainer.state.max_steps == 4
    assert trainer.training.settings.performance.microbatch_size == 4


@pytest.mark.thorough
def test_whole_epochs_are_those_of_the_plain_loop(tmp_path):
    """Of 60 examples; the mean batch size is moved from 29.5 to 30."""
    collator, privacy = DataCollatorWithPadding(tokenizer()), QUICK | {"expected_batch_size": 29.5}
    trainer = trainer_of(tmp_path, model := bert(), encoded(), collator, privacy, max_steps=-1, num_train_epochs=1)
    trainer.train()
    assert trainer.training.settings.sampling == tp.BallsAndBins()
    assert trainer.state.global_step == trainer.training.settings.num_steps == 2
    assert trainer.state.epoch == 1
    bins = {"expected_batch_size": 30, "sampling": tp.BallsAndBins()}
    plainly_trained(tmp_path, other := bert(), encoded(), collator, QUICK | bins, max_steps=2)
    assert_equal(weights(model), weights(other))


def test_batch_size_is_that_of_the_arguments_unless_given(tmp_path):
    trainer = trainer_of(tmp_path, bert(), encoded(), None, gradient_accumulation_steps=3)
    assert trainer._privacy["expected_batch_size"] == 6
    privacy = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0}
    args = trainer.args
    trainer = type(trainer)(bert(), args, train_dataset=encoded(), privacy=privacy)
    assert (trainer._privacy["expected_batch_size"], trainer._privacy["performance"].microbatch_size) == (12, 4)
    assert (args.max_grad_norm, trainer.args.max_grad_norm) == (0.0, 0.0)


def test_mixed_precision_trains_as_the_plain_loop_with_a_prepared_model(tmp_path):
    model, other, collator = gpt2(), gpt2(), language()
    trainer = trainer_of(tmp_path, model, encoded(labels=False), collator, QUICK, bf16=True, max_steps=1)
    trainer.train()
    other.config.use_cache = False
    other = trainer.accelerator.prepare_model(other)
    plainly_trained(tmp_path, other, encoded(labels=False), collator, QUICK, max_steps=1, bf16=True)
    assert_equal(weights(model), weights(other))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    whole = gpt2()
    plainly_trained(tmp_path, whole, encoded(labels=False), collator, QUICK, max_steps=1)
    assert not torch.equal(weights(model)[0], weights(whole)[0])  # the forward was rounded to bfloat16


def test_budget_ends_the_training(tmp_path):
    examples = tp.Examples(encoded(), budget=tp.privacy.Budget(0.9, 1e-3))
    trainer = trainer_of(tmp_path, bert(), examples, DataCollatorWithPadding(tokenizer()), QUICK)
    trainer.train()
    assert trainer.state.global_step == trainer.training.step_count == 2
    assert trainer.training.spent().epsilon.high <= 0.9


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_owners_are_a_column_of_the_data(kind, tmp_path):
    rows = [row | {"author": i // 3} for i, row in enumerate(encoded())]
    data = tp.Examples(kind(rows), owners="author", per_owner=2)
    trainer = trainer_of(
        tmp_path, bert(), data, DataCollatorWithPadding(tokenizer()), QUICK, max_steps=-1, num_train_epochs=0.6
    )
    trainer.train()
    assert trainer.training.settings.num_steps == 2  # 0.6 * 20 authors / 6
    assert "author" in str(trainer.training.spent())
    assert trainer.training.statement()["unit"] == "one author, at most 2 of its examples in a step"
    with pytest.raises(ValueError, match=r"owners='name' is no .*author"):
        tp.Examples(kind(rows), owners="name", per_owner=2)


class WeighedByTheLast(PrivateTrainer):
    """Carries the mean loss of each batch into the losses of the next one."""

    scale = 1.0

    def losses(self, model, inputs):
        return super().losses(model, inputs) * self.scale

    def training_step(self, model, inputs, num_items_in_batch=None):
        losses = super().training_step(model, inputs, num_items_in_batch)
        if self.training is not None and not self.training.rehearsing:
            self.scale = float(losses.mean()) / self.scale
        return losses


def test_attributes_of_a_trainer_that_the_loop_has_no_name_for_are_looked_at(tmp_path):
    collator = DataCollatorWithPadding(tokenizer())
    with pytest.warns(UserWarning, match=r"losses depend on 'WeighedByTheLast\.scale'"):
        trainer_of(tmp_path, bert(), encoded(), collator, {}, max_steps=9, kind=WeighedByTheLast).train()
