# SPDX-License-Identifier: Apache-2.0
r"""Twelve small posteriors that NUTS has sampled, and the distance of other draws to them.

Weights of two samplers cannot be compared, since units may be permuted. Functions can: at a probe
input $x$ let $F_x$ be the distribution of the network's output under NUTS (for two classes, of the
probability of class 1; for counts, of the log-rate), and $G_x$ that under another method. With the
1-Wasserstein distance $W_1(G, F) = \int_0^1 |G^{-1}(u) - F^{-1}(u)|\,du$,

$$\text{function} = \frac{\sum_x W_1(G_x, F_x)}{\sum_x \text{sd}(F_x)}, \qquad
  \text{sd ratio} = \frac{\sum_x \text{sd}(G_x)}{\sum_x \text{sd}(F_x)}.$$

``draws/NAME.safetensors`` holds the draws, the numbers of a table's rows (no data but the points of
computed curves), model, diagnostics and a digest; ``experiments/references.py`` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from pyro_bbb._utils.validation import one_of, tensor
from pyro_bbb.data._tables import load_uci
from pyro_bbb.data.cache import data_folder, read

_TABLES = "diabetes breast_cancer airfoil energy yacht wine boston digits"
REFERENCES = ("sine", "gap", *_TABLES.split(), "counts", "heavy_tails")
PROBES = 32  # on the data, and as many off them
FOLDER = Path(__file__).parent / "draws"


@dataclass(frozen=True, eq=False, kw_only=True)
class Reference:
    """A data set, a model of it, and NUTS's draws of the network's function at probe inputs.

    Names and arguments of distributions are lists, such as ``["Normal", 0.0, 5.0]``; an argument
    that is a list is the distribution of a latent one. Inputs are rounded to three decimals.
    """

    name: str
    text: str  # the data, and where they end
    source: str
    sizes: list[int]  # numbers of inputs, of each hidden layer's units, of outputs
    activation: str  # of torch.nn
    prior: Any  # a list, or a dict of patterns to lists
    likelihood: Any
    x: Tensor  # float32 [n, features]
    y: Tensor  # [n, 1]
    probes: Tensor  # [probes, features]
    on_data: Tensor  # which probes are where the training data are, bool [probes]
    functions: Tensor  # float16 [draws, probes, 1], one chain after the other
    diagnostics: Mapping[str, Any] = field(repr=False)  # R-hat, ESS, floor, costs, settings

    def make_model(self) -> Any:
        """Return the `BayesianModel` that NUTS sampled."""
        import pyro.distributions as dist  # here, since data sets do not import Pyro

        import pyro_bbb as bbb

        def build(spec: Any) -> Any:
            if isinstance(spec, dict):
                return {pattern: build(prior) for pattern, prior in spec.items()}
            if not isinstance(spec, list):
                return spec
            home = next(m for m in (bbb, bbb.priors, bbb.likelihoods, dist) if hasattr(m, spec[0]))
            return getattr(home, spec[0])(*map(build, spec[1:]))

        activation = getattr(torch.nn, self.activation)
        network = bbb.BayesianMLP(self.sizes, activation=activation, prior=build(self.prior))
        return bbb.BayesianModel(network, build(self.likelihood), num_data=len(self.x))

    def compare(self, functions: Any) -> dict[str, dict[str, float]]:
        """Return distance ``function`` and ``sd_ratio`` of draws ``"on"`` and ``"off"`` the data.

        Args:
            functions: the prediction at `probes` by ``pyro_bbb.predict``; or the network's output
                there (for two classes, the probability of class 1; for counts, the log-rate),
                finite, ``[draws, probes, 1]`` or ``[draws, probes]``.
        """
        gold, draws = self.as_draws(self.functions), self.as_draws(functions)
        regions = {"on": self.on_data, "off": ~self.on_data}
        return {name: difference(draws[:, at], gold[:, at]) for name, at in regions.items()}

    def distance(self, functions: Any) -> float:
        """Return the distance off the data, ``compare(functions)["off"]["function"]``."""
        return self.compare(functions)["off"]["function"]

    def as_draws(self, functions: Any) -> Tensor:
        """Return functions, as `compare` takes them, as a checked float64 ``[draws, probes]``."""
        if hasattr(functions, "sample_probs"):
            functions = functions.sample_probs[..., 1]
        elif hasattr(functions, "sample_means"):
            functions = functions.sample_means
            functions = functions.log() if self.likelihood[0] == "Poisson" else functions
        draws = tensor("functions", functions).detach()
        if draws.is_meta or draws.is_complex():
            raise TypeError(f"functions must be a tensor of real numbers, got {draws.dtype}")
        draws = draws.cpu().double()
        draws = draws[..., 0] if draws.dim() == 3 and draws.shape[-1] == 1 else draws
        if draws.shape[1:] != (len(self.probes),) or not len(draws) or not draws.isfinite().all():
            expected = f"finite, [draws, {len(self.probes)}, 1]"
            raise ValueError(f"functions must be {expected}, got {list(draws.shape)} or NaN")
        return draws

    @property
    def digest(self) -> str:
        """SHA-256 of model, data and probes in thousandths, and draws."""
        definition = [self.sizes, self.activation, self.prior, self.likelihood]
        digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode())
        for values in (self.x, self.y, self.probes):
            digest.update(np.rint(1000 * values.double().numpy()).astype("<i4").tobytes())
        digest.update(self.functions.numpy().astype("<f2").tobytes())
        return digest.hexdigest()


def reference(name: str, *, root: str | Path | None = None) -> Reference:
    """Load a reference posterior: data, model, and NUTS's draws of the function at the probes.

    Args:
        name: one of `REFERENCES`.
        root: folder of the UCI sets, as for `load_uci`; airfoil is ``ROOT/airfoil/airfoil.csv``.

    Raises:
        FileNotFoundError: ROOT lacks the data set.
        RuntimeError: the data are not those that NUTS was given, or the file is damaged.
        ValueError: an unknown name.
    """
    path = FOLDER / f"{one_of('name', name, list(REFERENCES))}.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        record = json.loads(file.metadata()["record"])
    digest, draws = record.pop("digest"), tensors.pop("functions")
    if (loaded := with_data(name, record, tensors, draws, root)).digest != digest:
        mismatch = f"data, model and draws have the digest {loaded.digest}, expected {digest}"
        raise RuntimeError(f"{name}: {mismatch}; replace the data by the original, or {path}")
    return loaded


def with_data(name: str, record: Any, tensors: Any, draws: Tensor, root: Any = None) -> Reference:
    """Return the reference of a record, with the rows that ``tensors`` name."""
    table, fields = record["table"], {k: v for k, v in record.items() if k != "table"}
    data = tensors if table is None else _rows(table, tensors, root)
    fields |= {key: torch.as_tensor(data[key]).float() for key in ("x", "y", "probes")}
    on_data = torch.arange(2 * PROBES) < PROBES
    return Reference(name=name, on_data=on_data, functions=draws, **fields)


def difference(draws: Tensor, gold: Tensor) -> dict[str, float]:
    """Return ``function`` and ``sd_ratio`` of draws ``[S, probes]`` to those of NUTS."""
    sd, spread = gold.std(0).sum(), draws.std(0, correction=int(len(draws) > 1)).sum()
    # both quantile functions are constant between the probabilities of the two sets' steps
    u = torch.cat([torch.arange(1, len(f) + 1).double() / len(f) for f in (draws, gold)]).unique()
    length = u.diff(prepend=u.new_zeros(1))
    g, f = (v.sort(0).values[((u - length / 2) * len(v)).long()] for v in (draws, gold))
    return {"function": float(length @ (g - f).abs().sum(1) / sd), "sd_ratio": float(spread / sd)}


def read_table(table: str, root: Any = None) -> tuple[Any, Any]:
    """Return features ``[n, d]`` and targets ``[n]`` of ``"scikit-learn/..."``, ``"uci/..."``."""
    source, _, name = table.partition("/")
    if source == "uci":
        data = load_uci(name, root=root)
        return data.x.double().numpy(), data.y.double().numpy()
    if source == "airfoil":
        base, _ = data_folder(root)
        lines = read(base / "airfoil" / "airfoil.csv", base, bytes.splitlines)
        rows = np.loadtxt(lines, delimiter=",", skiprows=1)
        return rows[:, :-1], rows[:, -1]
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    if name == "digits":  # averages of 2 x 2 pixels
        x = x.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16)
    return x, {"digits": y == 8, "breast_cancer": y == 0}.get(name, y)


def _rows(table: str, tensors: Any, root: Any) -> dict[str, Any]:
    """Standardise by the training rows, and move the probes off the data by ``shift`` sd."""
    x, y = read_table(table, root)
    train, on, off, shift = (tensors[k].numpy() for k in ("train", "on", "off", "shift"))
    mean, sd = x[train].mean(0), x[train].std(0)
    if table == "scikit-learn/digits":
        mean, sd = 8.0, 4.0  # a pixel that is 0 in training has no sd
    z, y = (x - mean) / np.where(sd > 0, sd, 1.0), 1.0 * y[train].reshape(-1, 1)
    if len(np.unique(y)) > 2:
        y = (y - y.mean()) / y.std()
    probes = np.concatenate([z[on], z[off] + shift])
    return {"x": z[train].round(3), "y": y.round(3), "probes": probes.round(3)}
