# SPDX-License-Identifier: Apache-2.0
"""Training of small networks: whole runs over a table in memory, per step, beside NumPyro's."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import pyro_bbb as bbb
from _parts.budget import Budget
from _parts.methods import fused_adam, mlp, prepare, torchbnn_network
from _parts.timing import Comparison, Make, Methods, Take, repeated

DETERMINISTIC, HAND_WRITTEN, OURS = "deterministic", "hand-written", "pyro_bbb.fit"
EAGER, ENSEMBLE = "pyro_bbb.fit, eager", "pyro_bbb.fit, ensemble of 8"
TORCHBNN, NUMPYRO, COLD = "torchbnn", "NumPyro, without compilation", "NumPyro"
MEMBERS, NOISE = 8, 0.1


@dataclass(frozen=True)
class Run:
    """So many training steps of a ReLU network; one output is a regression, more are classes."""

    sizes: tuple[int, ...]
    rows: int
    batch: int
    steps: int

    @property
    def epochs(self) -> int:
        """Passes over the rows that make at least so many steps."""
        return max(1, self.steps // -(-self.rows // self.batch))

    @property
    def weights(self) -> int:
        """Weights and biases."""
        return sum((a + 1) * b for a, b in zip(self.sizes[:-1], self.sizes[1:], strict=True))

    @property
    def num_steps(self) -> int:
        """Steps of that many epochs."""
        return self.epochs * -(-self.rows // self.batch)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return Normal inputs, and targets ``[rows, 1]`` or labels ``[rows]``."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, self.sizes[0], generator=generator)
        if self.sizes[-1] > 1:
            return x, torch.randint(self.sizes[-1], (self.rows,), generator=generator)
        return x, torch.sin(x.sum(1, keepdim=True))

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of a minibatch, summed."""
        if self.sizes[-1] > 1:
            return F.cross_entropy(outputs, y, reduction="sum")
        return -Normal(outputs, NOISE).log_prob(y).sum()

    def batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """All minibatches of the run, shuffled anew in each epoch."""
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x)).split(self.batch):
                yield x[rows], y[rows]


class HandWritten(nn.Module):
    """Bayes by Backprop with closed formulas, standard Normal priors, as one writes it oneself."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        shapes = [s for a, b in zip(sizes[:-1], sizes[1:], strict=True) for s in ((b, a), (b,))]
        self.locs = nn.ParameterList(torch.randn(s) / s[-1] ** 0.5 for s in shapes)
        self.rhos = nn.ParameterList(torch.full(s, -5.0) for s in shapes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs by one draw of the weights, and its log q - log p."""
        weights, kl = [], x.new_zeros(())
        for loc, rho in zip(self.locs, self.rhos, strict=True):
            posterior = Normal(loc, F.softplus(rho), validate_args=False)
            w = posterior.rsample()
            kl = kl + (posterior.log_prob(w) - Normal(0.0, 1.0).log_prob(w)).sum()
            weights.append(w)
        for number in range(0, len(weights), 2):
            x = F.linear(x.relu() if number else x, weights[number], weights[number + 1])
        return x, kl


def _loop(run: Run, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Take:
    (x, y), adam = run.data(), fused_adam(network.parameters(), 1e-4)

    def train() -> None:
        for x_batch, y_batch in run.batches(x, y):
            adam.zero_grad()
            loss(x_batch, y_batch).backward()
            adam.step()

    return repeated(train)


def _deterministic(run: Run) -> Take:
    network = mlp(run.sizes)
    return _loop(run, network, lambda x, y: run.nll(network(x), y))


def _hand_written(run: Run) -> Take:
    network = HandWritten(run.sizes)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs, kl = network(x)
        return run.nll(outputs, y) + kl * (len(x) / run.rows)

    return _loop(run, network, loss)


def _torchbnn(run: Run) -> Take | str:
    def make() -> Take:
        network, kl = torchbnn_network(mlp(run.sizes))
        return _loop(run, network, lambda x, y: run.nll(network(x), y) + kl() * (len(x) / run.rows))

    return prepare("torchbnn", make)


def _fit(run: Run, engine: str = "auto", members: int = 1) -> Take:
    x, y = run.data()
    network = bbb.BayesianMLP(run.sizes, prior=dist.Normal(0.0, 1.0))
    classes, regression = bbb.likelihoods.Categorical, partial(bbb.likelihoods.Gaussian, NOISE)
    likelihood = classes() if run.sizes[-1] > 1 else regression()
    model = bbb.BayesianModel(network, likelihood, num_data=run.rows)
    guide: Any = bbb.AutoSoftplusNormal(model)
    if members > 1:
        guide = bbb.guides.make("ensemble", model, size=members, guide="softplus_normal")
    options: dict[str, Any] = {"epochs": run.epochs, "batch_size": run.batch, "lr": 1e-4}
    options |= {"lr_schedule": "constant", "progress": False, "engine": engine}

    def train() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bbb.UndertrainedWarning)
            bbb.fit(model, guide, (x, y), **options)

    return repeated(train)


def _compiled_scan(run: Run, *, cold: bool = False) -> Callable[[], None]:
    """Train by `AutoNormal` of NumPyro, all steps in one scan that is compiled before or in it."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as jax_dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x, y = (jnp.asarray(part.numpy()) for part in run.data())
    pairs = list(zip(run.sizes[:-1], run.sizes[1:], strict=True))

    def model(x: Any, y: Any) -> None:
        weight = x.shape[0] / run.rows
        for number, (n_in, n_out) in enumerate(pairs):
            with numpyro.handlers.scale(scale=weight):
                prior = jax_dist.Normal(0.0, 1.0)
                w = numpyro.sample(f"w{number}", prior.expand([n_in, n_out]).to_event(2))
                b = numpyro.sample(f"b{number}", prior.expand([n_out]).to_event(1))
            x = (jax.nn.relu(x) if number else x) @ w + b
        if run.sizes[-1] > 1:
            numpyro.sample("obs", jax_dist.Categorical(logits=x).to_event(1), obs=y)
        else:
            numpyro.sample("obs", jax_dist.Normal(x, NOISE).to_event(2), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-4), Trace_ELBO())
    full = run.rows // run.batch * run.batch if run.rows > run.batch else run.rows

    def step(state: Any, rows: Any) -> Any:
        return svi.update(state, x[rows], y[rows])

    @jax.jit
    def train(state: Any, key: Any) -> Any:
        epochs = -(-run.num_steps * run.batch // full) if full > run.batch else run.num_steps
        keys = jax.random.split(key, epochs)
        order = jax.vmap(lambda k: jax.random.permutation(k, run.rows)[:full])(keys)
        rows = order.reshape(-1, min(run.batch, run.rows))[: run.num_steps]
        return jax.lax.scan(step, state, rows)[0]

    key = jax.random.PRNGKey(0)
    state = svi.init(key, x[: run.batch], y[: run.batch])

    def repeat() -> None:
        if cold:
            jax.clear_caches()
        jax.block_until_ready(train(state, key))

    if not cold:
        repeat()
    return repeat


def _numpyro(run: Run, *, cold: bool = False) -> Take | str:
    return prepare("numpyro", lambda: repeated(_compiled_scan(run, cold=cold)))


METHODS: dict[str, Make] = {
    DETERMINISTIC: _deterministic,
    HAND_WRITTEN: _hand_written,
    OURS: _fit,
    EAGER: partial(_fit, engine="eager"),
    ENSEMBLE: partial(_fit, members=MEMBERS),
    NUMPYRO: _numpyro,
    COLD: partial(_numpyro, cold=True),
    TORCHBNN: _torchbnn,
}
OF_SIZE = " weights, batch 128"
IN_A_PICTURE = (DETERMINISTIC, HAND_WRITTEN, OURS, NUMPYRO, TORCHBNN)
STEADY = (*IN_A_PICTURE[:3], EAGER, ENSEMBLE, NUMPYRO, TORCHBNN)
ROWS = (
    ((1, 20, 20, 1), 32, 32),
    ((10, 50, 1), 400, 100),
    ((13, 50, 50, 1), 5000, 256),
    ((64, 100, 100, 1), 1347, 128),
    ((64, 100, 100, 10), 1347, 128),
)
WIDTHS = (6, 28, 95, 312, 995, 3157)  # of 10-H-H-1: from some 120 weights to ten million


def small(budget: Budget, device: str) -> Iterator[Comparison]:
    """Time runs of small networks, whole runs, and networks of growing size."""
    for threads in budget.small_threads:
        with Methods(METHODS, one_process=budget.one_process, threads=threads) as methods:

            def compared(title: str, run: Run, names: tuple[str, ...], **limits: Any) -> Comparison:
                jobs = {name: (name, run) for name in names}
                rounds, absent = methods.compare(jobs, **limits)  # noqa: B023
                return Comparison("small", title, names[0], rounds, absent)

            for sizes, rows, batch in ROWS[: budget.small_networks]:
                run = Run(sizes, rows, batch, budget.small_steps)
                title = f"{'-'.join(map(str, sizes))}, {rows} rows, batch {batch}, "
                title += f"{threads} thread{'s' * (threads > 1)}"
                yield per_step(compared(title, run, STEADY, min_rounds=budget.small_rounds), run)
            if threads > 1:
                continue
            for sizes, rows, batch in ROWS[:2]:  # with all compilation
                run = Run(sizes, rows, batch, budget.cold_steps)
                title = f"{run.steps} steps of {'-'.join(map(str, sizes))}, compilation counted"
                yield compared(title, run, (HAND_WRITTEN, OURS, COLD), min_rounds=2, warmup=0)
            for width in WIDTHS:
                if width <= budget.small_widest:
                    steps = min(budget.small_steps, max(24, 10**8 // width**2))
                    run = Run((10, width, width, 1), 1024, 128, steps)
                    title = f"{run.weights}{OF_SIZE}"
                    yield per_step(compared(title, run, IN_A_PICTURE, min_rounds=2), run)


def per_step(found: Comparison, run: Run) -> Comparison:
    """Divide the seconds of runs by their steps."""
    rounds = {
        name: [[seconds / run.num_steps for seconds in turn] for turn in turns]
        for name, turns in found.rounds.items()
    }
    return replace(found, rounds=rounds)
