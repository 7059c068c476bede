# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a ``PrivateTrainer``, and takes from them those of the ``PrivateTraining``."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, TrainingArguments

from ..mechanisms.clipping import MicroBatches
from ..mechanisms.scheduled import unscheduled
from ..sampling.examples import Examples
from ..support.validate import Refused
from ..training import PrivateTraining
from ..training.old_spelling import hint_for, refuse_moved
from ..training.sampling import number_of_steps, sampling_of
from ..training.settings import USUAL, Performance

WHERE = "PrivateTrainer"
LOG = logging.getLogger(__name__)
SET_BY_TRAINER = {  # argument of PrivateTraining -> what sets it
    "model": "PrivateTrainer(model=...)",
    "optimizer": "TrainingArguments(optim=...) or PrivateTrainer(optimizers=...)",
    "dataset": "PrivateTrainer(train_dataset=...)",
    "collate_fn": "PrivateTrainer(data_collator=...)",
    "num_workers": "TrainingArguments(dataloader_num_workers=...)",
    "scheduler": "TrainingArguments(lr_scheduler_type=...) or PrivateTrainer(optimizers=...)",
    "epochs": "TrainingArguments(num_train_epochs=...)",
}
ALLOWED = [name for name in inspect.signature(PrivateTraining).parameters if name not in (*SET_BY_TRAINER, "old")]
UNLESS = "losses are computed by PrivateTrainer.losses(model, inputs), which returns (n,), one for each example"


def checked_privacy(privacy: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Returns the keywords of the ``PrivateTraining``: those given, and those that the arguments determine."""
    if not isinstance(privacy, Mapping):
        raise ValueError(
            f"{WHERE}: privacy={privacy!r} must hold keywords of PrivateTraining, such as "
            "dict(expected_batch_size=1024, clipping=tp.Automatic(), target_epsilon=8.0, delta=1e-6)."
        )
    refuse_moved(WHERE, [name for name in privacy if name not in SET_BY_TRAINER], "train_dataset")
    wrong = [f"{name!r} (set by {SET_BY_TRAINER[name]})" for name in privacy if name in SET_BY_TRAINER]
    unknown = [name for name in privacy if name not in SET_BY_TRAINER and name not in ALLOWED]
    wrong += [f"{name!r}{hint_for(name, ALLOWED)}" for name in unknown]
    if wrong:
        raise ValueError(f"{WHERE}: privacy has {', '.join(wrong)}. Allowed: {', '.join(ALLOWED)}.")
    privacy, ranks = dict(privacy), args.world_size
    total = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
    privacy.setdefault("expected_batch_size", total)
    clipping, performance = privacy.get("clipping"), privacy.get("performance", USUAL)
    rule = unscheduled(clipping)
    if isinstance(performance, Performance) and performance.microbatch_size is None:
        if not isinstance(rule, MicroBatches):
            privacy["performance"] = replace(performance, microbatch_size=args.per_device_train_batch_size)
    if (steps := privacy.get("num_steps")) is not None and args.max_steps > 0 and steps != args.max_steps:
        raise ValueError(f"{WHERE}: num_steps={steps!r} and max_steps={args.max_steps}: leave one of the two out.")
    folder = privacy.get("run_folder")
    if folder is not None and Path(folder).resolve().is_relative_to(Path(str(args.output_dir)).resolve()):
        raise Refused(
            f"{WHERE}: run_folder={str(folder)!r} lies in output_dir={str(args.output_dir)!r}, which is copied, shared "
            "and uploaded to the Hub, and the run folder holds the keys of the noise. Choose a folder outside of it."
        )
    return privacy


def checked_examples(examples: Examples) -> Examples:
    """Returns the examples; refuses what is set by the Trainer."""
    for name in ("collate_fn", "num_workers"):
        if getattr(examples, name):
            raise ValueError(f"{WHERE}: leave {name}= out of Examples: it is set by {SET_BY_TRAINER[name]}.")
    return examples


def sampled(privacy: dict[str, Any], args: TrainingArguments, num_units: int) -> dict[str, Any]:
    """Returns the keywords with the sampling and the mean batch size that `PrivateTraining` has for these epochs."""
    if privacy.get("num_steps") or args.max_steps > 0 or privacy.get("correlation") is not None:
        return privacy
    size, others = privacy["expected_batch_size"], [privacy.get(name) for name in ("clipping", "noise_schedule")]
    sampling, size = sampling_of(privacy.get("sampling"), args.num_train_epochs, size, num_units, *others)
    return privacy | {"sampling": sampling, "expected_batch_size": size}


def steps_of(privacy: Mapping[str, Any], args: TrainingArguments, num_units: int) -> tuple[int, int]:
    """Returns the number of steps in all, and of an epoch: ``epochs * n / expected_batch_size``, rounded up.

    With owners, n and the expected batch size count these.
    """
    batch_size = privacy["expected_batch_size"]
    of_epoch = number_of_steps(None, 1, num_units, batch_size)
    given = privacy.get("num_steps") or (args.max_steps if args.max_steps > 0 else None)
    return number_of_steps(given, None if given else args.num_train_epochs, num_units, batch_size), of_epoch


def checked_arguments(args: TrainingArguments) -> TrainingArguments:
    """Returns a copy of the arguments without gradient clipping by the Trainer.

    Raises:
        Refused: naming each argument that would make the loss of an example depend on others, or change releases.
    """
    wrong = [
        f"{name}={getattr(args, name, None)!r}: {cure}" for name, (is_wrong, cure) in REFUSED.items() if is_wrong(args)
    ]
    if wrong:
        raise Refused(f"{WHERE}: these arguments cannot be kept. " + " ".join(wrong))
    args = copy.copy(args)
    if norm := args.max_grad_norm:
        LOG.info("%s: max_grad_norm=%s, the default, is set to 0: it would rescale the noise.", WHERE, norm)
        args.max_grad_norm = 0.0
    return args


def check_parts(
    trainer: type, base: type, data_collator: Any, train_dataset: Any, compute_loss_func: Any, model: Any
) -> None:
    """Refuses data that cannot be sampled, collators that pack, and losses that would be left out."""
    if compute_loss_func is not None:
        raise Refused(f"{WHERE}: compute_loss_func combines the examples of a batch and would not be used: {UNLESS}.")
    drawing = "get_train_dataloader", "_get_train_sampler", "get_batch_samples", "_get_num_items_in_batch"
    for name in ("compute_loss", *drawing):
        if getattr(trainer, name) is not getattr(base, name):
            of_loss = name == "compute_loss" and trainer.losses is not base.losses
            if not of_loss:
                cure = f"override losses as well: {UNLESS}" if name == "compute_loss" else "batches are Poisson samples"
                raise Refused(f"{WHERE}: {trainer.__name__}.{name} would not be used in training: {cure}.")
    if isinstance(data_collator, DataCollatorWithFlattening) or getattr(data_collator, "padding_free", False):
        raise Refused(
            f"{WHERE}: {type(data_collator).__name__} joins all examples of a batch in one row, so that no row belongs "
            "to one example. Use a collator that pads, such as DataCollatorWithPadding."
        )
    if isinstance(train_dataset, IterableDataset) or type(train_dataset).__name__ == "IterableDataset":
        raise Refused(
            f"{WHERE}: train_dataset is iterable, and Poisson sampling takes examples by their number. Make it "
            "map-style: datasets.Dataset.from_generator(...), load_dataset(..., streaming=False), or a list."
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise Refused(
            f"{WHERE}: the model was sharded when it was loaded (distributed_config). Load it whole, and let "
            "Accelerate wrap it: TrainingArguments(fsdp=...) with FSDP version 2, or DDP by torchrun."
        )


def _is_packed(args: Any) -> bool:
    return bool(getattr(args, "packing", False) or getattr(args, "padding_free", False))


def _has_other_parallelism(args: Any) -> bool:
    config = args.parallelism_config
    return config is not None and any(getattr(config, name, 1) > 1 for name in ("cp_size", "sp_size", "tp_size"))


def _is_fsdp_1(args: Any) -> bool:
    version = (args.fsdp_plugin_args or {}).get("fsdp_version") if getattr(args, "fsdp_plugin_args", None) else None
    return bool(args.fsdp) and str(version or (args.fsdp_config or {}).get("fsdp_version", 2)) == "1"


def _clips(args: Any) -> bool:
    default = next(f.default for f in fields(TrainingArguments) if f.name == "max_grad_norm")
    return (args.max_grad_norm or 0) > 0 and args.max_grad_norm != default


LAYERWISE = ("lomo", "adalomo", "layerwise")
REFUSED: dict[str, tuple[Any, str]] = {  # argument -> when it is refused, and what to do instead
    "max_grad_norm": (
        _clips,
        "it would rescale every update by the norm of its noise. Leave it out; the norm of each example's gradient is "
        "bounded by privacy=dict(clipping=tp.Flat(clip_norm=...)).",
    ),
    "label_smoothing_factor": (
        lambda args: args.label_smoothing_factor != 0,
        "its mean is taken over the tokens of all examples. Override losses(model, inputs) with "
        "F.cross_entropy(..., label_smoothing=..., reduction='none').",
    ),
    "fp16": (
        lambda args: args.fp16,
        "its gradient scaler skips steps, by the largest gradient of the data. Use bf16=True.",
    ),
    "deepspeed": (
        lambda args: bool(args.deepspeed),
        "its engine computes and applies gradients itself. Use DDP by torchrun, or fsdp with version 2.",
    ),
    "fsdp": (_is_fsdp_1, "version 1 flattens parameters. Set fsdp_config=dict(fsdp_version=2)."),
    "n_gpu": (
        lambda args: args.n_gpu > 1,
        "DataParallel splits batches in one process. Start one process for each GPU: torchrun --nproc-per-node ..., or "
        "set CUDA_VISIBLE_DEVICES to one.",
    ),
    "parallelism_config": (
        _has_other_parallelism,
        "context, sequence and tensor parallelism divide examples. Use data parallelism (DDP, or fsdp version 2).",
    ),
    "auto_find_batch_size": (
        lambda args: args.auto_find_batch_size,
        "it begins the training again after an error, and would release steps twice. Lower "
        "per_device_train_batch_size, which bounds the examples in memory and changes no release.",
    ),
    "train_sampling_strategy": (
        lambda args: args.train_sampling_strategy != "random",
        "batches are Poisson samples: epsilon is computed for these. Leave it out (group_by_length, too).",
    ),
    "torch_compile": (
        lambda args: args.torch_compile,
        "a private step runs uncompiled, because per-example gradients come from its single ops. Leave it out.",
    ),
    "use_liger_kernel": (
        lambda args: args.use_liger_kernel,
        "its fused loss is a mean over all tokens of the batch. Leave it out.",
    ),
    "optim": (
        lambda args: any(word in str(getattr(args.optim, "value", args.optim)) for word in LAYERWISE),
        "it updates weights during the backward, before noise is added. Use adamw_torch, adafactor, sgd, ...",
    ),
    "neftune_noise_alpha": (
        lambda args: args.neftune_noise_alpha is not None,
        "its noise is scaled by the padded length, so that the longest text changes the noise of all others. Leave it "
        "out; or add noise in the model, scaled for each text by alpha / sqrt(its own tokens * width).",
    ),
    "packing": (
        _is_packed,
        "a packed row holds several examples, so that a person would be protected as a part of a row. Leave it out.",
    ),
}
