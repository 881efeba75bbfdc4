# SPDX-License-Identifier: Apache-2.0
r"""Weights without a value: tensors of which only the means and variances are known.

A linear layer draws its outputs from them. Whatever else a network does with one is an error that
says so, because it would not leave each input independent Normals.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.latents import role_of


class Moments:
    """Means and variances of a guide's weights, each computed once."""

    def __init__(self, guide: AutoSoftplusNormal) -> None:
        self.guide = guide
        self.names = [name for name in guide.site_names if not is_of_likelihood(name)]
        self._normal = set(guide.weight_names)
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of one weight."""
        if name not in self._normal:
            raise inexact(f"{name!r} is not a weight of independent Normals")
        if name not in self._known:
            self._known[name] = self.guide.loc(name), self.guide.scale(name).square_()
        return self._known[name]


class Pass:
    """One run of a network with weights that have no value; each may be used once.

    The first random weights that the n rows of inputs meet make ``draws * n`` of them.
    """

    def __init__(self, moments: Moments, inputs: int, draws: int) -> None:
        self.moments, self.inputs, self.draws = moments, inputs, draws
        self._used: set[str] = set()
        self._rows = {inputs}  # of tensors with one row for each input, or for each draw of it

    def weights(self) -> dict[str, Tensor]:
        """The weights by name; they hold the pass, which so does not hold them."""
        return {name: MomentTensor.of(self, name) for name in self.moments.names}

    def linear(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Outputs of a linear layer, drawn."""
        self._require_rows(x)
        (loc, variance), (bias_loc, bias_variance) = self._use(weight), self._use(bias)
        mean = F.linear(x, loc, bias_loc)
        _require_own(bias, mean)
        if variance is None:
            return self._draw(mean, bias_variance.sqrt())
        return self._draw(mean, F.linear(x.square(), variance, bias_variance).sqrt_())

    def add(self, x: Tensor, bias: Any) -> Tensor:
        """Rows plus a bias, drawn for each row."""
        self._require_rows(x)
        loc, variance = self._use(bias)
        mean = x + loc
        _require_own(bias, mean)
        return self._draw(mean, variance.sqrt())

    def _use(self, weight: Any) -> tuple[Any, Any]:
        """Mean and variance; of what is known, itself and none."""
        if not isinstance(weight, MomentTensor):
            return weight, None
        if weight.site in self._used:
            raise inexact(f"{weight.site!r} is used twice, with one value")
        self._used.add(weight.site)
        loc, variance = self.moments(weight.site)
        return (loc.t(), variance.t()) if weight.turned else (loc, variance)

    def _require_rows(self, x: Tensor) -> None:
        if x.dim() != 2 or len(x) not in self._rows:
            raise inexact(f"weights meet a tensor of shape {list(x.shape)}, not one row per input")

    def _draw(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Independent Normals ``[draws * n, ...]``, of means for these or for n rows."""
        repeats = self.draws if len(mean) == self.inputs else 1
        self._rows.add(self.draws * self.inputs)
        noise = torch.randn(repeats, *mean.shape, dtype=mean.dtype, device=mean.device)
        return torch.addcmul(mean, scale, noise, out=noise).flatten(0, 1)


class MomentTensor(Tensor):
    """A weight of a `Pass`: as a tensor one NaN, repeated; operations on it are the pass's."""

    site: str
    turned: bool  # a matrix the other way round
    passing: Pass

    @classmethod
    def of(cls, passing: Pass, site: str, turned: bool = False) -> MomentTensor:
        """The weight of a site."""
        loc = passing.moments.guide.loc(site)
        shape = loc.t().shape if turned else loc.shape
        weight = loc.new_full((), torch.nan).expand(shape).as_subclass(cls)
        weight.site, weight.turned, weight.passing = site, turned, passing
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply an operation to such a weight, if it leaves independent Normals of each row."""
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        outputs = _OPERATIONS.get(func, _other)(*args, **kwargs)
        if outputs is None:
            weight = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
            raise inexact(f"{weight.site!r} is used by {resolve_name(func) or func}")
        return outputs


def inexact(why: str) -> ValueError:
    """The error where outputs cannot be drawn input by input."""
    return ValueError(f"estimator 'local_reparam' is not exact here, use 'reparam': {why}")


def is_of_likelihood(name: str) -> bool:
    """Return whether a latent is the likelihood's."""
    return role_of(name) == "likelihood"


def _require_own(bias: Any, outputs: Tensor) -> None:
    """Each output has a bias of its own."""
    if isinstance(bias, MomentTensor) and bias.shape != outputs.shape[1:]:
        raise inexact(f"outputs of shape {list(outputs.shape)} share {bias.site!r}")


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if isinstance(input, MomentTensor):
        return None
    passing: Pass = (weight if isinstance(weight, MomentTensor) else bias).passing
    return passing.linear(input, weight, bias)


def _product(left: Any, right: Any) -> Tensor | None:
    if not isinstance(right, MomentTensor) or right.dim() != 2:
        return None
    return _linear(left, _turn(right))


def _turn(weight: MomentTensor) -> MomentTensor | None:
    if weight.dim() != 2:
        return None
    return MomentTensor.of(weight.passing, weight.site, not weight.turned)


def _sum(left: Any, right: Any, **options: Any) -> Tensor | None:
    x, bias = (right, left) if isinstance(left, MomentTensor) else (left, right)
    if options or not isinstance(x, Tensor) or isinstance(x, MomentTensor):
        return None
    return bias.passing.add(x, bias)


def _other(*args: Any, **kwargs: Any) -> None:
    """No operation that leaves independent Normals."""


_QUESTIONS: frozenset[Any] = frozenset(  # which the numbers do not answer
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
    }
)
_OPERATIONS: dict[Any, Any] = {
    F.linear: _linear,
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product
    ),
    **dict.fromkeys((torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__), _turn),  # type: ignore[attr-defined]
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _sum),
}
