# SPDX-License-Identifier: Apache-2.0
"""KL weight of guides: ours scale their log-density by ``kl_weight``, others are wrapped."""

from __future__ import annotations

from typing import Any

from pyro.poutine.guide import GuideMessenger
from torch import Tensor

from pyro_bbb._handlers.kl_scale import scale_kl
from pyro_bbb.guides._base import ArgumentReader, Guide


def weighs_kl(guide: Any) -> bool:
    """Tell whether a guide scales its log-density by ``kl_weight`` itself.

    Raises:
        TypeError: it is not callable.
    """
    if not callable(guide):
        raise TypeError(f"guide must be a guide or a function, got {guide!r}")
    return isinstance(guide, Guide) or (
        ArgumentReader.of(guide, "kl_weight", None).position is not None
    )


def with_kl_weight(guide: Any) -> Any:
    """Return a guide whose log-density is scaled like the prior's."""
    if weighs_kl(guide):
        return guide
    if isinstance(guide, GuideMessenger):
        raise TypeError(
            f"guide must not run the model, as {type(guide).__name__} does: train it by "
            "pyro.infer.SVI(model, guide, optimizer, Trace_ELBO()); predict takes it then"
        )

    def with_weight(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with scale_kl(kl_weight):
            return guide(x, y, kl_weight)

    return with_weight
