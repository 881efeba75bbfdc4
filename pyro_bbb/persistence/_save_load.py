# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a model and its guide or chains as a folder of two files.

``tensors-<hash>.safetensors`` holds parameters and buffers; ``spec.json`` describes the network,
priors, likelihood and guide by registered names. Loading executes nothing from either.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError, loading, require_form
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_device, floating
from pyro_bbb._utils.version import __version__
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence._blueprint import build, describe
from pyro_bbb.persistence._guides import chains_tensors, is_chains, make, record, shapes
from pyro_bbb.persistence.adapters import WHY, add_base, copy_on_cpu, is_adapted, take_base
from pyro_bbb.persistence.archive import Json, read, write
from pyro_bbb.persistence.json_codec import CannotDescribe
from pyro_bbb.persistence.state_dict import State, cpu_copy

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

    Raises:
        TypeError: an argument is of another kind, or metadata has no form in JSON.
        ValueError: the guide is not of this model, or a number in metadata is not finite.
    """
    if type(model) is not BayesianModel:
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    folder = _folder(path)
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata must be a dict, got {metadata!r}")
    metadata = dict(metadata or {})
    _require_json("metadata", metadata)
    write(folder, *_content(model, guide, metadata))


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
    for name, given, kind in (
        ("network", network, nn.Module),
        ("likelihood", likelihood, Likelihood),
    ):
        if not (given is None or isinstance(given, kind)):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(given).__name__}")
    spec, tensors = read(_folder(path))
    with torch.random.fork_rng(devices=[]), loading(path, spec.get("versions")):
        require_form(spec, _FORM)
        loaded = _load(spec, tensors, {"network": network, "likelihood": likelihood})
    model, guide = (part.to(device=target, dtype=dtype) for part in loaded)
    for part in model.modules():
        initial = getattr(part, "_pyro_bbb_initial", {})
        initial.update({name: x.to(device=target, dtype=dtype) for name, x in initial.items()})
    return replace(loaded, model=model, guide=guide)


def _content(
    model: BayesianModel, guide: Any, metadata: dict[str, Json]
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return the description and the tensors to be written."""
    sites = _lists(model.latent_shapes())
    guide_record = record(guide, set(sites))
    latents = _lists(shapes(guide))
    if wrong := [name for name, shape in sites.items() if latents.get(name) != shape]:
        raise ValueError(f"guide must have the model's latents, it differs in {wrong}")
    state = State({_INITIAL + name: value for name, value in model.initial_locs().items()})
    adapted = is_adapted(model.network)
    network = {"unknown": WHY} if adapted else _describe(model.network, "network", state.tensors)
    likelihood = _describe(model.likelihood, "likelihood", state.tensors)
    state.add(model, "model.")
    if is_chains(guide):
        state.tensors.update(chains_tensors(guide, "guide."))
    else:
        state.add(guide, "guide.")
    if adapted:
        network["base"] = take_base(model, state)
    spec = {
        "versions": {
            "pyro_bbb": __version__,
            "pyro": pyro.__version__,
            "torch": str(torch.__version__),
        },
        "num_data": model.num_data,
        "network": network,
        "likelihood": likelihood,
        "guide": guide_record,
        "sites": sites,
        "latents": latents,
        "evaluating": [name for name, part in model.named_modules() if not part.training],
        "frozen": state.frozen,
        "aliases": state.aliases,
        "metadata": metadata,
    }
    return spec, {name: cpu_copy(value) for name, value in state.tensors.items()}


def _load(spec: dict[str, Json], tensors: dict[str, Tensor], given: dict[str, Any]) -> Loaded:
    """Build model and guide on the CPU, in their saved dtypes."""
    parts = {name: _part(name, given[name], spec[name], tensors) for name in given}
    model = BayesianModel(num_data=spec["num_data"], **parts)
    _require_same("random weight", spec["sites"], _lists(model.latent_shapes()))
    _set_initial(model, _take(tensors, _INITIAL))
    state = State(tensors, spec["aliases"], spec["frozen"])
    state.fill(model, "model.")
    for name, part in model.named_modules():
        part.training = name not in spec["evaluating"]
    guide = make(spec["guide"], model, state, "guide.")
    _require_same("latent", spec["latents"], _lists(shapes(guide)))
    if tensors:
        raise LoadError(f"the network expects no tensors {sorted(tensors)}")
    return Loaded(model, guide, spec["metadata"], spec["versions"])


def _require_same(kind: str, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Raise LoadError if shapes by name differ from the saved ones."""
    for name in saved | present:
        if name not in saved:
            raise LoadError(f"{kind} {name} is not saved, and the network expects it")
        if name not in present:
            others = list(present)
            raise LoadError(f"{kind} {name} is saved, and the network has none, only {others}")
        if saved[name] != present[name]:
            raise LoadError(
                f"{kind} {name} has shape {saved[name]}, the network expects {present[name]}"
            )


def _require_json(where: str, value: Any) -> None:
    """Raise an error that names the first value that JSON cannot express."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} must have strings as keys, got {key!r}")
            _require_json(f"{where}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _require_json(f"{where}[{i}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, got {value}")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{where} must be of JSON's types, got {type(value).__name__}")


# --- networks and likelihoods ---


def _describe(part: nn.Module, name: str, tensors: dict[str, Tensor]) -> Json:
    try:
        return {"parts": describe(part, name, tensors)}
    except CannotDescribe as error:
        return {"unknown": str(error)}


def _part(name: str, given: Any, described: Json, tensors: dict[str, Tensor]) -> Any:
    """Return network or likelihood: a copy of the given one, or built from its description."""
    constants = _take(tensors, f"constants.{name}.", keep_prefix=True)
    if given is not None and (base := described.get("base")):
        add_base(base, given, f"model.{name}.", tensors)
        return copy_on_cpu(given)
    if given is not None:
        return copy.deepcopy(given).to(device="cpu", dtype=_common_dtype(tensors))
    if (reason := described.get("unknown")) is not None:
        raise LoadError(
            f"the {name} was saved without its architecture ({reason}): construct it and pass it, "
            f"load(path, {name}=...)"
        )
    return build(described["parts"], name, constants)


def _set_initial(model: BayesianModel, values: dict[str, Tensor]) -> None:
    """Set the values of weights before conversion; they are not in torch's state dict."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        initial = getattr(model.get_submodule(path), "_pyro_bbb_initial", None)
        if initial is None:
            raise LoadError(f"network must be made by bayesianize as the saved {path} was")
        initial[leaf] = value


# --- tensors ---


def _take(
    tensors: dict[str, Tensor], prefix: str, *, keep_prefix: bool = False
) -> dict[str, Tensor]:
    """Remove and return the tensors whose names have a prefix."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name if keep_prefix else name.removeprefix(prefix): tensors.pop(name) for name in names}


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """Return the dtype of all floating parameters and buffers, if they have one."""
    states = (x for name, x in tensors.items() if name.startswith(("model.", "guide.")))
    dtypes = {x.dtype for x in states if x.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _lists(shapes: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def _folder(path: str | PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise TypeError(f"path must be a str or an os.PathLike of one, got {path!r}") from error
