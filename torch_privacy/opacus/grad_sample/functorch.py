# SPDX-License-Identifier: Apache-2.0
"""Has the name of Opacus' ``make_functional``, with which programs compute ``p.grad_sample`` themselves."""

from typing import Any, Never

from ...support.validate import Refused


def make_functional(model: Any, *_: Any, **__: Any) -> Never:
    """Refuses: a gradient that the loop computes itself cannot be checked, nor bounded.

    Raises:
        Refused: always, with what to do.
    """
    raise Refused(
        "make_functional: per-example gradients that the loop computes itself (grad_sample_mode='no_op') are not used: "
        "nothing shows that each belongs to one example. Leave grad_sample_mode out: "
        "every model has exact per-example gradients here. For a function of parameters write losses with "
        "torch.func.functional_call, and pass them to PrivateTraining.step."
    )
