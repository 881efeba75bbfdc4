# SPDX-License-Identifier: Apache-2.0
"""Handlers that watch what a guide draws, for the gradient estimators."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from pyro_bbb.distributions import map_tensors
from pyro_bbb.distributions.detached import Detached
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.latents import role_of

ONE_DRAW = "one draw serves the whole minibatch there"


@dataclass
class Posterior:
    """An elementwise Normal and the draw of it that is in use."""

    value: Tensor
    loc: Tensor
    scale: Tensor
    used: set[Any] = field(default_factory=set)  # where its parts lie that were used already
    signs: dict[Any, Tensor] = field(default_factory=dict)

    def holds(self, weight: Tensor) -> bool:
        """Return whether a tensor in the same memory is the draw or a part of it."""
        left = int(weight.storage_offset() - self.value.storage_offset())
        steps = zip(self.value.stride(), self.value.shape, strict=True)
        for step, size in sorted(steps, reverse=True):  # between several draws lie other weights
            left -= step * min(max(0, left) // max(1, step), max(0, size - 1))
        return left == 0

    def seen_as(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of a weight that is the draw, or a view of a part of it."""
        value = self.value
        if weight.shape == value.shape and weight.stride() == value.stride():
            return self.loc.expand_as(value), self.scale.expand_as(value)
        offset = weight.storage_offset() - value.storage_offset()
        loc, scale = (
            x.as_strided(weight.shape, weight.stride(), x.storage_offset() + offset)
            for x in (_laid_out(part, value) for part in (self.loc, self.scale))
        )
        return loc, scale

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
            self.signs[key] = _fair_signs(shape, like)
        return self.signs[key]


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
    """Remembers the elementwise Normals that weights are drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.posteriors: dict[str, Posterior] = {}
        self.warned: set[Any] = set()
        self.rows: set[int] = set()  # first dimensions that met a weight since the last observation

    def add(
        self, values: Mapping[str, Tensor], locs: Mapping[str, Tensor], scales: Mapping[str, Tensor]
    ) -> None:
        """Take in weights, by site name, that were drawn from Normals without sample sites."""
        self.rows.clear()
        for name, value in values.items():
            if value.shape == locs[name].shape:
                self.posteriors[name] = Posterior(value, locs[name], scales[name])

    def find(self, weight: Any) -> Posterior | None:
        """The posterior of a tensor, if it is a remembered draw or a view of one."""
        location = address(weight)
        if location is None:
            return None
        here = (p for p in self.posteriors.values() if address(p.value) == location)
        return next((p for p in here if p.holds(weight)), None)

    def as_now(self) -> AbstractContextManager[None]:
        """A context in which the posteriors' noise is as at this call."""
        known = [(p, dict(p.signs), set(p.used)) for p in self.posteriors.values()]
        return _as_then(known)

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
        base, value = innermost(self._fn), msg["value"]
        if isinstance(base, Normal):
            self.rows.clear()  # another pass begins
            self.posteriors[msg["name"]] = Posterior(value, base.loc, base.scale)
        elif value.numel() > 1 and value.requires_grad and role_of(msg["name"]) != "prior":
            self.warn(
                msg["name"], f"guide site {msg['name']!r} is no elementwise Normal, {ONE_DRAW}"
            )


class DetachScores(Drawn):
    """Scores draws under their distribution with its parameters detached."""

    def _drawn(self, msg: Any) -> None:
        if any(isinstance(part, nn.Module) for part in getattr(msg["fn"], "transforms", ())):
            raise ValueError(
                f"guide site {msg['name']!r} is a flow, whose density at its draws cannot be "
                "constant; use the estimator 'reparam'"
            )
        if isinstance(msg["fn"], Distribution) and msg["fn"].has_rsample:
            msg["fn"] = Detached(map_tensors(msg["fn"], Tensor.detach))


@contextmanager
def _as_then(known: list[tuple[Posterior, dict[Any, Tensor], set[Any]]]) -> Iterator[None]:
    later = [(posterior, posterior.signs, posterior.used) for posterior, _, _ in known]
    for posterior, signs, used in known:
        posterior.signs, posterior.used = dict(signs), set(used)
    yield
    for posterior, signs, used in later:
        posterior.signs, posterior.used = signs, used


def _fair_signs(shape: list[int], like: Tensor) -> Tensor:
    """Independent random signs, eight from each byte: ten times as fast as Bernoulli draws."""
    count = math.prod(shape)
    drawn = torch.randint(256, (math.ceil(count / 8), 1), dtype=torch.uint8, device=like.device)
    bit = torch.arange(8, dtype=torch.uint8, device=like.device)
    bits = (drawn >> bit) & 1  # [bytes, 8]
    return bits.flatten()[:count].view(shape).to(like.dtype).mul_(2).sub_(1)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A tensor with the strides of ``like``."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def address(tensor: Any) -> int | None:
    """Address of a tensor's memory, which its views have too; ``None`` inside vmap."""
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor inside vmap has no storage
        return None
