# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a model and its guide or chains as a folder of two files.

``tensors-<hash>.safetensors`` (deflated: ``.safetensors.zlib``) holds parameters and buffers;
``spec.json`` describes the network, priors, likelihood and guide by registered names. Loading
executes nothing from either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
from torch import Size, Tensor, nn

from pyro_bbb._utils.files import LoadError, loading, require_form
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_device, floating, kind
from pyro_bbb._utils.version import __version__
from pyro_bbb.guides import GUIDES, Ensemble, Guide
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import copy_sharing
from pyro_bbb.persistence._blueprint import build, describe
from pyro_bbb.persistence.archive import Json, read, write
from pyro_bbb.persistence.json_codec import CannotDescribe
from pyro_bbb.persistence.quantization import dequantize, quantize
from pyro_bbb.persistence.state import State, add_base, cpu_copy, is_adapted, take_base
from pyro_bbb.pruning import fit_widths

Record = dict[str, Any]
_FORM_OF_GUIDE = {
    "name": str,
    "options": dict[str, Any],
    "pruned": bool,
}
_FORM_OF_ENSEMBLE = {"name": str, "members": list[dict[str, Any]], "calls": int}
_CHAINS, _DRAWS = "chains", "by_chain."
_FORM_OF_CHAINS = {
    "name": str,
    "latents": list[str],
    "dtype": Literal["float64", "float32", "float16", "bfloat16"],
    "numbers": dict[str, float],
}
_INITIAL = "initial."  # prefix of the values of weights before `bayesianize`
_FORM: dict[str, Any] = {  # types of a description's fields
    "versions": dict[str, str],
    "num_data": int,
    **dict.fromkeys(("network", "likelihood", "guide"), dict[str, Any]),
    **dict.fromkeys(("sites", "latents"), dict[str, list[int]]),
    **dict.fromkeys(("evaluating", "frozen"), list[str]),
    "aliases": dict[str, str],
    "metadata": dict[str, Any],
}


@dataclass(frozen=True)
class Loaded:
    """Result of `load`; ``model, guide = load(path)`` unpacks the two.

    Args:
        model: the model.
        guide: its guide.
        metadata: the metadata given to `save`.
        versions: versions of pyro_bbb, pyro and torch that saved it.
    """

    model: BayesianModel
    guide: Any
    metadata: dict[str, Json]
    versions: dict[str, str]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.guide))


@locked
def save(
    path: str | PathLike[str],
    model: BayesianModel,
    guide: Any,
    *,
    metadata: Mapping[str, Json] | None = None,
    compressed: bool = False,
) -> None:
    """Save a model and its guide, replacing an earlier save in one step.

    At any moment, also if the process is killed, the folder holds the old save or the new one.
    Networks of this library's and torch's layers, converted ones too, are saved with their
    architecture. Of a network by `adapt` the frozen weights are not saved, but their hash; `load`
    needs it, adapted in the same way.

    For other networks, of your own class or with a callable prior, only tensors are saved, and
    `load` needs the network.

    Args:
        path: the folder; created if missing.
        model: the model; not changed.
        guide: one of `guides.GUIDES` for that model, trained, pruned or fresh; or the `Chains` of
            a sampler, whose draws are saved in float32 (fewer of them by `Chains.thin`).
        metadata: further content of JSON's types, such as `History.as_dict` or scores.
        compressed: deflate the tensors, and round what an `AutoSoftplusNormal`, or an ensemble of
            them, has: standard deviations by at most 3.2 %, and means by at most half of these,
            which costs 1/24 nat a weight on average. Only the weights left of a pruned guide take
            room. All other tensors stay exact. The weights that a network had before `bayesianize`
            are left out.

    Raises:
        TypeError: an argument is of another kind, or metadata has no form in JSON.
        ValueError: the guide is not of this model, or a number in metadata is not finite.
    """
    if type(model) is not BayesianModel:
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    folder = _folder(path)
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata must be a dict, got {metadata!r}")
    try:
        content = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"metadata must be of JSON's types, and finite: {error}") from error
    kind("compressed", compressed, bool)
    spec, tensors = _content(model, guide, content)
    if compressed:
        for name in model.initial_locs():
            layer, _, _ = name.rpartition(".")
            if getattr(model.get_submodule(layer), "padding_idx", None) is None:
                tensors.pop(_INITIAL + name, None)  # as large as the dense network
        spec["quantized"] = quantize(guide, "guide.", tensors)
    write(folder, "model", spec, tensors, deflated=compressed)


@locked
def load(
    path: str | PathLike[str],
    *,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Load a saved model and guide, ready for prediction, training, pruning or export.

    Nothing from the files is executed.

    Args:
        path: the folder.
        network: a network of the saved architecture, where that is of your own class or has
            adapters. It is copied, with its priors; frozen weights of an adapted one are shared.
            Layers from which `prune` took units may be as wide as before.
        likelihood: a likelihood of the saved kind, where that is of your own class. It is copied.
        device: device of the tensors; by default the CPU.
        dtype: float type of all parameters; by default as saved.

    Returns:
        Model, guide, metadata and versions.

    Raises:
        FileNotFoundError: there is nothing saved at that path.
        LoadError: a file is damaged, of a newer format, or does not fit the network; or adapters
            are of a network with other weights.
        TypeError: an argument is of another kind.
        ValueError: the device is not available.
    """
    target, dtype = as_device("cpu" if device is None else device), floating(dtype)
    if network is not None:
        kind("network", network, nn.Module)
    if likelihood is not None:
        kind("likelihood", likelihood, Likelihood)
    spec, tensors = read(_folder(path), "model")
    with torch.random.fork_rng(devices=[]), loading(path, spec.get("versions")):
        quantized = spec.pop("quantized", {})
        require_form(quantized, dict[str, str], "quantized")
        dequantize(quantized, tensors)
        require_form(spec, _FORM)
        loaded = _load(spec, tensors, {"network": network, "likelihood": likelihood})
    model, guide = (module.to(device=target, dtype=dtype) for module in loaded)
    for submodule in model.modules():
        initial = getattr(submodule, "_pyro_bbb_initial", {})
        initial.update({name: x.to(device=target, dtype=dtype) for name, x in initial.items()})
    return replace(loaded, model=model, guide=guide)


def _content(
    model: BayesianModel, guide: Any, metadata: dict[str, Json]
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return the description and the tensors to be written."""
    sites = _lists(model.latent_shapes())
    guide_record = _record(guide)
    latents = _lists(_shapes(guide))
    if wrong := [name for name, shape in sites.items() if latents.get(name) != shape]:
        raise ValueError(f"guide must have the model's latents, it differs in {wrong}")
    undeclared = [name for name in latents if name not in sites]
    if undeclared and not _is_chains(guide):
        raise ValueError(
            f"latent {undeclared[0]!r}, which the forward pass samples by itself, must be declared "
            "as a PyroSample to be saved"
        )
    state = State({_INITIAL + name: value for name, value in model.initial_locs().items()})
    adapted = is_adapted(model.network)
    described: dict[str, Json] = {}
    for name in ("network", "likelihood"):
        try:
            if adapted and name == "network":
                raise CannotDescribe("adapt() makes it from a network that the save does not hold")
            described[name] = {"parts": describe(getattr(model, name), name, state.tensors)}
        except CannotDescribe as error:
            described[name] = {"unknown": str(error)}
    if hasattr(model.network, "_pyro_bbb_narrowed"):
        described["network"]["narrowed"] = True
    state.add(model, "model.")
    _add_posterior(guide, state, "guide.")
    if adapted:
        described["network"]["base"] = take_base(model, state)
    spec = {
        "versions": {
            "pyro_bbb": __version__,
            "pyro": pyro.__version__,
            "torch": str(torch.__version__),
        },
        "num_data": model.num_data,
        **described,
        "guide": guide_record,
        "sites": sites,
        "latents": latents,
        "evaluating": [name for name, m in model.named_modules() if not m.training],
        "frozen": state.frozen,
        "aliases": state.aliases,
        "metadata": metadata,
    }
    return spec, {name: cpu_copy(value) for name, value in state.tensors.items()}


def _load(spec: dict[str, Json], tensors: dict[str, Tensor], given: dict[str, Any]) -> Loaded:
    """Build model and guide on the CPU, in their saved dtypes."""
    built = {name: _part(name, given[name], spec[name], tensors) for name in given}
    model = BayesianModel(num_data=spec["num_data"], **built)
    for name, first in spec["aliases"].items():
        noun, _, _ = name.removeprefix("model.").partition(".")
        if given.get(noun) is None and name.startswith("model."):  # built here
            path, _, leaf = name.removeprefix("model.").rpartition(".")
            shared = attrgetter(first.removeprefix("model."))(model)
            setattr(model.get_submodule(path), leaf, shared)
    if given["network"] is not None and spec["network"].get("narrowed"):  # by prune(units=True)
        of_model = {k.removeprefix("model."): x.shape for k, x in tensors.items()}
        fit_widths(model, of_model | spec["sites"])
    _require_same("random weight", spec["sites"], _lists(model.latent_shapes()))
    for name in [x for x in tensors if x.startswith(_INITIAL)]:  # not in torch's state dict
        path, _, leaf = name.removeprefix(_INITIAL).rpartition(".")
        initial = getattr(model.get_submodule(path), "_pyro_bbb_initial", None)
        if initial is None:
            raise LoadError(f"network must be made by bayesianize as the saved {path} was")
        initial[leaf] = tensors.pop(name)
    state = State(tensors, spec["aliases"], spec["frozen"])
    state.fill(model, "model.")
    for name, module in model.named_modules():
        module.training = name not in spec["evaluating"]
    guide = _make(spec["guide"], model, state, "guide.")
    _require_same("latent", spec["latents"], _lists(_shapes(guide)))
    if tensors:
        raise LoadError(f"the network expects no tensors {sorted(tensors)}")
    return Loaded(model, guide, spec["metadata"], spec["versions"])


def _require_same(what: str, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Raise LoadError if shapes by name differ from the saved ones."""
    for name in saved | present:
        if saved.get(name) != present.get(name):
            raise LoadError(
                f"{what} {name} has shape {saved.get(name, 'none')}, the network expects "
                f"{present.get(name, 'none')}: pass a network of the saved layers"
            )


def _part(name: str, given: Any, described: Json, tensors: dict[str, Tensor]) -> Any:
    """Return network or likelihood: a copy of the given one, or built from its description."""
    names = [x for x in tensors if x.startswith(f"constants.{name}.")]
    constants = {x: tensors.pop(x) for x in names}
    if given is not None and (base := described.get("base")):
        add_base(base, given, f"model.{name}.", tensors)
        return copy_sharing(given, (x for x in given.parameters() if not x.requires_grad)).to("cpu")
    if given is not None:
        states = (x for key, x in tensors.items() if key.startswith(("model.", "guide.")))
        dtypes = {x.dtype for x in states if x.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return copy.deepcopy(given).to(device="cpu", dtype=dtype)
    if (reason := described.get("unknown")) is not None:
        raise LoadError(
            f"the {name} was saved without its architecture ({reason}): construct it and pass it, "
            f"load(path, {name}=...)"
        )
    return build(described["parts"], name, constants)


def _lists(shapes: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def _folder(path: str | PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise TypeError(f"path must be a str or an os.PathLike of one, got {path!r}") from error


# --- posteriors: guides, and `Chains` ---


def _record(guide: Any) -> Record:
    """Return all that `_make` needs besides tensors."""
    if _is_chains(guide):
        dtype = str(next(iter(guide.values())).dtype).removeprefix("torch.")
        values = vars(guide).items()
        numbers = {name: x for name, x in values if isinstance(x, int | float) and isfinite(x)}
        return {"name": _CHAINS, "latents": [*guide], "dtype": dtype, "numbers": numbers}
    if type(guide) is Ensemble:
        members = [_record(member) for member in guide.members]
        return {"name": "ensemble", "members": members, "calls": guide.turn % guide.size}
    name = next((name for name, cls in GUIDES.items() if cls is type(guide)), None)
    if name is None:
        names = f"one of {sorted(GUIDES)} or Chains"
        raise TypeError(f"guide must be {names}, got a {type(guide).__name__}")
    return {
        "name": name,
        "options": guide.options,
        "pruned": bool(getattr(guide, "unpruned", {})),
    }


def _make(record: Record, model: Any, state: State, prefix: str) -> Any:
    """Return a record's posterior for a model, with the tensors saved under ``prefix``."""
    if record["name"] == _CHAINS:
        return _chains(record, state.tensors, prefix)
    if record["name"] == "ensemble":
        require_form(record, _FORM_OF_ENSEMBLE, prefix)
        members = [
            _make(member, model, state, f"{prefix}member.{i}.")
            for i, member in enumerate(record["members"])
        ]
        ensemble = Ensemble(model, lambda model: members[0], 1)
        for member in members[1:]:
            ensemble.add(member)
        ensemble.turn = record["calls"]
        return ensemble
    record.pop("found", None)  # latents without declaration, in saves of before
    require_form(record, _FORM_OF_GUIDE, prefix)
    cls: Any = GUIDES[record["name"]]
    require_form(record["options"], dict.fromkeys(cls.option_names(), Any), f"{prefix}options")
    guide: Guide = cls(model, **record["options"])
    if record["pruned"]:
        guide = guide.without({})
    state.fill(guide, prefix)
    return guide


def _shapes(guide: Any) -> Mapping[str, Size]:
    """Return the shape of each latent of a posterior."""
    if _is_chains(guide):
        return {name: values.shape[2:] for name, values in guide.by_chain.items()}
    return dict(guide.latent_shapes())


def _add_posterior(guide: Any, state: State, prefix: str) -> None:
    """Add the tensors of a guide, or the draws, in float32 at most, and diagnostics of chains."""
    if not _is_chains(guide):
        state.add(guide, prefix)
        return
    for name, x in vars(guide).items():
        if isinstance(x, Tensor):
            state.tensors[prefix + name] = x
    for name, draws in guide.by_chain.items():
        draws = draws.float() if draws.dtype == torch.float64 else draws
        state.tensors[prefix + _DRAWS + name] = draws


def _is_chains(guide: Any) -> bool:
    """Return whether a posterior is `Chains`, whose package imports this one."""
    from pyro_bbb.mcmc import Chains

    return isinstance(guide, Chains)


def _chains(record: Record, tensors: dict[str, Tensor], prefix: str) -> Any:
    from pyro_bbb.mcmc import Chains

    require_form(record, _FORM_OF_CHAINS, prefix)
    dtype, draws = getattr(torch, record["dtype"]), prefix + _DRAWS
    by_chain = {name: tensors.pop(draws + name).to(dtype) for name in record["latents"]}
    names = [name for name in tensors if name.startswith(prefix)]
    fields: dict[str, Any] = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    chains = Chains(by_chain=by_chain, **fields, **record["numbers"])
    if wrong := [k for k, x in by_chain.items() if x.shape[:2] != chains.diverging.shape]:
        raise LoadError(f"chains must hold equally many draws of each latent, not of {wrong}")
    return chains
