"""Models of which a single input's outputs can be drawn without weights, known by their parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb import likelihoods
from pyro_bbb._prior import Prior
from pyro_bbb._pyro import is_of_prior, sample_names
from pyro_bbb._softplus_normal import AutoSoftplusNormal
from pyro_bbb._unvalued import is_of_likelihood
from pyro_bbb.conversion import Converted
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianLinear, BayesianMLP

_LINEAR = (nn.Linear, BayesianLinear)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
    *(nn.Identity, nn.Dropout, nn.AlphaDropout),
)
_KNOWN = (*_LINEAR, *_ELEMENTWISE, nn.Sequential, BayesianMLP, nn.Flatten, nn.LayerNorm)
_LIKELIHOODS = (
    likelihoods.Categorical,
    likelihoods.Bernoulli,
    likelihoods.Gaussian,
    likelihoods.HeteroscedasticGaussian,
    likelihoods.Poisson,
    likelihoods.StudentT,
)


def draws_of_each_input(model: BayesianModel, guide: Any, x: Tensor) -> bool:
    """Whether one input's draws by `per_input` are, in distribution, those by drawn weights.

    True only of what is known: independent Normals, each weight in one linear layer, and rows that
    never meet.

    Args:
        model: the model.
        guide: its guide.
        x: the input, ``[1, ...]``.
    """
    if type(model) is not BayesianModel or type(model.likelihood) not in _LIKELIHOODS:
        return False
    if type(guide) is not AutoSoftplusNormal or not _is_normal(guide):
        return False
    parts = list(_parts(model.network))
    linears = [part for part, cls in parts if cls in _LINEAR]
    first = next((cls for _, cls in parts if cls not in (nn.Sequential, BayesianMLP)), None)
    return (
        all(_is_known(part, cls) for part, cls in parts)
        and len(set(linears)) == len(linears)
        and (x.dim() == 2 or (x.dim() > 2 and first is nn.Flatten))
    )


def _is_normal(guide: AutoSoftplusNormal) -> bool:
    """Whether all weights of the network are Normal, not of another support."""
    normal = guide.weight_names
    others = [name for name in guide.site_names if name not in normal]
    return all(is_of_prior(name) or is_of_likelihood(name) for name in others)


def _parts(module: nn.Module | None) -> Iterator[tuple[nn.Module, type]]:
    """A module and its parts, as often as they stand in it, each with its class without Pyro."""
    if module is None or isinstance(module, Prior):
        return
    cls: Any = type(module)
    yield module, _plain(cls)
    for part in module._modules.values():
        yield from _parts(part)


def _is_known(part: nn.Module, cls: type) -> bool:
    """Whether a part computes what its class says, row by row, and only linear ones are random."""
    own = vars(part)
    random = sample_names(part) if isinstance(part, PyroModule) and cls not in _LINEAR else []
    return (
        cls in _KNOWN
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in own)
        and not own.get("_pyro_bbb_tied")
        and all(map(is_of_prior, random))
        and (cls is not nn.Flatten or (own["start_dim"], own["end_dim"]) == (1, -1))
        and (cls is not nn.LayerNorm or len(own["normalized_shape"]) == 1)
    )


@cache
def _plain(cls: Any) -> Any:
    """A class as it was before Pyro came in."""
    if issubclass(cls, Converted):
        return vars(cls).get("plain_class", cls)
    mixed = (base for base in cls.__bases__ if base in _KNOWN and PyroModule[base] is cls)
    return next(mixed, cls)
