# SPDX-License-Identifier: Apache-2.0
r"""Units taken out of their layers, so that the network becomes narrower.

A unit is an output of a linear layer or a channel of a convolution. It is silent without its
outgoing weights; also without its incoming ones (bias too), if what follows turns 0 into 0, as ReLU
and tanh do, and sigmoid and batch normalisation do not. The ratio of a unit is the norm of the
signal-to-noise ratios of the weights that silence it, the lower one of two:

$$r = \min_{W \in \{\text{in},\, \text{out}\}}
  \sqrt{\textstyle\sum_{j \in W} \mu_j^2 / \sigma_j^2}$$

The posterior's log-density is $r^2 / 2$ nats lower where these weights are 0 than at their means.

Which weights are outgoing is found by runs of the network on copies of one input. In copy i the
output of unit i is NaN, and the weights of later layers that meet a NaN there read that unit. A
unit can be removed if it alone reaches these weights, without other units and without what has no
units (the input, embeddings, attention), and if it is not an output of the network.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from torch import Size, Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import call_arguments, each, require_inputs, to_precision
from pyro_bbb._utils.locking import locked
from pyro_bbb.latents import parts_of_prior, sample_names, substituted

Layers: TypeAlias = dict[nn.Module, str]  # those that can be narrowed, and their paths in the model
Kept: TypeAlias = dict[int, Tensor]  # indices that stay, by axis of a tensor
Run: TypeAlias = Callable[[Any], list[Tensor]]  # from inputs to outputs
Take: TypeAlias = Callable[[Tensor], Tensor]  # from values of a latent to those that stay

_COPIES = 256  # of the input in one run
_WIDTHS: dict[type[nn.Module], tuple[str | None, str]] = {  # attributes: outputs, inputs
    nn.Linear: ("out_features", "in_features"),
    _ConvNd: ("out_channels", "in_channels"),
    _NormBase: (None, "num_features"),  # batch and instance normalisation
    nn.PReLU: (None, "num_parameters"),
}
_PER_CHANNEL = (_NormBase, nn.PReLU)  # which keep units separate


@locked
def remove_units(guide: Any, fraction: float | None, threshold: float | None, x: Any) -> Any:
    """Return a narrower copy of a guide's model, and its guide; see `prune`."""
    if not isinstance(getattr(guide.model, "network", None), nn.Module):
        raise TypeError(
            f"units=True needs the guide of a BayesianModel, got one of {guide.model!r}"
        )
    model = copy.deepcopy(guide.model)
    layers = _narrowable(model, guide)
    run = partial(_run, model, guide.median())
    rows = _rows(model, guide, run, x)
    sources, total = _numbered(model, layers)
    with _explained("units=True needs a network whose layers have the batch as first dimension"):
        reached, free = _reached(run, rows, layers, sources, total)
    loud = _loud(run, rows, reached, free)
    goes = _chosen(guide, layers, sources, reached, free, loud, fraction, threshold)
    removed = {layer: units[goes].any(0) for layer, units in reached.items()}
    with _zero_inputs(removed):
        expected = run(rows)
    takes: dict[str, Take] = {}
    for layer, inputs in removed.items():
        takes |= _narrow(layer, layers[layer], goes[sources[layer]], inputs)
    with _explained(
        "units=True needs a network that runs at any width, whose forward neither states a number "
        "of units, as x.view(-1, 400) does, nor reads a layer's weight without calling the layer"
    ):
        guide = guide.narrowed(model, takes)
        outputs = _run(model, guide.median(), rows)
        for before, after in zip(expected, outputs, strict=True):
            tolerance = before.abs().max() * torch.finfo(before.dtype).eps ** 0.5
            torch.testing.assert_close(after, before, rtol=0, atol=tolerance, equal_nan=True)
    model.network._pyro_bbb_narrowed = True
    return model, guide


@contextmanager
def _explained(expectation: str) -> Iterator[None]:
    """Raise errors of the network inside as ValueError, with what was expected of it."""
    try:
        yield
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{expectation}; it fails: {e}") from e


# --- layers and their weights ---


def _widths(layer: nn.Module) -> tuple[str | None, str] | None:
    """Return the attributes that hold a layer's numbers of outputs and of inputs."""
    return next((names for cls, names in _WIDTHS.items() if isinstance(layer, cls)), None)


def _axes(layer: nn.Module) -> dict[str, tuple[int | None, int | None]]:
    """Return the axes of outputs and of inputs by tensor of a layer."""
    if isinstance(layer, _PER_CHANNEL):
        return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (None, 0))
    swapped = isinstance(layer, _ConvTransposeNd)
    return {"weight": (1, 0) if swapped else (0, 1), "bias": (0, None)}


def _own(layer: nn.Module) -> set[str]:
    """Return the names of a layer's own weights, random, tied or ordinary."""
    names = {name for name, value in layer._parameters.items() if value is not None}
    random = sample_names(layer) if hasattr(layer, "_pyro_samples") else ()  # type: ignore[arg-type]
    tied = vars(layer).get("_pyro_bbb_tied", ())
    return names.union(random, tied).difference(parts_of_prior(layer))


def _narrowable(model: Any, guide: Any) -> Layers:
    """Return the layers of weights that this library declares, and no other module shares."""
    paths = {layer: f"network.{path}".rstrip(".") for path, layer in model.network.named_modules()}
    tied = [tie for layer in paths for tie in vars(layer).get("_pyro_bbb_tied", {}).values()]
    shared = {owner for owner, _ in tied}
    owners = Counter(id(p) for layer in paths for p in layer._parameters.values())

    def fits(layer: nn.Module) -> bool:
        own, sites = _own(layer), vars(layer).get("_pyro_samples", {})
        random = own & sites.keys()
        return (
            own <= {"weight", "bias"}
            and ("weight" in own or isinstance(layer, _NormBase))
            and getattr(layer, "groups", 1) == 1
            and getattr(layer, "num_parameters", 2) > 1
            and layer not in shared
            and not vars(layer).get("_pyro_bbb_tied")
            and not any(owners[id(layer._parameters.get(name))] > 1 for name in own - random)
            and all(f"{paths[layer]}.{name}" in guide.weight_names for name in random)
            and all(isinstance(getattr(sites[name], "shape", None), Size) for name in random)
        )

    return {layer: path for layer, path in paths.items() if _widths(layer) and fits(layer)}


def _moments(guide: Any, layer: nn.Module, path: str, name: str) -> tuple[Tensor, Tensor] | None:
    """Return means and standard deviations of a weight; an ordinary one has deviations of 0."""
    if name in vars(layer).get("_pyro_samples", ()):
        return guide.loc(f"{path}.{name}"), guide.scale(f"{path}.{name}")
    value = layer._parameters.get(name)
    return None if value is None else (value.detach(), torch.zeros_like(value))


# --- runs of the network ---


def _rows(model: Any, guide: Any, run: Run, x: Any) -> Any:
    """Return two equal rows of inputs, which the network takes."""
    if x is None:
        first = next(m for m in model.network.modules() if _own(m))
        shape = getattr(model.network, "input_shape", None)
        shape = (first.in_features,) if isinstance(first, nn.Linear) else shape
        if shape is None:
            raise ValueError(
                "x must be given with units=True, as the shape of an input does not follow from "
                f"the network's first layer, a {type(first).__name__}: pass x=x_train[:1]"
            )
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    rows = to_precision(require_inputs(x), guide).to(guide.loc(guide.weight_names[0]).device)
    rows = each(rows, lambda t: t[:1].expand(2, *t.shape[1:]))
    with _explained("x must be given as inputs of the network, x=x_train[:1]"):
        run(rows)
    return rows


def _run(model: Any, values: Mapping[str, Tensor], rows: Any) -> list[Tensor]:
    """Return the floating tensors among the network's outputs at values of the latents."""
    args, kwargs = call_arguments(rows)
    with torch.no_grad(), evaluating(model), substituted(model, values):
        outputs = tree_leaves(model.network(*args, **kwargs))
    return [t for t in outputs if isinstance(t, Tensor) and t.is_floating_point()]


def _features(t: Tensor, layer: nn.Module, copies: int) -> Tensor:
    """View a layer's inputs or outputs as ``[copies, features, ...]``."""
    return t.unflatten(0, (copies, -1)).movedim(-1 if isinstance(layer, nn.Linear) else 2, 1)


@contextmanager
def _zero_inputs(removed: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Set inputs of layers to 0 inside, where the masks are true."""

    def zero(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        axis, columns = (
            -1 if isinstance(layer, nn.Linear) else 1,
            removed[layer].nonzero().flatten(),
        )
        return tree_map_only(Tensor, lambda t: t.index_fill(axis, columns, 0), (args, kwargs))

    with ExitStack() as hooks:
        for layer in removed:
            if not isinstance(layer, _PER_CHANNEL):
                handle = layer.register_forward_pre_hook(zero, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


# --- which weights read a unit ---


def _numbered(model: Any, layers: Layers) -> tuple[dict[Any, slice], int]:
    """Return the numbers of all sources of values, by module, and how many there are.

    The network's input (``None``) comes first, twice, as some networks squeeze a batch of one. Each
    module with weights that cannot be narrowed is one source, and each unit of a layer is one.
    """
    others = [m for m in model.network.modules() if m not in layers and _own(m)]
    others = [m for m in others if getattr(m, "num_parameters", 2) > 1]  # not PReLU of one
    sources: dict[Any, slice] = {None: slice(0, 2)}
    total = 2
    for module in [*others, *layers]:
        outputs, _ = (_widths(module) if module in layers else None) or (None, "")
        size = 1 if module in others else getattr(module, outputs) if outputs else 0
        sources[module] = slice(total, total + size)
        total += size
    return sources, total


class _Copies:
    """One run of the network on copies of an input, each with NaN from one source.

    Args:
        sources: numbers of the sources, by module.
        layers: layers of units.
        numbers: number of the source of each copy.
    """

    def __init__(self, sources: dict[Any, slice], layers: Layers, numbers: Tensor) -> None:
        self.sources, self.layers, self.numbers = sources, layers, numbers
        self.met: dict[nn.Module, list[Tensor]] = defaultdict(list)  # [copies, inputs] by call

    def run(self, run: Run, rows: Any) -> Tensor:
        """Return which copies have NaN among the outputs."""
        size = len(self.numbers)
        inputs = each(rows, lambda t: self.mark(None, t[:1].expand(size, *t.shape[1:])))
        with ExitStack() as hooks:
            for module in self.sources:
                if module is not None:
                    hook = module.register_forward_hook(lambda m, _, out: self.mark(m, out))
                    hooks.callback(hook.remove)
            for layer in self.layers:
                pre_hook = layer.register_forward_pre_hook(self.meet, with_kwargs=True)
                hooks.callback(pre_hook.remove)
            outputs = run(inputs)
        nan = [t.isnan().unflatten(0, (size, -1)).reshape(size, -1).any(1) for t in outputs]
        return torch.stack(nan).any(0)

    def mark(self, module: nn.Module | None, values: Any) -> Any:
        """Replace values of a source by NaN in its copies."""
        source, size = self.sources[module], len(self.numbers)
        copies = ((self.numbers >= source.start) & (self.numbers < source.stop)).nonzero().flatten()

        def fill(t: Tensor) -> Tensor:
            if not t.is_floating_point() or not len(copies):
                return t
            if module in self.layers:
                t = t.clone()
                units = self.numbers[copies] - source.start
                _features(t, module, size)[copies, units] = torch.nan
                return t
            if t.dim() == 0 or len(t) != size:  # such as the state of a recurrent layer
                return torch.full_like(t, torch.nan)
            return t.index_fill(0, copies, torch.nan)

        return tree_map_only(Tensor, fill, values)

    def meet(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a layer that are NaN, and replace them by 0."""

        def record(t: Tensor) -> Tensor:
            size = len(self.numbers)
            met = _features(t.isnan(), layer, size)
            self.met[layer].append(met.reshape(*met.shape[:2], -1).any(2))
            return t if isinstance(layer, _PER_CHANNEL) else t.masked_fill(t.isnan(), 0)

        return tree_map_only(Tensor, record, (args, kwargs))


def _reached(
    run: Run, rows: Any, layers: Layers, sources: dict[Any, slice], total: int
) -> tuple[dict[nn.Module, Tensor], Tensor]:
    """Return the sources ``[total, inputs]`` of each layer's inputs, and which are separate units.

    Two calls of one layer must read its inputs from the same sources.
    """
    numbers = torch.arange(total, device=rows.device)
    units = min((sources[layer].start for layer in layers), default=total)
    chunks = [numbers[:units], *numbers[units:].tensor_split(-(-(total - units) // _COPIES) or 1)]
    copies = [_Copies(sources, layers, chunk) for chunk in chunks if len(chunk)]
    mixed = torch.cat([chunk.run(run, rows) for chunk in copies])
    reached: dict[nn.Module, Tensor] = {}
    read = torch.zeros_like(mixed)
    for layer in copies[0].met:
        calls = [torch.cat(met) for met in zip(*(c.met[layer] for c in copies), strict=True)]
        reached[layer] = torch.stack(calls).any(0)
        shared = reached[layer].sum(0) > 1
        shared |= torch.stack([call != reached[layer] for call in calls]).any(0).any(0)
        mixed |= reached[layer][:, shared].any(1)
        if not isinstance(layer, _PER_CHANNEL):
            read |= reached[layer].any(1)
    return reached, read & ~mixed & (numbers >= units)


def _loud(run: Run, rows: Any, reached: Mapping[nn.Module, Tensor], free: Tensor) -> Tensor:
    """Return which free sources are read as other numbers than 0 when each of them is 0."""
    loud = torch.zeros_like(free)
    read = [layer for layer in reached if not isinstance(layer, _PER_CHANNEL)]

    def listen(layer: nn.Module, args: Any, kwargs: Any) -> None:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                inputs = _features(t != 0, layer, 1)[0].flatten(1).any(1)
                loud.logical_or_((reached[layer] & inputs).any(1))

    with ExitStack() as hooks:
        for layer in read:
            pre_hook = layer.register_forward_pre_hook(listen, with_kwargs=True)
            hooks.callback(pre_hook.remove)
            hook = layer.register_forward_hook(lambda m, args, out: torch.zeros_like(out))
            hooks.callback(hook.remove)
        run(rows)
    return loud & free


# --- which units go ---


def _chosen(
    guide: Any,
    layers: Layers,
    sources: dict[Any, slice],
    reached: dict[nn.Module, Tensor],
    free: Tensor,
    loud: Tensor,
    fraction: float | None,
    threshold: float | None,
) -> Tensor:
    """Return which of the sources are units that go."""
    sums = torch.zeros(2, *free.shape, 2, dtype=torch.double, device=free.device)
    incoming, outgoing = sums  # of squared ratios, and numbers of weights left, [total, 2] each
    for layer, units in reached.items():
        for name, (of_outputs, of_inputs) in _axes(layer).items():
            moments = _moments(guide, layer, layers[layer], name)
            if moments is None or isinstance(layer, _PER_CHANNEL):
                continue
            loc, scale = moments
            squared = (loc.double() / scale).square().where(loc != 0, 0.0)
            both = torch.stack([squared, ((loc != 0) | (scale != 0)).double()])  # [2, *weight]
            if of_outputs is not None:
                incoming[sources[layer]] += _sums(both, of_outputs)
            if of_inputs is not None:
                read, unit = units.any(0), units.byte().argmax(0)  # of each input
                outgoing.index_add_(0, unit[read], _sums(both, of_inputs)[read])
    incoming[loud] = torch.inf  # removal of these weights leaves a constant
    ratios = sums[..., 0].amin(0).sqrt()
    goes = free & (sums[..., 1] == 0).any(0)
    candidates = (free & ratios.isfinite()).nonzero().flatten()
    if not len(candidates) and (fraction, threshold) != (None, None):
        raise ValueError(
            "guide must be of a network with units that can be removed, got one without: units "
            "that other layers read separately, between layers of random weights"
        )
    ranked = candidates[ratios[candidates].argsort(stable=True)]
    if fraction is not None:
        goes[ranked[: round(fraction * len(ranked))]] = True
    if threshold is not None:
        goes[ranked[ratios[ranked] < threshold]] = True
    for layer in layers:
        source = sources[layer]
        if len(goes[source]) and goes[source].all():  # a layer keeps its best unit
            goes[source.start + ratios[source].argmax()] = False
    return goes


def _sums(values: Tensor, axis: int) -> Tensor:
    """Return sums of ``[2, *weight]`` over all axes of the weight but one, ``[n, 2]``."""
    return values.movedim(axis + 1, 1).reshape(2, values.shape[axis + 1], -1).sum(2).T


# --- narrower layers ---


def _narrow(layer: Any, path: str, outputs: Tensor, inputs: Tensor) -> dict[str, Take]:
    """Narrow a layer in place, without the outputs and inputs where the masks are true.

    Returns:
        How the kept entries are taken from values of its latents, by site name.
    """
    for attribute, goes in zip(_widths(layer) or (), (outputs, inputs), strict=True):
        if attribute is not None:
            setattr(layer, attribute, int((~goes).sum()))
    takes: dict[str, Take] = {}
    for name, axes in _axes(layer).items():
        kept = {
            axis: (~goes).nonzero().flatten()
            for axis, goes in zip(axes, (outputs, inputs), strict=True)
            if axis is not None
        }
        take = partial(_take, kept=kept)
        if name in vars(layer).get("_pyro_samples", ()):
            sites = _narrow_site(layer, name, kept)
            takes |= {f"{path}.{site}": own for site, own in sites.items()}
        for values in (layer._parameters, layer._buffers, vars(layer).get("_pyro_bbb_initial", {})):
            if values.get(name) is not None:
                values[name] = take(values[name])
    return takes


def fit_widths(model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Narrow the layers of a model in place to the shapes of their tensors, by name.

    Layers that state a prior for each weight stay as they are.
    """
    model.network._pyro_bbb_narrowed = True

    def stated(layer: Any, name: str, site: Any) -> bool:
        shape = getattr(site, "shape", None)  # of sites that this library declares
        return not isinstance(shape, Size) or _of_each_weight(layer.prior.for_weight(name), shape)

    for path, layer in model.named_modules():
        widths, sites = _widths(layer), vars(layer).get("_pyro_samples", {})
        if widths is None or getattr(layer, "groups", 1) > 1:
            continue
        if any(stated(layer, name, sites[name]) for name in _own(layer) & sites.keys()):
            continue
        goes = []
        for side, attribute in enumerate(widths):
            axes = {f"{path}.{name}": axes[side] for name, axes in _axes(layer).items()}
            sizes = [shapes[k][i] for k, i in axes.items() if i is not None and k in shapes]
            width = getattr(layer, attribute) if attribute else 0
            goes.append(torch.arange(width) >= min(sizes, default=width))
        if torch.cat(goes).any():
            _narrow(layer, path, *goes)


def _narrow_site(layer: Any, name: str, kept: Kept) -> dict[str, Take]:
    """Narrow a random weight in place, and its prior; see `_narrow`."""
    site, prior = layer._pyro_samples[name], layer.prior.for_weight(name)
    before = site.shape
    site.shape = Size(len(kept[i]) if i in kept else n for i, n in enumerate(before))
    if _of_each_weight(prior, before):
        prior.distribution = _narrow_normal(prior.distribution, name, kept)
    parts = [key for key in parts_of_prior(layer) if key.startswith(f"{name}_prior_")]
    values = {key: layer._parameters[key] for key in parts if key in layer._parameters}
    prior.attach(layer, name, site.shape)  # makes its parts of this shape
    for key, value in values.items():
        layer._parameters[key] = _take(value, kept)
    # latent scales are of rows, or of columns
    groups = {0: kept[1]} if getattr(prior, "per", "") == "input" and 1 in kept else kept
    latents = {key: partial(_take, kept=groups) for key in parts if key not in values}
    return {name: partial(_take, kept=kept), **latents}


def _of_each_weight(prior: Any, shape: Size) -> bool:
    return getattr(getattr(prior, "distribution", None), "batch_shape", None) == shape


def _narrow_normal(prior: Any, name: str, kept: Kept) -> Any:
    """Return the Normals of the weights that are kept, of a Normal for each weight."""
    if type(prior) is not dist.Normal:
        raise ValueError(
            f"prior of {name!r} must be a Normal where each weight has another, got a {prior}"
        )
    return dist.Normal(_take(prior.loc, kept), _take(prior.scale, kept))


def _take(values: Any, kept: Kept) -> Any:
    """Return the kept entries of a tensor; of a parameter a parameter, trained or not as before."""
    new = values.detach()
    for axis, indices in kept.items():
        if axis < new.dim() and new.shape[axis] > 1:  # a prior's part may have fewer axes
            new = new.index_select(axis, indices)
    is_parameter = isinstance(values, nn.Parameter)
    return nn.Parameter(new, values.requires_grad) if is_parameter else new
