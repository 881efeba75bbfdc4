# SPDX-License-Identifier: Apache-2.0
"""Weights that are drawn once, and perturbed for each example where a layer uses them.

Every example still meets a weight drawn from the posterior, so the expected log-likelihood is the
same, and the KL comes from the drawn weights, whatever the prior. Noise that examples do not share
averages out over a minibatch. The first dimension of an operation's input is the examples'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Normal
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb._utils.pages import read_on
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.latents import role_of

_ONE_DRAW = "one draw serves the whole minibatch there"
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


@contextmanager
def per_example(perturb: Callable[[Use], Tensor]) -> Iterator[None]:
    """Perturb each example inside, by a function of an operation on a drawn weight."""
    draws = Draws()
    with GLOBAL_LOCK, draws, _Perturb(draws, perturb):
        yield


@dataclass(frozen=True)
class Use:
    """One operation on a drawn weight."""

    draws: Draws
    posterior: Posterior
    operation: Callable[..., Tensor]  # of input, weight and, if there is one, bias
    x: Tensor  # with a first dimension of examples
    weight: Tensor
    bias: Tensor | None
    channel: int  # dimension of the channels: -1 of linear layers, 1 of convolutions


@dataclass
class Posterior:
    """An elementwise Normal and the draw of it that is in use."""

    value: Tensor
    loc: Tensor
    scale: Tensor
    used: set[Any] = field(default_factory=set)  # where its parts lie that were used already
    signs: dict[Any, Tensor] = field(default_factory=dict)  # by flipout

    def holds(self, weight: Tensor) -> bool:
        """Return whether a tensor in the same memory is the draw or a part of it."""
        left = int(weight.storage_offset() - self.value.storage_offset())
        steps = zip(self.value.stride(), self.value.shape, strict=True)
        for step, size in sorted(steps, reverse=True):  # rows of stacked draws are not adjacent
            left -= step * min(max(0, left) // max(1, step), max(0, size - 1))
        return left == 0

    def seen_as(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and scale of a weight that is the draw, or a view of a part of it."""
        value = self.value
        if weight.shape == value.shape and weight.stride() == value.stride():
            return self.loc.expand_as(value), self.scale.expand_as(value)
        offset = weight.storage_offset() - value.storage_offset()
        loc, scale = (
            x.as_strided(weight.shape, weight.stride(), x.storage_offset() + offset)
            for x in (_laid_out(parameter, value) for parameter in (self.loc, self.scale))
        )
        return loc, scale


class Drawn(Messenger):
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
        if self._fresh == msg["name"] and not isinstance(innermost(self._fn), Delta):
            self._drawn(msg)

    def _drawn(self, msg: Any) -> None:
        raise NotImplementedError


class Draws(Drawn):
    """Keeps the elementwise Normals that weights are drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.posteriors: dict[str, Posterior] = {}
        self.warned: set[Any] = set()
        self.rows: set[int] = set()  # first dimensions that met a weight since the last observation

    def add(
        self, values: Mapping[str, Tensor], normals: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """Take in weights drawn without sample sites, with mean and scale of those that are Normal.

        Both are by site name.
        """
        self.rows.clear()
        for name, value in values.items():
            if name not in normals:
                self._warn_not_normal(name, value)
            elif value.shape == normals[name][0].shape:
                self.posteriors[name] = Posterior(value, *normals[name])

    def find(self, weight: Any) -> Posterior | None:
        """Return the posterior of a tensor, if it is a known draw or a view of one."""
        location = _address(weight)
        if location is None:
            return None
        here = (p for p in self.posteriors.values() if _address(p.value) == location)
        return next((p for p in here if p.holds(weight)), None)

    def warn(self, key: Any, what: str) -> None:
        """Warn, once per context, where a draw is shared after all."""
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(f"{what}. {read_on('api/estimators')}", stacklevel=3)

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
        base, value, name = innermost(self._fn), msg["value"], msg["name"]
        if isinstance(base, Normal):
            self.rows.clear()  # another pass begins
            self.posteriors[name] = Posterior(value, base.loc, base.scale)
        else:
            self._warn_not_normal(name, value)

    def _warn_not_normal(self, name: str, value: Tensor) -> None:
        if value.numel() > 1 and value.requires_grad and role_of(name) != "prior":
            self.warn(name, f"guide site {name!r} is not an elementwise Normal, {_ONE_DRAW}")


class _Perturb(TorchFunctionMode):
    """Redirects operations on drawn weights to a perturbation."""

    def __init__(self, draws: Draws, perturb: Callable[[Use], Tensor]) -> None:
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

    def as_now(self) -> AbstractContextManager[None]:
        """Return a context that has the noise of now again: what is drawn later is forgotten."""
        known = [(p, dict(p.signs), set(p.used)) for p in self.draws.posteriors.values()]

        @contextmanager
        def as_then() -> Iterator[None]:
            later = [(posterior, posterior.signs, posterior.used) for posterior, *_ in known]
            for posterior, signs, used in known:
                posterior.signs, posterior.used = dict(signs), set(used)
            yield
            for posterior, signs, used in later:
                posterior.signs, posterior.used = signs, used

        return as_then()

    def _weighted(
        self, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **options: Any
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
        outputs = self.perturb(Use(self.draws, posterior, operation, x, weight, bias, channel))
        return outputs.squeeze(0) if unbatched else outputs

    def _product(self, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if right.dim() == 2 and self.draws.find(right):
            return self._weighted(F.linear, left, right.t())
        if self.draws.find(left):
            what = "a product with the weight on the left cannot perturb each example"
            self.draws.warn(func, f"{what}, {_ONE_DRAW}")
        return func(left, right)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the strides of ``like``."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _address(tensor: Any) -> int | None:
    """Return the address of a tensor's memory, which its views share; ``None`` inside vmap."""
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor inside vmap has no storage
        return None
