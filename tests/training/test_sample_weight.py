# SPDX-License-Identifier: Apache-2.0
"""Weights of examples: a weight of 2 is the row twice, a weight of 0 is no row."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods

N = 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
REAL = torch.stack([X.sum(1), X[:, 0] * X[:, 1]], 1)
COUNTS = torch.arange(N) % 3
REPEATS = torch.arange(N) % 3  # 0, 1, 2, 0, ...
# the initial Hessian is an estimate on a minibatch, which repeated rows change
IVON = bbb.optim.IVON(hess_init=1.0)
LIKELIHOODS = {
    "categorical": (likelihoods.Categorical, 3, COUNTS),
    "bernoulli": (likelihoods.Bernoulli, 2, (REAL > 0).float()),
    "gaussian": (lambda: likelihoods.Gaussian.learned(0.5), 2, REAL),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian, 4, REAL),
    "poisson": (likelihoods.Poisson, 1, COUNTS),
    "student t": (lambda: likelihoods.StudentT(4.0), 2, REAL),
}
CASES = [  # guide, estimator, loss, particles
    *(
        (guide, "reparam", None, 1)
        for guide in ("softplus_normal", "delta", "ensemble", "rank1_ensemble", "vbll")
    ),
    *(("softplus_normal", name, "mean_field", 1) for name in ("local_reparam", "flipout", "stl")),
    ("softplus_normal", "reparam", None, 3),
    ("ensemble", "reparam", "mean_field", 2),
]


def problem(likelihood="categorical", guide="softplus_normal", n=N, scale=1.0, **options):
    torch.manual_seed(1)
    likelihood_type, outputs, _ = LIKELIHOODS[likelihood]
    layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
    network = bbb.bayesianize(
        layers, where="2" if guide == "vbll" else None, prior=dist.Normal(0.0, scale)
    )
    model = bbb.BayesianModel(network, likelihood_type(), num_data=n)
    return model, bbb.guides.make(guide, model, **options)


def trained(x, y, *, likelihood="categorical", guide="softplus_normal", weight=None, **options):
    """Parameters, and the record, of a training on full batches."""
    make = options.pop("make", {})
    n = len(x.dataset if isinstance(x, DataLoader) else x)
    model, guide = problem(likelihood, guide, n=n, **make)
    how = {"epochs": 5, "batch_size": n, "progress": False, "seed": 0, "lr": 0.01} | options
    data = x if isinstance(x, DataLoader) else (x, y)
    history = bbb.fit(model, guide, data, sample_weight=weight, **how)
    tensors = [*guide.parameters(), *guide.buffers(), *model.parameters()]
    return tensors, history


def assert_alike(first, second, *, rtol=1e-4):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("likelihood", "guide", "estimator", "loss", "particles"),
    [(name, *CASES[0]) for name in LIKELIHOODS] + [("categorical", *case) for case in CASES[1:]],
)
def test_the_likelihood_is_the_weighted_sum_of_the_rows(
    likelihood, guide, estimator, loss, particles
):
    model, guide = problem(likelihood, guide)
    options = {"estimator": estimator, "loss": loss, "num_particles": particles}
    objective, y = bbb.negative_elbo(model, guide, **options), LIKELIHOODS[likelihood][2]
    objective(X, y)  # the first call builds the guide
    calls = getattr(guide, "turn", None)

    def nll(weight):
        torch.manual_seed(0)
        if calls is not None:
            guide.turn = calls
        if hasattr(guide, "_turn"):
            guide._turn.zero_()
        objective(X, y, sample_weight=weight)
        return objective.parts.nll

    by_row = torch.tensor([nll(row) for row in torch.eye(N)])
    assert nll(None) == pytest.approx(by_row.sum().item(), rel=1e-4)
    weight = torch.linspace(0.0, 3.0, N)
    assert nll(weight) == pytest.approx((weight * by_row).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("likelihood", "engine", "optimizer"),
    [
        *((likelihood, "eager", None) for likelihood in LIKELIHOODS),
        ("categorical", "compiled", None),
        ("gaussian", "eager", IVON),
        ("gaussian", "compiled", IVON),
    ],
)
def test_a_weight_of_two_is_the_row_twice(likelihood, engine, optimizer):
    y, options = LIKELIHOODS[likelihood][2], {"likelihood": likelihood, "engine": engine}
    options["optimizer"] = optimizer
    actual, history = trained(X, y, weight=REPEATS, **options)
    expected, record = trained(
        X.repeat_interleave(REPEATS, 0), y.repeat_interleave(REPEATS, 0), **options
    )
    assert_alike(actual, expected)
    assert history.loss == pytest.approx(record.loss, rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        {"structure": "full"},
        {"structure": "kron"},
        {"structure": "last_layer"},
        {"structure": "full", "optimize_prior": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::pyro_bbb.guides.LinearizationWarning")
def test_curvatures_are_those_of_the_repeated_rows(make):
    options = {"likelihood": "gaussian", "guide": "laplace", "make": make | {"scale": 0.05}}
    options |= {"epochs": 1, "lr": 1e-6}
    weight, y = REPEATS.double(), LIKELIHOODS["gaussian"][2]
    actual, _ = trained(X, y, weight=weight, **options)
    expected, _ = trained(
        X.repeat_interleave(REPEATS, 0), y.repeat_interleave(REPEATS, 0), **options
    )
    assert_alike(actual, expected, rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "flipout", "engine": "compiled"},
        {"guide": "swag", "epochs": 6},
        {"num_particles": 3, "accumulate": 2},
        {"epochs": 14, "kl_schedule": "blundell"},
    ],
    ids=str,
)
def test_targets_of_weight_zero_do_not_matter_in_minibatches(options):
    likelihood = {"likelihood": "gaussian"} | options
    weight, y = REPEATS.float(), LIKELIHOODS["gaussian"][2]
    altered = y + 5 * (REPEATS == 0).unsqueeze(1)
    runs = [trained(X, y, weight=weight, batch_size=10, **likelihood) for y in (y, altered)]
    assert_alike(runs[0][0], runs[1][0], rtol=0)
    losses = [(history.loss, history.baseline_per_example) for _, history in runs]
    assert losses[0] == losses[1]
    assert not torch.equal(runs[0][0][0], trained(X, y, batch_size=10, **likelihood)[0][0])


def test_a_loader_gives_weights_with_its_batches():
    y = LIKELIHOODS["gaussian"][2]
    weighted = DataLoader(TensorDataset(X, y, REPEATS), batch_size=N)
    twice = TensorDataset(X.repeat_interleave(REPEATS, 0), y.repeat_interleave(REPEATS, 0))
    actual, history = trained(weighted, None, likelihood="gaussian", weight=True)
    expected, record = trained(DataLoader(twice, batch_size=N), None, likelihood="gaussian")
    assert history.loss == pytest.approx(record.loss, rel=1e-5)
    assert_alike(actual, expected)


@pytest.mark.parametrize("sampler", ["nuts", "sghmc"])
def test_chains_are_those_of_the_repeated_rows(sampler):
    y, init = LIKELIHOODS["poisson"][2], {"num_samples": 3, "seed": 0, "progress": False}
    draws = []
    for data, weight in (
        ((X, y), REPEATS),
        ((X.repeat_interleave(REPEATS, 0), y.repeat_interleave(REPEATS, 0)), None),
    ):
        model, _ = problem("poisson")
        options = {"sample_weight": weight, "warmup_steps": 2, **init}
        if sampler == "nuts":
            chains = bbb.run_nuts(model, data, max_tree_depth=3, **options)
        else:
            chains = bbb.run_sgmcmc(model, data, sampler=sampler, lr=0.01, batch_size=N, **options)
        draws.append(list(chains.by_chain.values()))
    assert_alike(*draws, rtol=1e-3)


def test_several_inputs_have_weights():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a, b):
            return self.layer(torch.cat([a, b], 1))

    torch.manual_seed(0)
    model = bbb.BayesianModel(bbb.bayesianize(Sum()), likelihoods.Gaussian(), num_data=N)
    objective = bbb.negative_elbo(model, bbb.guides.make("delta", model))

    def loss(form):
        x = {"a": X[:, :1], "b": X[:, 1:]}
        twice = {name: column.repeat_interleave(REPEATS, 0) for name, column in x.items()}
        y = REAL.repeat_interleave(REPEATS, 0)
        weighted = objective(form(x), REAL, kl_weight=1.0, sample_weight=REPEATS)
        return weighted.item(), objective(form(twice), y, kl_weight=1.0).item()

    for form in (dict, lambda x: tuple(x.values())):
        weighted, repeated = loss(form)
        assert weighted == pytest.approx(repeated, rel=1e-5)
