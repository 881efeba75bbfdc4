"""`save` and `load`: a model and its guide as a folder of two files.

``tensors-<hash>.safetensors`` holds parameters and buffers; ``spec.json`` says of what network,
priors, likelihood and guide they are, by names from fixed tables. Loading runs nothing from either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_device
from pyro_bbb._version import __version__
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence._architecture import build, describe
from pyro_bbb.persistence._guides import latent_shapes, make, record
from pyro_bbb.persistence._schema import about, require_json, require_same, require_types
from pyro_bbb.persistence.archive import Json, LoadError, read, write
from pyro_bbb.persistence.json_codec import CannotDescribe
from pyro_bbb.persistence.state_dict import State

_INITIAL = "initial."  # names of the values that converted weights had


@dataclass(frozen=True)
class Loaded:
    """What `load` returns; ``model, guide = load(path)`` takes the two apart.

    Args:
        model: the model.
        guide: its guide.
        metadata: what `save` was given.
        versions: those of pyro_bbb, pyro and torch that saved it.
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
    """Saves a model and its guide; a save that is there already is replaced as a whole.

    At any moment, also if the process is killed, the folder holds the old save or the new one.
    Networks made of the layers here and torch's, converted ones too, are saved with their
    architecture. Of others, such as those of a class of your own or with a callable prior, the
    tensors are, and `load` has to be given the network.

    Args:
        path: the folder, which is made if need be.
        model: the model; it stays as it is.
        guide: one of `guides.GUIDES` for that model, trained, pruned or fresh.
        metadata: whatever is to be kept with them, of JSON's types: `History.as_dict`, scores.

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
    require_json("metadata", metadata)
    sites = _lists(model.latent_shapes())
    guide_record = record(guide, set(sites))
    latents = {name: list(shape) for name, shape in latent_shapes(guide).items()}
    if wrong := [name for name, shape in sites.items() if latents.get(name) != shape]:
        raise ValueError(f"guide must have the model's latents, it differs in {wrong}")

    initial = {_INITIAL + name: value for name, value in model.initial_locs().items()}
    state = State(initial)
    parts = {
        name: _describe(part, name, state.tensors)
        for name, part in (("network", model.network), ("likelihood", model.likelihood))
    }
    state.add(model, "model.")
    state.add(guide, "guide.")
    spec = {
        "versions": {
            "pyro_bbb": __version__,
            "pyro": pyro.__version__,
            "torch": str(torch.__version__),
        },
        "num_data": model.num_data,
        **parts,
        "guide": guide_record,
        "sites": sites,
        "latents": latents,
        "evaluating": [name for name, part in model.named_modules() if not part.training],
        "frozen": state.frozen,
        "aliases": state.aliases,
        "metadata": metadata,
    }
    write(folder, spec, {name: _for_file(value) for name, value in state.tensors.items()})


@locked
def load(
    path: str | PathLike[str],
    *,
    network: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """Loads what `save` saved, ready to predict, to be trained on, pruned or exported.

    Nothing from the files is executed.

    Args:
        path: the folder.
        network: a network of the architecture that was saved, as one gives it to `BayesianModel`,
            where that was of a class of your own. It stays as it is; its priors are those of the
            loaded model.
        likelihood: likewise.
        device: where to; by default the CPU.
        dtype: float type of all parameters; by default as saved.

    Returns:
        Model and guide, and what was saved with them.

    Raises:
        FileNotFoundError: there is nothing saved at that path.
        LoadError: a file is damaged, of a newer format, or does not fit the network.
        TypeError: an argument is of another kind.
        ValueError: the device is not there.
    """
    target = as_device("cpu" if device is None else device)
    if not (dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    for name, given, kind in (
        ("network", network, PyroModule),
        ("likelihood", likelihood, Likelihood),
    ):
        if not (given is None or isinstance(given, kind)):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(given).__name__}")
    spec, tensors = read(_folder(path))
    with torch.random.fork_rng(devices=[]), about(path, spec.get("versions")):
        require_types(spec)
        loaded = _load(tensors, {"network": network, "likelihood": likelihood}, **spec)
    for part in (loaded.model, loaded.guide):
        part.to(device=target, dtype=dtype)
    _move_initial(loaded.model, target, dtype)
    return loaded


def _load(
    tensors: dict[str, Tensor],
    given: dict[str, Any],
    *,
    versions: dict[str, str],
    num_data: int,
    network: Json,
    likelihood: Json,
    guide: Json,
    sites: dict[str, list[int]],
    latents: dict[str, list[int]],
    evaluating: list[str],
    frozen: list[str],
    aliases: dict[str, str],
    metadata: dict[str, Json],
) -> Loaded:
    """Model and guide on the CPU, in the dtype that they had."""
    described = {"network": network, "likelihood": likelihood}
    parts = {name: _part(name, given[name], described[name], tensors) for name in described}
    model = BayesianModel(num_data=num_data, **parts)
    require_same("random weight", sites, _lists(model.latent_shapes()))
    _set_initial(model, _take(tensors, _INITIAL))
    state = State(tensors, aliases, frozen)
    state.fill(model, "model.")
    for name, part in model.named_modules():
        part.training = name not in evaluating
    new_guide = make(guide, model, state.fill, "guide.")
    require_same("latent", latents, _lists(latent_shapes(new_guide)))
    if tensors:
        raise LoadError(f"the network expects no tensors {sorted(tensors)}")
    return Loaded(model, new_guide, metadata, versions)


# --- networks and likelihoods ---


def _describe(part: nn.Module, name: str, tensors: dict[str, Tensor]) -> Json:
    try:
        return {"parts": describe(part, name, tensors)}
    except CannotDescribe as error:
        return {"unknown": str(error)}


def _part(name: str, given: Any, described: Json, tensors: dict[str, Tensor]) -> Any:
    """The network or the likelihood: a copy of what was given, or from its description."""
    constants = _take(tensors, f"constants.{name}.", keep_prefix=True)
    if given is not None:
        return copy.deepcopy(given).to(device="cpu", dtype=_common_dtype(tensors))
    if (reason := described.get("unknown")) is not None:
        raise LoadError(
            f"the {name} was saved without its architecture ({reason}): construct it as it was and "
            f"give it, load(path, {name}=...)"
        )
    return build(described["parts"], name, constants)


def _set_initial(model: BayesianModel, values: dict[str, Tensor]) -> None:
    """The values that converted weights had; they are no part of torch's state."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        initial = getattr(model.get_submodule(path), "_pyro_bbb_initial", None)
        if initial is None:
            raise LoadError(f"{path} was made by bayesianize, which the network given was not")
        initial[leaf] = value


def _move_initial(model: BayesianModel, device: torch.device, dtype: torch.dtype | None) -> None:
    for part in model.modules():
        initial = getattr(part, "_pyro_bbb_initial", {})
        initial.update({name: x.to(device=device, dtype=dtype) for name, x in initial.items()})


# --- tensors ---


def _for_file(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _take(
    tensors: dict[str, Tensor], prefix: str, *, keep_prefix: bool = False
) -> dict[str, Tensor]:
    """Takes out the tensors whose names begin so."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name if keep_prefix else name.removeprefix(prefix): tensors.pop(name) for name in names}


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """That of all floating parameters and buffers, if they have one in common."""
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
