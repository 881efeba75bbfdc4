"""What `fit` trains: the model and the guide where, in what precision and weight it asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._checks import as_device
from pyro_bbb._pyro import weigh
from pyro_bbb.guides import weighs_kl
from pyro_bbb.models import BayesianModel


def placed(model: BayesianModel, guide: Any, device: torch.device | str | None) -> torch.device:
    """Moves model and guide to the device, and says which it is.

    Raises:
        ValueError: the device is not there, or holds no values.
    """
    if device is not None:
        device = as_device(device)
        if device.type == "meta":
            raise ValueError("device must hold values, got 'meta'")
        for part in (model, guide):
            if isinstance(part, nn.Module):
                part.to(device)
        return device
    parameters = guide.parameters() if isinstance(guide, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def weighed(guide: Any) -> Any:
    """The guide with its log-density weighted like the prior's, where it does not do so itself."""
    if weighs_kl(guide):
        return guide

    def with_weight(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with weigh(kl_weight):
            return guide(x, y, kl_weight)

    return with_weight


def autocast(model: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The model with its network in lower precision: a guide's draws must fit their densities."""
    if dtype is None:
        return model

    def cast(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return model(*args)

    return cast
