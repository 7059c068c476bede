# SPDX-License-Identifier: Apache-2.0
"""Computes one loss per example for the models of transformers, from their logits and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..support.notes import NOTES
from ..support.validate import Refused

WHERE = "huggingface.per_example_loss"
IGNORED = -100  # label of a token that has no loss
Terms = list[tuple[Tensor, Tensor]]  # for each term of the loss: (n,) sums over an example's tokens, (n,) their numbers


def per_example_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Returns each example's own loss, where ``model(**batch).loss`` is the mean over the whole batch.

    ``loss_i = Σₜ m_it l_it / Σₜ m_it`` over the tokens t of example i, with m_it = 0 for the label -100 and 1
    otherwise: each example counts alike, however long. An example without a label has the loss 0. For a batch of one
    example with a label this is the model's own ``.loss``.

    Args:
        model: causal, masked or sequence-to-sequence language model; classifier of sequences, tokens, images, audio or
            video (one label, several labels or numbers, by ``config.problem_type``); multiple choice, next sentence, or
            extractive question answering. It may be wrapped by PEFT, Accelerate or DDP.
        batch: keyword arguments of the model, among them ``labels``, or ``start_positions`` and ``end_positions``.

    Returns:
        (n,) losses with a gradient, in float32 for a model in half precision.

    Guarantees:
        - The first batch with labels also goes through the model's own loss: the mean over all tokens of the batch must
          be the same, up to rounding, or the batch is refused. So a head with another loss is noticed.
        - No loss is divided by a number that depends on other examples.

    Raises:
        Refused: the model's head is not one of these, or it computes another loss; labels are missing.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1, eos_token_id=0)
        >>> model, tokens = GPT2LMHeadModel(config), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
        >>> per_example_loss(model, {"input_ids": tokens, "labels": tokens}).shape
        torch.Size([2])
    """
    bare = _bare(model)
    names, terms_of = _head_of(bare)
    inputs, labels = dict(batch), {}
    missing = [name for name in names if inputs.get(name) is None]
    if missing:
        raise Refused(
            f"{WHERE}: the batch for {type(bare).__name__} has no {' and no '.join(missing)}, but "
            f"{', '.join(inputs)}. Let the data collator add them, or keep their column (remove_unused_columns=False)."
        )
    if "shift_labels" in inputs or "num_items_in_batch" in inputs:
        raise Refused(
            f"{WHERE}: shift_labels or num_items_in_batch in the batch: rows that are packed, or divided by the number "
            "of tokens of all examples, belong to no single example. Use a collator that pads, one example in each row."
        )
    comparison = NOTES.of(bare, _Comparison)
    makes_inputs = _is_encoder_decoder(bare) and inputs.get("decoder_input_ids") is None and "labels" in names
    for name in names:
        labels[name] = inputs[name]
        if comparison.is_made and not makes_inputs:
            inputs.pop(name)
    outputs = model(**inputs)
    terms = terms_of(outputs, labels, bare)
    if not comparison.is_made:
        comparison.is_made = _is_own_loss(bare, terms, outputs)
    means = [sums / counts.clamp(min=1) for sums, counts in terms]
    return means[0] if len(means) == 1 else torch.stack(means).mean(0)


class _Comparison:
    """Notes whether a model's own loss was compared with its per-example losses."""

    def __init__(self, model: nn.Module):
        self.is_made = False


def _is_own_loss(bare: nn.Module, terms: Terms, outputs: Any) -> bool:
    """True if the mean over all tokens of the batch is the model's own ``.loss``; False if there is nothing to compare.

    Refuses a model with another loss.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(own, Tensor) or own.numel() != 1:
        raise Refused(
            f"{WHERE}: {type(bare).__name__} returned no loss for a batch with labels, so that its per-example losses "
            "cannot be compared with it. Leave return_dict=False out, or write the losses yourself: override "
            "PrivateTrainer.losses(model, inputs), which returns (n,)."
        )
    if not all(bool((counts.sum() > 0).item()) for _, counts in terms):
        return False  # no label in the batch: compared with the next one
    ours = torch.stack([(sums.detach().sum() / counts.sum()) for sums, counts in terms]).mean()
    own = own.detach().to(ours)
    exact = all(p.dtype in (torch.float32, torch.float64) for p in bare.parameters()) and not _autocasts(ours)
    if not (ours.isfinite() and own.isfinite()):
        return False
    if not torch.isclose(ours, own.reshape(()), rtol=1e-4 if exact else 3e-2, atol=1e-4 if exact else 3e-2):
        raise Refused(
            f"{WHERE}: {type(bare).__name__} has another loss than its name says: on this batch the mean of the "
            f"per-example losses is {ours.item() / (own.item() or math.nan):.3g} times its own .loss. A part of its "
            "loss, such as one that balances experts, may combine examples (switch it off in the config); otherwise "
            "write the losses yourself: override PrivateTrainer.losses(model, inputs), which returns (n,)."
        )
    return True


def _autocasts(like: Tensor) -> bool:
    # Accelerate's mixed precision is a context within the model's forward, and unknown out here.
    from accelerate.state import AcceleratorState

    shared = AcceleratorState._shared_state  # empty without an Accelerator
    return torch.is_autocast_enabled(like.device.type) or shared.get("_mixed_precision", "no") != "no"


def _bare(model: Any) -> Any:
    """Returns the model of transformers inside of the wrappers of DDP, torch.compile and PEFT."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and type(model) in (nn.parallel.DistributedDataParallel, nn.DataParallel):
            inner = model.module
        if inner is None and hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


# Terms of each kind of head


def _tokens(logits: Tensor, labels: Tensor, model: nn.Module) -> Terms:
    """Returns the cross-entropies of tokens: logits (n, t, classes), labels (n, t)."""
    if logits.shape[:-1] != labels.shape:
        raise Refused(
            f"{WHERE}: {type(model).__name__} returned logits of shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(labels.shape)}: must be one label for each position. Write the losses yourself: override "
            "PrivateTrainer.losses(model, inputs), which returns (n,)."
        )
    labels = labels.to(logits.device)
    flat = _precise(logits).reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="none")
    return [(losses.view(len(labels), -1).sum(1), (labels != IGNORED).view(len(labels), -1).sum(1))]


def _language(outputs: Any, labels: dict[str, Tensor], model: nn.Module) -> Terms:
    """Returns terms of a decoder, where position t predicts label t + 1; in an encoder-decoder it predicts label t."""
    logits, targets = outputs["logits"], labels["labels"]
    if _is_encoder_decoder(model):
        return _tokens(logits, targets, model)
    if (added := logits.shape[1] - targets.shape[1]) > 0:  # virtual tokens of a learned prompt come first
        targets = F.pad(targets, (added, 0), value=IGNORED)
    return _tokens(logits, F.pad(targets, (0, 1), value=IGNORED)[:, 1:], model)


def _masked(outputs: Any, labels: dict[str, Tensor], model: nn.Module) -> Terms:
    return _tokens(outputs["logits"], labels["labels"], model)


def _classes(outputs: Any, labels: dict[str, Tensor], model: Any) -> Terms:
    """Returns terms of a classifier of whole examples; as the model does, guesses the kind of problem by the labels."""
    logits, targets, config = _precise(outputs["logits"]), labels["labels"], model.config
    targets, n = targets.to(logits.device), len(logits)
    kind = getattr(config, "problem_type", None)
    if kind is None:
        is_whole = targets.dtype in (torch.long, torch.int)
        several = "single_label_classification" if is_whole else "multi_label_classification"
        kind = "regression" if config.num_labels == 1 else several
    if kind == "single_label_classification":
        return _tokens(logits.view(n, 1, -1), targets.reshape(n, 1), model)
    elementwise = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}
    if kind not in elementwise:
        raise Refused(f"{WHERE}: config.problem_type={kind!r}. Allowed: single_label_classification, {elementwise}.")
    losses = elementwise[kind](logits.view(n, -1), targets.view(n, -1).to(logits.dtype), reduction="none")
    return [(losses.sum(1), torch.full((n,), losses.shape[1], device=losses.device))]


def _choices(outputs: Any, labels: dict[str, Tensor], model: nn.Module) -> Terms:
    """Returns terms of a choice among columns of the logits (n, choices)."""
    logits, (targets,) = outputs["logits"], labels.values()
    return _tokens(logits.unsqueeze(1), targets.reshape(-1, 1), model)


def _spans(outputs: Any, labels: dict[str, Tensor], model: nn.Module) -> Terms:
    """Returns two terms, of the first and of the last token of the answer; positions beyond the text are ignored."""
    terms = []
    for end in ("start", "end"):
        logits = outputs[f"{end}_logits"]
        positions = labels[f"{end}_positions"].reshape(-1, 1).clamp(0, logits.shape[1])
        positions = positions.masked_fill(positions == logits.shape[1], IGNORED)
        terms += _tokens(logits.unsqueeze(1), positions, model)
    return terms


def _precise(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


Head = tuple[tuple[str, ...], Callable[[Any, dict[str, Tensor], nn.Module], Terms]]
LABELS = ("labels",)
HEADS: dict[str, Head] = {  # names of transformers' tables of classes; the first that has a class counts
    "SEQ_TO_SEQ_CAUSAL_LM": (LABELS, _language),
    "SPEECH_SEQ_2_SEQ": (LABELS, _language),
    "CAUSAL_LM": (LABELS, _language),
    "IMAGE_TEXT_TO_TEXT": (LABELS, _language),
    "MASKED_LM": (LABELS, _masked),
    "TOKEN_CLASSIFICATION": (LABELS, _masked),
    "SEQUENCE_CLASSIFICATION": (LABELS, _classes),
    "IMAGE_CLASSIFICATION": (LABELS, _classes),
    "AUDIO_CLASSIFICATION": (LABELS, _classes),
    "VIDEO_CLASSIFICATION": (LABELS, _classes),
    "QUESTION_ANSWERING": (("start_positions", "end_positions"), _spans),
    "MULTIPLE_CHOICE": (LABELS, _choices),
    "NEXT_SENTENCE_PREDICTION": (LABELS, _choices),
}
NOT_SHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel")  # language models


@cache
def _heads() -> dict[str, Head]:
    """Returns the head of each class of transformers, by the name of the class."""
    from transformers.models.auto import modeling_auto

    heads: dict[str, Head] = {name: HEADS["MASKED_LM"] for name in NOT_SHIFTED}
    heads["VisionEncoderDecoderModel"] = HEADS["SEQ_TO_SEQ_CAUSAL_LM"]
    for task, head in HEADS.items():
        for classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            for name in (classes,) if isinstance(classes, str) else classes:
                heads.setdefault(name, head)
    return heads


def _head_of(model: nn.Module) -> Head:
    """Returns the head of the model's class, or of the first of its base classes that is known."""
    known = _heads()
    for kind in type(model).__mro__:
        if kind.__name__ in known:
            return known[kind.__name__]
    raise Refused(
        f"{WHERE}: {type(model).__name__} has no head with known per-example losses. Known are the classes "
        "AutoModelFor... of: " + ", ".join(task.lower().replace("_", " ") for task in HEADS) + ". Otherwise write the "
        "losses yourself: compute (n,) from model(**batch) with reduction='none'; in a PrivateTrainer, override "
        "losses(model, inputs)."
    )
