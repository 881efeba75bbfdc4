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

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from pyro.distributions import Delta, TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bbb.distributions import map_tensors

Operation: TypeAlias = Callable[..., Tensor]
Perturbation: TypeAlias = Callable[..., Tensor]

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
_ONE_DRAW = "one draw serves the whole minibatch there"
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
    with _Detached():
        yield


ESTIMATORS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "reparam": nullcontext,
    "local_reparam": local_reparameterization,
    "flipout": flipout,
    "stl": sticking_the_landing,
}


@dataclass
class _Posterior:
    """An elementwise Normal and the draw of it that is in use."""

    value: Tensor
    loc: Tensor
    scale: Tensor
    used: set[Any] = field(default_factory=set)  # where its parts lie that were used already
    signs: dict[Any, Tensor] = field(default_factory=dict)

    def seen_as(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of a weight that is the draw, or a view of a part of it."""
        value = self.value
        if weight.shape == value.shape and weight.stride() == value.stride():
            return self.loc.expand_as(value), self.scale.expand_as(value)
        offset = weight.storage_offset() - value.storage_offset()
        layout = weight.shape, weight.stride(), offset
        loc, scale = (_laid_out(x, value) for x in (self.loc, self.scale))
        return loc.as_strided(*layout), scale.as_strided(*layout)

    def sign(self, role: str, weight: Tensor, like: Tensor, channel: int) -> Tensor:
        """Random signs per example and channel, the same at every use of this weight's draw.

        What a matrix takes in, its transpose puts out.
        """
        turned = channel == -1 and weight.dim() == 2 and weight.stride(0) < weight.stride(1)
        if turned:
            role = {"in": "out", "out": "in"}[role]
        shape = [1] * like.dim()
        shape[0], shape[channel] = like.shape[0], like.shape[channel]
        key = (role, weight.storage_offset(), *shape)
        if key not in self.signs:
            self.signs[key] = like.new_empty(shape).bernoulli_().mul_(2).sub_(1)
        return self.signs[key]


class _Drawn(Messenger):
    """Base of handlers that act on sites drawn inside, not on those given a value."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh: str | None = None
        self._fn: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        drawn = msg["value"] is None and not msg["is_observed"]
        self._fresh = msg["name"] if drawn else None
        self._fn = msg["fn"]  # as drawn from; other handlers may replace it later

    def _pyro_post_sample(self, msg: Any) -> None:
        if self._fresh == msg["name"] and not isinstance(_base(self._fn), Delta):
            self._drawn(msg)

    def _drawn(self, msg: Any) -> None:
        raise NotImplementedError


class _Draws(_Drawn):
    """Remembers the elementwise Normals that weights are drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.posteriors: dict[str, _Posterior] = {}
        self.warned: set[Any] = set()
        self.rows: set[int] = set()  # first dimensions that met a weight since the last observation

    def find(self, weight: Any) -> _Posterior | None:
        """The posterior of a tensor, if it is a remembered draw or a view of one."""
        address = _address(weight)
        if address is None:
            return None
        posteriors = self.posteriors.values()
        return next((p for p in posteriors if _address(p.value) == address), None)

    def warn(self, key: Any, what: str) -> None:
        """Says, once per context, where a draw is shared after all."""
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(what, stacklevel=3)

    def _pyro_post_sample(self, msg: Any) -> None:
        super()._pyro_post_sample(msg)
        if msg["is_observed"] and msg["fn"].batch_shape:
            if self.rows - {msg["fn"].batch_shape[-1]}:
                self.warn(
                    "rows",
                    "an operation's first dimension is not that of the observations, "
                    "so its noise is not that of one weight per example",
                )
            self.rows.clear()

    def _drawn(self, msg: Any) -> None:
        base, value = _base(self._fn), msg["value"]
        if isinstance(base, Normal):
            self.rows.clear()  # another pass begins
            self.posteriors[msg["name"]] = _Posterior(value, base.loc, base.scale)
        elif value.numel() > 1 and value.requires_grad:
            self.warn(
                msg["name"], f"guide site {msg['name']!r} is no elementwise Normal, {_ONE_DRAW}"
            )


class _Detached(_Drawn):
    """Scores draws under their distribution with its parameters held fixed."""

    def _drawn(self, msg: Any) -> None:
        if isinstance(msg["fn"], Distribution) and msg["fn"].has_rsample:
            msg["fn"] = _Held(map_tensors(msg["fn"], Tensor.detach))


class _Held(TorchDistribution):
    """A distribution by its log-density alone: a KL in closed form would have no gradient."""

    has_rsample = True

    def __init__(self, held: Any) -> None:
        self.held = held
        super().__init__(held.batch_shape, held.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.held.support

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob: Tensor = self.held.log_prob(value)
        return log_prob


class _Perturb(TorchFunctionMode):
    """Redirects operations on drawn weights to a perturbation."""

    def __init__(self, draws: _Draws, perturb: Perturbation) -> None:
        super().__init__()
        self.draws, self.perturb = draws, perturb

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WEIGHTED:
            return self._weighted(func, *args, **kwargs)
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(func, *args)
        if func in _SHARED and any(self.draws.find(x) for x in tree_leaves((args, kwargs))):
            self.draws.warn(func, f"{func.__name__} cannot perturb each example, {_ONE_DRAW}")
        return func(*args, **kwargs)

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
        if posterior is None and self.draws.posteriors and _address(weight) is None:
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
        outputs = self.perturb(self.draws, posterior, operation, x, weight, bias, channel)
        return outputs.squeeze(0) if unbatched else outputs

    def _product(self, func: Operation, left: Tensor, right: Tensor) -> Tensor:
        if right.dim() == 2 and self.draws.find(right):
            return self._weighted(F.linear, left, right.t())
        if self.draws.find(left):
            what = "a product with the weight on the left cannot perturb each example"
            self.draws.warn(func, f"{what}, {_ONE_DRAW}")
        return func(left, right)


def _flipout(
    draws: _Draws,
    posterior: _Posterior,
    operation: Operation,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    channel: int,
) -> Tensor:
    """The mean's outputs, plus those of W - M between random signs."""
    loc, _ = posterior.seen_as(weight)
    outputs = operation(x, loc, bias)
    sign_in = posterior.sign("in", weight, x, channel)
    sign_out = posterior.sign("out", weight, outputs, channel)
    return outputs + operation(x * sign_in, weight - loc) * sign_out


def _local(
    draws: _Draws,
    posterior: _Posterior,
    operation: Operation,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    channel: int,
) -> Tensor:
    """Outputs drawn from their Normal, where an example meets the weight once; else flipout."""
    if channel == 1 or x.dim() > 2:
        return _flipout(draws, posterior, operation, x, weight, bias, channel)
    if weight.storage_offset() in posterior.used:
        draws.warn("twice", "a weight is used twice with independent noise, flipout would keep it")
    posterior.used.add(weight.storage_offset())
    loc, scale = posterior.seen_as(weight)
    found = draws.find(bias)
    if bias is None or found is None:
        mean, variance = operation(x, loc, bias), operation(x.square(), scale.square())
    else:
        bias_loc, bias_scale = found.seen_as(bias)
        mean = operation(x, loc, bias_loc)
        variance = operation(x.square(), scale.square(), bias_scale.square())
    # the root has no derivative at 0: an input of zeros has no noise
    noisy = variance > 0
    std = variance.where(noisy, 1.0).sqrt().where(noisy, 0.0)
    return torch.addcmul(mean, std, torch.randn_like(std))


@contextmanager
def _per_example(perturb: Perturbation) -> Iterator[None]:
    draws = _Draws()
    with draws, _Perturb(draws, perturb):
        yield


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A tensor with the strides of ``like`` from the start of its own memory."""
    if x.stride() == like.stride() and x.storage_offset() == 0:
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _base(distribution: Any) -> Any:
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def _address(tensor: Any) -> int | None:
    """Where a tensor's numbers lie; views of one tensor share it."""
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor inside vmap has no storage
        return None
