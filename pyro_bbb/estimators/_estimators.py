# SPDX-License-Identifier: Apache-2.0
r"""Estimators of the ELBO's gradient, as effect handlers around any Pyro inference.

A linear layer or convolution whose weight is $W \sim N(M, S^2)$ elementwise can be perturbed for
each example by itself, instead of once for the whole minibatch:

- `flipout` (Wen et al. 2018): $xM^\top + \big((x \circ s)(W - M)^\top\big) \circ r$, with random
  signs $s, r$ of each example's own;
- `local_reparameterization` (Kingma et al. 2015): the output is drawn from its own Normal,
  $xM^\top + \sqrt{x^2 (S^2)^\top} \circ \epsilon$.

Every example still meets a weight drawn from the posterior, so the expected log-likelihood is the
same, and the KL comes from the drawn weights, whatever the prior. Noise that examples do not share
averages out over a minibatch. `sticking_the_landing` (Roeder et al. 2017) leaves the draws as they
are and drops the part of the gradient of $\ln q$ whose expectation is zero.

The first dimension of an operation's input is the examples'. Where an example meets a weight at
several positions (convolutions, sequences), independent outputs would not be those of one weight:
there local reparameterisation perturbs by flipout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb.estimators._linear_std import linear_std
from pyro_bbb.estimators._sampled_weights import ONE_DRAW, DetachScores, Draws, Posterior, address

Operation: TypeAlias = Callable[..., Tensor]
Perturbation: TypeAlias = "Callable[[_Use], Tensor]"
_WEIGHTED: tuple[Any, ...] = (  # operations on (input, weight, bias, ...)
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
_PRODUCTS: tuple[Any, ...] = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_SHARED: tuple[Any, ...] = (  # operations that can only take one weight for all examples
    F.embedding,
    F.bilinear,
    F.multi_head_attention_forward,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
)


def flipout() -> AbstractContextManager[None]:
    """Linear layers and convolutions perturb each example by random signs of its own."""
    return _per_example(_flipout)


def local_reparameterization() -> AbstractContextManager[None]:
    """Linear layers draw their outputs instead of their weights; convolutions use flipout."""
    return _per_example(_local)


@contextmanager
def sticking_the_landing() -> Iterator[None]:
    r"""The score $\nabla_\theta \ln q_\theta(w)$ at fixed w, of zero mean, leaves the gradient."""
    with GLOBAL_LOCK, DetachScores():
        yield


ESTIMATORS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "reparam": nullcontext,
    "local_reparam": local_reparameterization,
    "flipout": flipout,
    "stl": sticking_the_landing,
}


@dataclass(frozen=True)
class _Use:
    """One operation on a drawn weight."""

    draws: Draws
    posterior: Posterior
    operation: Operation  # of input, weight and, if there is one, bias
    x: Tensor  # with a first dimension of examples
    weight: Tensor
    bias: Tensor | None
    channel: int  # dimension of the channels: -1 of linear layers, 1 of convolutions


class _Perturb(TorchFunctionMode):
    """Redirects operations on drawn weights to a perturbation."""

    def __init__(self, draws: Draws, perturb: Perturbation) -> None:
        super().__init__()
        self.draws, self.perturb = draws, perturb

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WEIGHTED:
            return self._weighted(func, *args, **kwargs)
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(func, *args)
        if func in _SHARED and any(self.draws.find(x) for x in tree_leaves((args, kwargs))):
            self.draws.warn(func, f"{func.__name__} cannot perturb each example, {ONE_DRAW}")
        return func(*args, **kwargs)

    def as_now(self) -> AbstractContextManager[None]:
        """A context in which noise that was drawn later than now is drawn again."""
        return self.draws.as_now()

    def _weighted(
        self,
        func: Operation,
        input: Tensor,
        weight: Tensor,
        bias: Any = None,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        posterior = self.draws.find(weight)
        if posterior is None and self.draws.posteriors and address(weight) is None:
            raise RuntimeError("weights cannot be batched by vmap where each example is perturbed")
        if posterior is None:
            return func(input, weight, bias, *args, **options)

        def operation(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return func(x, w, b, *args, **options)

        channel = -1 if func is F.linear else 1
        unbatched = input.dim() == (1 if func is F.linear else weight.dim() - 1)
        x = input.unsqueeze(0) if unbatched else input
        if not unbatched:
            self.draws.rows.add(x.shape[0])
        outputs = self.perturb(_Use(self.draws, posterior, operation, x, weight, bias, channel))
        return outputs.squeeze(0) if unbatched else outputs

    def _product(self, func: Operation, left: Tensor, right: Tensor) -> Tensor:
        if right.dim() == 2 and self.draws.find(right):
            return self._weighted(F.linear, left, right.t())
        if self.draws.find(left):
            what = "a product with the weight on the left cannot perturb each example"
            self.draws.warn(func, f"{what}, {ONE_DRAW}")
        return func(left, right)


def _flipout(use: _Use) -> Tensor:
    """The mean's outputs, plus those of W - M between random signs."""
    loc, _ = use.posterior.seen_as(use.weight)
    outputs = use.operation(use.x, loc, use.bias)
    sign_in = use.posterior.sign("in", use.weight, use.x, use.channel)
    sign_out = use.posterior.sign("out", use.weight, outputs, use.channel)
    return outputs + use.operation(use.x * sign_in, use.weight - loc) * sign_out


def _local(use: _Use) -> Tensor:
    """Outputs drawn from their Normal, where an example meets the weight once; else flipout."""
    if use.channel == 1 or use.x.dim() > 2:
        return _flipout(use)
    offset, posterior = use.weight.storage_offset(), use.posterior
    if offset in posterior.used:
        what = "a weight is used twice with independent noise, flipout would keep it"
        use.draws.warn("twice", what)
    posterior.used.add(offset)
    mean, std = _output_moments(use)
    return torch.addcmul(mean, std, torch.randn_like(std))


def _output_moments(use: _Use) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each output, over the weight and, if random, the bias."""
    loc, scale = use.posterior.seen_as(use.weight)
    of_bias = use.draws.find(use.bias)
    if use.bias is None or of_bias is None:
        return use.operation(use.x, loc, use.bias), linear_std(use.x, scale, None)
    bias_loc, bias_scale = of_bias.seen_as(use.bias)
    return use.operation(use.x, loc, bias_loc), linear_std(use.x, scale, bias_scale)


@contextmanager
def _per_example(perturb: Perturbation) -> Iterator[None]:
    draws = Draws()
    with GLOBAL_LOCK, draws, _Perturb(draws, perturb):
        yield
