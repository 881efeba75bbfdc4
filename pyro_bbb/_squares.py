r"""$\sum ((w - \mu) / \sigma)^2$ over many weights, in few passes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.autograd import Function

from pyro_bbb._event import total


class SumOfSquares(Function):
    """The squares of standardised values, summed over trailing dimensions.

    Arguments are the values, locations, scales and the number of these dimensions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, loc: Tensor, scale: Tensor, dims: int) -> Tensor:
        return total(((value - loc) / scale).square(), dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.dims = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, loc, scale = ctx.saved_tensors
        grad = grad.reshape(grad.shape + (1,) * ctx.dims)
        of_value = (value - loc) * (2 * grad / scale.square())
        of_loc = of_scale = None
        if ctx.needs_input_grad[1]:
            of_loc = -of_value.sum_to_size(loc.shape)
        if ctx.needs_input_grad[2]:
            of_scale = (-of_value * (value - loc) / scale).sum_to_size(scale.shape)
        return of_value.sum_to_size(value.shape), of_loc, of_scale, None


# `apply` asks for it at every call; to work it out takes as long as a small layer
SumOfSquares.forward.__signature__ = inspect.signature(SumOfSquares.forward)  # type: ignore[attr-defined]


def unexpanded(x: Tensor) -> Tensor:
    """A tensor with the dimensions that only repeat it reduced to one: less work per weight."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]
