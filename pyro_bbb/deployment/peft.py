# SPDX-License-Identifier: Apache-2.0
r"""Adapters of the library `peft`: read as a start, written for it, made Bayesian without training.

`load` and `save` read and write the folder of `PeftModel.save_pretrained`, for which `peft` need
not be installed. `training_free` gives a trained adapter a posterior: Shi et al. (2025),
"Training-Free Bayesianization for Low-Rank Adapters of Large Language Models", arXiv:2412.05723.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyro.nn import PyroModule
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.files import as_path, loading, require_form, write_file
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, positive
from pyro_bbb.deployment._plain_modules import medians, plain_copy
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.networks import Adapted, adapt
from pyro_bbb.persistence.state import cpu_copy
from pyro_bbb.prediction import predict, predict_calibration, single_draws
from pyro_bbb.priors import PriorLike

__all__ = ["load", "save", "training_free"]

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _FACTORS = "base_model.model.", {"lora_A", "lora_B"}
# options that change the formula W + BA or the weights W, and their values that do not
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "lora_bias"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layer_replication"), (None, {})),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config"), (None,)),
    **dict.fromkeys(("kasa_config", "monteclora_config"), (None,)),
}
_LOG_STDS = -16.0, 2.0  # between which sigma is searched, base 2
_HALVINGS = 10


# --- read and write ---


@locked
def load(
    path: str | os.PathLike[str], network: nn.Module, *, prior: PriorLike | None = None
) -> PyroModule:
    """Adapt a network by an adapter that `peft` trained.

    The result is that of `adapt`, with the adapter's layers, rank, strength and B; a guide begins
    with the adapter's A as its mean. Layers trained as a whole (``modules_to_save``) are
    ``trainable``.

    Args:
        path: folder of ``adapter_config.json`` and ``adapter_model.safetensors``.
        network: the network before the adapter; not changed. ``get_peft_model`` changes the one
            that it is given: take ``peft_model.unload()``.
        prior: as for `adapt`.

    Returns:
        The network as a `PyroModule`.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: a file is damaged, or the adapter is not a LoRA of one rank and strength, or not
            of this network.
    """
    kind("network", network, nn.Module)
    folder = as_path(path)
    texts = [(folder / name).read_bytes() for name in (_CONFIG, _TENSORS)]
    with loading(folder):
        config, tensors = json.loads(texts[0]), parse(texts[1])
        require_form(config, dict, _CONFIG)
    for option, plain in _PLAIN.items():
        if (value := config.get(option, plain[0])) not in plain:
            raise ValueError(f"path must hold an adapter W + BA, got one of {option}={value!r}")
    layers = defaultdict[str, dict[str, Tensor]](dict)
    for key, value in tensors.items():
        key = re.sub(r"\.lora_(?:embedding_)?([AB])(\.weight)?$", r".lora_\1", key)
        owner, _, name = key.removeprefix(_PREFIX).rpartition(".")
        layers[owner][name] = value
    adapted = {path for path, own in layers.items() if own.keys() & _FACTORS}
    trained = layers.keys() - adapted
    if unknown := sorted(layers.keys() - dict(network.named_modules()).keys()):
        raise ValueError(f"network must have the adapter's layers, but lacks {unknown[:3]}")
    if wrong := sorted(x for x in adapted if layers[x].keys() != _FACTORS):
        raise ValueError(f"path must hold A and B of each layer and no more, see {wrong[:3]}")
    rank = count("r of the adapter", config.get("r"))
    alpha = positive("lora_alpha of the adapter", config.get("lora_alpha"))
    result = adapt(
        network,
        rank,
        where=lambda path, _: path in adapted,
        prior=prior,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        trainable=(lambda path, _: path in trained) if trained else None,
    )
    for path, own in layers.items():
        layer: Any = result.get_submodule(path)
        targets = {**layer._buffers, **layer._parameters, **layer._pyro_bbb_initial}
        for name, value in own.items():
            value = value.T if name == "lora_A" and isinstance(layer, nn.Embedding) else value
            if (shape := getattr(targets.get(name), "shape", None)) != value.shape:
                got = f"{path}.{name} of shape {list(value.shape)}"
                expected = "no such tensor" if shape is None else f"shape {list(shape)}"
                raise ValueError(f"path must fit the network, got {got}, expected {expected}")
            targets[name].data.copy_(value)
    return result


@locked
def save(
    path: str | os.PathLike[str],
    model: BayesianModel,
    guide: Any,
    *,
    num_samples: int | None = None,
    seed: int | None = None,
) -> None:
    """Write adapters as folders that `PeftModel.from_pretrained` loads.

    Layers that are ``trainable``, or random without an adapter, are written as ``modules_to_save``.

    Args:
        path: the folder. It gets the adapter of the posterior's medians; or, with ``num_samples``,
            folders ``"0"``, ``"1"``, ... of one draw each, for ``PeftModel.load_adapter``.
        model: a model of a network from `adapt` or `load`.
        guide: as for `to_module`; for draws, as for `predict`.
        num_samples: number of draws.
        seed: makes the draws a function of this number, and leaves torch's random state alone.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the network has no adapters, or some that `peft` cannot represent: of several
            ranks or strengths, in `nn.MultiheadAttention`, or inside a trained module.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    folder, network = as_path(path), model.network
    frozen = [x for x in network.parameters() if not x.requires_grad]
    if num_samples is None:
        weights = medians(model, guide, "num_samples takes draws")
        _write(folder, plain_copy(network, "network", weights, frozen))
        return
    count("num_samples", num_samples)
    with own_store(model, guide), torch.no_grad(), seeded(seed):
        nowhere = torch.zeros(1)  # autoguides do not use the inputs
        for number, draw in enumerate(single_draws(model, guide, nowhere, num_samples)):
            _write(folder / str(number), plain_copy(network, "network", draw, frozen))


def _write(folder: Path, network: nn.Module) -> None:
    """Write the adapters and trained layers of a network without Pyro."""
    tensors, adapted, trained = dict[str, Tensor](), dict[str, Any](), list[str]()
    for path, layer in network.named_modules():
        own = {name for name, x in layer.named_parameters(recurse=False) if x.requires_grad}
        in_attention = isinstance(layer, NonDynamicallyQuantizableLinear)
        if isinstance(layer, Adapted) and own <= _FACTORS and path and not in_attention:
            adapted[path] = layer
            values = _factors(layer)
        elif not own:
            continue
        elif isinstance(layer, Adapted) or not path:
            raise ValueError(f"model must have adapters that peft can represent, got {path!r}")
        else:
            trained.append(path)
            values = layer.state_dict()
        tensors |= {f"{_PREFIX}{path}.{name}": cpu_copy(x) for name, x in values.items()}
    if inside := [x for x in [*adapted, *trained] for y in trained if x.startswith(f"{y}.")]:
        raise ValueError(f"model must have no adapters in trained modules, got {inside[0]!r}")
    forms = {(layer.lora_scale, layer.lora_B.shape[1]) for layer in adapted.values()}
    if not forms:
        raise ValueError("model must have adapters, by bbb.adapt or bbb.peft.load, got none")
    if len(forms) != 1:
        raise ValueError(f"model must have adapters of one alpha / rank and rank, got {[*forms]}")
    scale, rank = forms.pop()
    of_torch = (nn.Linear, nn.Conv2d, nn.Embedding)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": getattr(getattr(network, "config", None), "name_or_path", None),
        "r": rank,
        "lora_alpha": scale * rank,
        "fan_in_fan_out": not all(isinstance(layer, of_torch) for layer in adapted.values()),
        "target_modules": "|".join(map(re.escape, adapted)),  # a pattern of whole paths
        "modules_to_save": trained or None,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _TENSORS, serialise(tensors, {"format": "pt"}))
    write_file(folder / _CONFIG, json.dumps(config, indent=2).encode())


def _factors(layer: Any) -> dict[str, Tensor]:
    """Return A and B of a layer by peft's names."""
    a, b = layer.lora_A.detach(), layer.lora_B
    if not isinstance(layer, nn.Embedding):
        return {"lora_A.weight": a, "lora_B.weight": b}
    if layer.padding_idx is not None:  # a padding row stays as it is
        a[layer.padding_idx] = 0
    return {"lora_embedding_A": a.T, "lora_embedding_B": b}


# --- a posterior without training ---


@locked
def training_free(
    model: BayesianModel,
    guide: AutoSoftplusNormal,
    data: Any,
    *,
    tolerance: float = 0.01,
    num_samples: int = 10,
    batch_size: int | None = None,
    seed: int | None = None,
) -> float:
    r"""Give trained adapters the widest isotropic posterior that keeps the loss on data.

    Shi et al. (2025), theorem 4.1: with $s = \alpha / r$ and $B = U \mathrm{diag}(d) V^\top$,

    $$s B A = s\, U \mathrm{diag}(d)\, A', \qquad
      A'_{ij} \sim N\Big((V^\top A)_{ij},\; \Big(\frac{\sigma}{s\, d_i}\Big)^2\Big),$$

    so that the columns of the weights are independent, of covariance $\sigma^2 U U^\top$ (the
    paper's $\sigma_q$ is $\sigma / s$). The result is the largest $\sigma$, one for all layers, at
    which the predictive's mean negative log-likelihood is at most ``tolerance`` above that without
    noise, by bisection of $\log_2 \sigma$ in [-16, 2] at common noise. (The paper also bounds how
    far it may fall.)

    B and the guide's means are rotated in place, which changes no output of the mean network, and
    the guide's scales of adapters are set. Other latents keep theirs. Other guides of the model
    have means for the B before, and no longer fit it: keep a ``copy.deepcopy`` of the model.

    Args:
        model: a model of a network from `load`, or from `adapt` after training, of adapters whose A
            alone is random.
        guide: an `AutoSoftplusNormal` of the model, its means the trained adapter's.
        data: inputs and targets, the paper's are training data: a pair ``(x, y)``, or a map-style
            ``Dataset`` of such pairs.
        tolerance: accepted rise of the loss, in nats per example. (The paper's is 0.3 % of the
            loss, which is next to nothing where an adapter fits the data well.)
        num_samples: draws of which a prediction is averaged.
        batch_size: as for `predict`.
        seed: makes the result a function of this number, and leaves torch's random state alone.

    Returns:
        Standard deviation $\sigma$, to 1.3 %.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the network has no adapters, untrained ones, or ones with a random B; the guide
            is pruned; the loss stays within the tolerance at every $\sigma$ (the posterior is of
            the smallest then); or a number is out of range.
    """
    kind("model", model, BayesianModel)
    kind("guide", guide, AutoSoftplusNormal)
    tolerance = positive("tolerance", tolerance)
    seed = int(torch.randint(2**62, ())) if seed is None else seed  # common noise

    def loss() -> float:
        options: dict[str, Any] = {"num_samples": num_samples, "batch_size": batch_size}
        predictive = partial(predict, model, guide, seed=seed, estimator="reparam", **options)
        prediction, y = predict_calibration(predictive, data)
        return -prediction.log_prob(y).mean().item()

    def widen(log_sigma: float) -> None:
        for rho, std in stds:
            scale = 2**log_sigma * std
            rho.copy_(scale + (-(-scale).expm1()).log())  # ln(e^scale - 1)

    if guide.unpruned:
        raise ValueError(
            "guide must not be pruned, as all of A gets noise: call training_free, then prune"
        )
    loss()  # raises errors before anything changes
    stds = [_isotropic(*factors) for factors in list(_random_a(model.network, guide))]
    low, high = _LOG_STDS
    widen(low)
    most = loss() + tolerance
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        widen(middle)
        low, high = (middle, high) if loss() <= most else (low, middle)
    if high == _LOG_STDS[1]:
        widen(_LOG_STDS[0])
        stays = f"their loss stays within tolerance={tolerance:g} up to sigma={2**low:.3g}"
        raise ValueError(f"data must need the adapters, but {stays}")
    widen(low)
    return float(2**low)


def _random_a(network: Any, guide: AutoSoftplusNormal) -> Iterator[tuple[Any, Tensor, Any, Any]]:
    """Yield each layer with adapters, with B, and the mean and rho of A."""
    layers = [(path, x) for path, x in network.named_modules() if isinstance(x, Adapted)]
    if not layers:
        raise ValueError("model must have adapters, by bbb.adapt or bbb.peft.load, got none")
    for path, layer in layers:
        for weight in layer.adapted(layer):
            prefix = f"{weight.removesuffix('weight')}lora_"
            site = ".".join(filter(None, ["network", path, f"{prefix}A"]))
            b = layer._parameters.get(f"{prefix}B")
            if b is None or site not in guide.site_names:
                raise ValueError(f"model must have adapters of random A alone, got {path!r}")
            if not b.any():
                raise ValueError(f"model must have trained adapters, got B = 0 at {path!r}")
            yield layer, b.detach(), guide.loc(site), guide._parameter("rhos", site).detach()


def _isotropic(layer: Any, b: Tensor, loc: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate B and the mean of A in place; return rho of A, and its std for sigma = 1."""
    columns = b.flatten(1).to("cpu", torch.float64)
    _, v = torch.linalg.eigh(columns.T @ columns)  # V diag(d^2) V^T
    d = (columns @ v).norm(dim=0)
    d = d.where(d > d.max() * torch.finfo(b.dtype).eps, d.max())  # any, where B has no effect
    rank_dim = loc.dim() - 1 if isinstance(layer, nn.Embedding) else 0
    for x, dim in ((b, 1), (loc, rank_dim)):
        x.copy_(torch.tensordot(v.T.to(x), x, ([1], [dim])).movedim(0, dim))  # B V, V^T A
    std = (1 / (layer.lora_scale * d)).to(rho)
    return rho, std.view(-1, *[1] * (loc.dim() - 1 - rank_dim))
