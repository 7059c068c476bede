# SPDX-License-Identifier: Apache-2.0
"""Checks that the ranks of a training are alike: settings, optimizers, weights and data."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..model_check.rehearsal.turn import Turn
from ..sampling.batches import Batches, BatchRequest
from ..sampling.datasets import tensors_and_rows
from ..sampling.fingerprint import KEY_BYTES, fingerprint
from ..support.ranks import Ranks, RefusedTogether, num_processes
from ..support.validate import PLACE_IN_MEMORY, Refused
from ..support.version import __version__
from .placement import Placement, Ranked, local_of

WHERE = "PrivateTraining"
PROBED = 16  # examples that are compared between ranks; of tensors all, as far as a fingerprint reads them
MANY_PROBED = 64  # the same if only a part of them may be equal, so that labels hardly are by chance
OTHER_DATA = (
    f"{WHERE}: the ranks hold different data: the same indices give other examples. Every rank must have the whole "
    "data set in the same order: the training cuts each batch itself, and a rank fetches its own part."
)


def check_still(ranks: Ranks) -> None:
    """Refuses a process group that was made, or ended, after the training was."""
    if num_processes() != ranks.size:
        raise Refused(
            f"{WHERE}: torch.distributed runs with {num_processes()} processes, and the training was made for "
            f"{ranks.size}. Call init_process_group first, then make the training."
        )


def check_ranks(
    ranks: Ranks, placement: Ranked, optimizer: Optimizer, batches: Batches, settings: Mapping[str, Any]
) -> None:
    """Refuses ranks that differ in what must be equal; every rank calls it.

    Raises:
        RefusedTogether: names what differs, and the cure.
    """
    values = {
        **settings,
        "placement": placement.in_words,
        "optimizer": (type(optimizer).__name__, settings_of_groups(optimizer)),
        "torch": str(torch.__version__),
        "torch_privacy": __version__,
    }
    ranks.check_same(WHERE, values, "All ranks must run the same program with the same settings.")
    _check_replicas(ranks, placement)
    _check_items(ranks, batches)


def settings_of_groups(optimizer: Optimizer) -> list[dict[str, str]]:
    """Returns the settings of an optimizer's groups as texts; of functions and the like no place in this process."""
    return [
        {key: PLACE_IN_MEMORY.sub("", repr(value)) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def check_equal_tensors(ranks: Ranks, step: int, tag: bytes) -> None:
    """Refuses ranks that have computed other public tensors for a step, such as GEP's directions."""
    if len(set(ranks.exchange(f"begins step {step} with public tensors", payload=tag))) > 1:
        raise RefusedTogether(
            f"{WHERE}: the ranks computed different directions from the auxiliary data in step {step}. Give all ranks "
            "the same auxiliary data in the same order, equal hardware and the same number of threads "
            "(torch.set_num_threads)."
        )


def names_tag(trained: Iterable[str]) -> bytes:
    """Returns 4 bytes that depend on the names of the trained parameters."""
    return crc32("\n".join(trained).encode()).to_bytes(4, "big")


def check_same_names(ranks: Ranks, trained: Iterable[str], messages: Sequence[bytes]) -> None:
    """Refuses ranks that train different parameters, as their `names_tag` shows: their sums do not fit together."""
    if len(set(messages)) == 1:
        return
    everywhere = [set(names) for names in ranks.gather([*trained])]
    differing = sorted(set.union(*everywhere) - set.intersection(*everywhere))
    raise RefusedTogether(
        f"{WHERE}: only some ranks train {differing[0]!r} ({len(differing)} such parameters). Freeze and unfreeze the "
        "same parameters on all ranks, before the same step."
    )


def check_same_updates(step: int, messages: Sequence[bytes]) -> None:
    """Refuses ranks with optimizers that have other settings, as their tags show; shards would be updated unequally."""
    if len(set(messages)) > 1:
        rank = next(rank for rank, tag in enumerate(messages) if tag != messages[0])
        raise RefusedTogether(
            f"{WHERE}: before step {step} the optimizer of rank {rank} has other settings than that of rank 0, such as "
            "another learning rate. Change them on all ranks alike, by a schedule that depends on the step alone."
        )


def check_equal_weights(step: int, messages: Sequence[bytes]) -> None:
    """Refuses ranks that sent the same number and other weights."""
    rank = _rank_that_differs(messages)
    if rank is not None:
        raise RefusedTogether(
            f"{WHERE}: after {step} steps rank {rank} has other weights than a rank with the same shard. The "
            "releases are equal on all ranks, so that the updates must differ: give all optimizers the same "
            "settings and the same schedule, and all ranks equal hardware. Begin again from the last checkpoint."
        )


def _rank_that_differs(messages: Sequence[bytes]) -> int | None:
    """Returns the first rank with another message than an earlier one with its number, the first 2 bytes."""
    found: dict[bytes, bytes] = {}
    pairs = ((rank, message[:2], message[2:]) for rank, message in enumerate(messages))
    return next((rank for rank, number, rest in pairs if found.setdefault(number, rest) != rest), None)


def kind_of_turn(turn: Turn, placement: Placement) -> bytes:
    """Returns 6 bytes: the number of this rank's part of the batch, and what kind of run of it comes next."""
    kind = turn.count, turn.is_batch, turn.is_idle, turn.rows, turn.draws, turn.trace is not None
    return placement.part.to_bytes(2, "big") + zlib.crc32(repr(kind).encode()).to_bytes(4, "big")


def check_equal_turns(step: int, messages: Sequence[bytes]) -> None:
    """Refuses ranks with the same part of a batch that run it differently: they would wait for each other for ever."""
    rank = _rank_that_differs(messages)
    if rank is not None:
        raise RefusedTogether(
            f"{WHERE}: in step {step} rank {rank} rehearses its batch differently from another rank with the same "
            "batch. Run the same code on the same data on all tensor-parallel ranks: no branch may depend on the rank, "
            "and the data set must return the same examples everywhere."
        )


def _check_replicas(ranks: Ranks, placement: Ranked) -> None:
    """Refuses weights and buffers that must be equal and are not."""
    own = [(label, _digest([local_of(tensor)])) for label, tensor in placement.replicas()]
    found: dict[str, bytes] = {}
    for rank, others in enumerate(ranks.gather(own)):
        for label, digest in others:
            if found.setdefault(label, digest) != digest:
                raise RefusedTogether(
                    f"{WHERE}: the ranks begin with different weights: {label!r} of rank {rank} is another one than "
                    "before. Make the model from one seed (torch.manual_seed) or load one checkpoint on all ranks."
                )


def _check_items(ranks: Ranks, batches: Batches) -> None:
    """Refuses data that differ between the ranks, or their order: an example on two ranks would be in a sum twice.

    Where items have no fingerprint, as with random numbers that the training does not know, one of their entries must
    be equal everywhere, such as the label.
    """
    size = len(batches.dataset)  # type: ignore[arg-type]
    count = None if tensors_and_rows(batches.dataset) else min(PROBED, size)
    found = ranks.gather(fingerprint(batches.dataset, bytes(KEY_BYTES), count)["fingerprint"])
    if None not in found:
        if len(set(found)) > 1:
            raise RefusedTogether(OTHER_DATA)
        return
    generator = np.random.default_rng(0)
    seed = bytes(32)
    with ranks.together("fetches examples to compare"):
        request = BatchRequest(generator.integers(size, size=min(MANY_PROBED, size)), 1, seed)
        leaves = tree_leaves(batches.fetch(request).batch)
        digests = [_digest([leaf]) for leaf in leaves]
    everywhere = ranks.gather(digests)
    same = [len(set(of_leaf)) == 1 for of_leaf in zip(*everywhere, strict=False)]
    if same and not any(same):
        raise RefusedTogether(OTHER_DATA)


def _digest(values: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            flat = value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else value.new_zeros(0)
            digest.update(repr((value.dtype, tuple(value.shape))).encode() + flat.cpu().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.digest()
