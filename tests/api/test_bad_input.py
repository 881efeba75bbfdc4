# SPDX-License-Identifier: Apache-2.0
"""Bad input to every public function: that none is left out, how many cases there are, and laws.

The cases are in the tables of ``bad_input_*.py``; here hypothesis makes up further values.
"""

import importlib
import inspect
import math
import pkgutil
from fnmatch import fnmatchcase

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from tests._support.bad_input import Case, Row, cases, judge
from tests.api import bad_input_functions, bad_input_models, bad_input_results

ROWS: list[Row] = [*bad_input_models.ROWS, *bad_input_functions.ROWS, *bad_input_results.ROWS]

# Names that no table has, and why
EXEMPT = {
    "bandits.ThompsonAgent.remember": "checks nothing, as documented; observe does",
    "sklearn.*": "held to scikit-learn's own checks and conventions in test_sklearn.py",
    "data.Standardization": "is made by standardize, which checks",
    "data.Reference": "a record that reference makes",
    "data.Reference.as_draws": "a step of compare",
    "data.Reference.distance": "a number of compare",
    "apps.*": "takes words, and is tried with bad ones in tests/apps",
    "distributions.*": "made by priors and guides of checked tensors, in every step",
    "ScaleMixtureNormal.from_logit": "as documented, for checked parameters, in every step",
    "networks.Converted*": "what bayesianize makes of a module",
    "networks.mix_in": "a step of bayesianize",
    "networks.Adapted*": "what adapt makes of a layer",
    "NegativeELBO": "what negative_elbo makes",
    "guides.Guide*": "base of the guides",
    "guides.Approximated*": "a protocol",
    "guides.ClosedForm*": "a protocol",
    "guides.Collected*": "a protocol",
    "guides.collected": "asks any guide",
    "guides.LinearizationWarning": "a warning",
    "prediction.GaussianPrediction*": "a RegressionPrediction, which is tried",
    "guides.LastLayer.in_closed_form": "a step of fit",
    "guides.weighs_kl": "asks any guide",
    "guides.Ensemble.approximate": "hands on to its members",
    "guides.Ensemble.quantiles": "raises TypeError, as documented",
    "guides.Rank1Ensemble.quantiles": "raises TypeError, as documented",
    "guides.Flow.quantiles": "raises TypeError, as documented",
    "*.median": "takes the model's arguments and does not read them",
    "likelihoods.Likelihood*": "base of the likelihoods",
    "likelihoods.align": "a step of check",
    "likelihoods.*.without_ignored": "a step of the model, with its observations",
    "elbo.*": "steps of fit and negative_elbo, with their arguments",
    "*.draw": "a step of elbo.terms",
    "*.narrowed": "a step of prune",
    "*.sampler": "a step of predict",
    "*.before_epoch": "a step of fit",
    "*.output_moments": "a step of predict, with its arguments",
    "*.add_latents": "a step of a guide's first call, with a trace",
    "BayesianModel.log_prior": "a step of elbo.terms",
    "BayesianModel.log_likelihood": "a step of elbo.terms",
    "latents.*": "descriptions that guides and samplers make of a model's sites",
    "optim.make_optim": "a step of fit, with its arguments",
    "deployment.DrawnEnsemble*": "what to_ensemble makes",
    "prediction.posterior_draws": "a step of predict, with its arguments",
    "prediction.class_log_probs": "a step of predict, with the outputs of networks",
    "BayesianModel.observed": "a step of predict, with the outputs of networks",
    "ClassificationPrediction.labels": "a step of log_prob, with its arguments",
    "pruning.PrunableGuide*": "a protocol",
    "pruning.keeping": "a step of fit",
    "priors.Prior": "base of the priors",
    "priors.FunctionNormal.*": "steps of fit, with its arguments",
    "priors.FromGuide": "what from_guide makes",
    **dict.fromkeys(
        ["EpochEnd", "History*", "Chains", "persistence.Loaded", "data.UCIData"],
        "a record that the library makes",
    ),
    **dict.fromkeys(
        ["ClassificationPrediction", "RegressionPrediction"], "a record that predict makes"
    ),
    "ConformalPredictor": "a record that conformal makes",
    "Detector": "a record that ood makes",
    "Evaluation": "a record that evaluate makes",
    "Comparison": "a record that compare makes",
    "Verdict": "a record that check makes",
    "TemperatureScaled": "a record that temperature_scaling makes",
    **dict.fromkeys(["*Error"], "an exception"),
}
# Methods that Pyro, torch or this library call, with arguments of theirs
PROTOCOL = {
    *("forward", "expand", "to_event", "rsample", "sum_log_prob"),
    *("attach", "scoped", "for_weight", "arguments", "prepare"),
    *("get_posterior", "get_transform"),
}


# --- that nothing is left out ---


def public():
    """Public objects of the library, each by its first dotted name."""
    first_names = {}
    for name in bbb.__all__:
        first_names.setdefault(getattr(bbb, name), name)
    for info in pkgutil.iter_modules(bbb.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"pyro_bbb.{info.name}")
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if is_ours(value):
                first_names.setdefault(value, f"{info.name}.{name}")
    return {value: name for value, name in first_names.items() if is_ours(value)}


def is_ours(value):
    known = inspect.isclass(value) or inspect.isfunction(value)
    return known and value.__module__.startswith("pyro_bbb")


def methods(cls):
    """Public methods of a class that take arguments, those of bases in the library too."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("pyro_bbb")]
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        value = inspect.getattr_static(cls, name)
        function = getattr(value, "__func__", value)
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if len(inspect.signature(function).parameters) > (not isinstance(value, staticmethod)):
            yield name


def functions():
    """Names of all public functions, classes and methods with arguments."""
    for value, name in public().items():
        if inspect.isfunction(value):
            if inspect.signature(value).parameters:
                yield name
            continue
        if getattr(value.__init__, "__module__", "").startswith("pyro_bbb"):
            yield name
        yield from (f"{name}.{method}" for method in methods(value))


def is_exempt(name):
    method = name.rpartition(".")[2]
    return method in PROTOCOL or any(fnmatchcase(name, pattern) for pattern in EXEMPT)


def test_every_public_function_has_a_table():
    tabled = {row.of.partition(" ")[0] for row in ROWS}
    missing = [name for name in functions() if name not in tabled and not is_exempt(name)]
    assert not missing, f"no bad input is tried on {missing}"


def test_every_exemption_is_needed():
    names = [*functions(), *public().values()]
    for pattern in EXEMPT:
        assert any(fnmatchcase(name, pattern) for name in names), pattern
    methods_found = {name.rpartition(".")[2] for name in names}
    assert methods_found >= PROTOCOL


@pytest.mark.filterwarnings("ignore:x has mean")  # large inputs must work
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.of)
def test_bad_input(row):
    """All cases of a row, as one takes less time than a test's set-up."""
    wrong = []
    for case in cases(row):
        try:
            judge(case)
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"{case.words}: {error}")
    assert not wrong, f"{row.of}, {len(wrong)} cases:\n" + "\n".join(wrong)


# --- laws, on values that hypothesis makes up ---

quick = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

EXTREMES = [0.0, -0.0, 1e-45, 1e-38, 1e-8, 0.5, 1.0, 1e8, 3e38, math.inf, math.nan]
reals = st.one_of(st.floats(), st.sampled_from(EXTREMES), st.integers(-(2**70), 2**70))
few = st.integers(-(2**70), 12)  # counts large enough to be slow are no error
scraps = st.one_of(
    *(st.none(), st.booleans(), st.text(max_size=3), st.binary(max_size=3)),
    *(st.complex_numbers(), st.lists(st.integers(), max_size=2)),
    *(st.dictionaries(st.text(max_size=2), st.integers(), max_size=2), st.tuples()),
)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw, dtypes=(*FLOATS, *OTHERS), shapes=None):
    """Tensors of any dtype and of up to three dimensions, of at most 4 entries each."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3) if shapes is None else shapes)
    dtype = draw(st.sampled_from(dtypes))
    count = math.prod(shape)
    if dtype.is_floating_point or dtype.is_complex:
        number = st.one_of(st.floats(width=16), st.sampled_from(EXTREMES))
    else:
        number = st.integers(0, 3) if dtype == torch.uint8 else st.integers(-3, 5)
    values = draw(st.lists(number, min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)


def places():
    """Rows and arguments that the tables leave open for any value."""
    for row in ROWS:
        closed = {key.partition(":")[0] for key in row.skip}
        for name in row.good():
            if name != "self" and name not in closed and not row.of.startswith("plots."):
                yield row, name


PLACES = list(places())


@settings(quick, max_examples=100)
@given(st.data())
def test_any_value_in_place_of_any_argument(data):
    row, name = data.draw(st.sampled_from(PLACES))
    good = row.good()[name]
    if isinstance(good, Tensor):
        values = st.one_of(tensors(), scraps)
    elif isinstance(good, int) and not isinstance(good, bool):
        values = st.one_of(few, scraps)
    elif isinstance(good, float):
        values = st.one_of(reals, scraps)
    elif isinstance(good, str):
        values = st.one_of(scraps, few)
    else:
        return
    judge(Case(row, name, {name: data.draw(values)}, ...))


@quick
@given(reals, reals, reals, st.floats(-(2.0**50), 2.0**50, width=32))
def test_a_mixture_is_refused_or_has_a_density(pi, sigma1, sigma2, w):
    try:
        mixture = bbb.ScaleMixtureNormal(pi, sigma1, sigma2)
    except ValueError as error:
        assert any(name in str(error) for name in ("pi", "sigma1", "sigma2"))
        return
    assert 0 <= mixture.pi <= 1 and mixture.sigma1 > 0 and mixture.sigma2 > 0
    assert not mixture.log_prob(torch.tensor(w)).isnan()


LIKELIHOODS = {
    "classes": (likelihoods.Categorical(), 3),
    "yes or no": (likelihoods.Bernoulli(), 1),
    "real": (likelihoods.Gaussian(), 1),
    "real, noise": (likelihoods.HeteroscedasticGaussian(), 2),
    "counts": (likelihoods.Poisson(), 1),
    "varied counts": (likelihoods.NegativeBinomial(), 1),
    "heavy tails": (likelihoods.StudentT(3.0), 1),
}


@quick
@pytest.mark.parametrize("kind", LIKELIHOODS)
@given(y=st.one_of(tensors(), tensors(shapes=st.just([3])), tensors(shapes=st.just([3, 1]))))
def test_targets_are_refused_or_have_a_density(kind, y):
    likelihood, width = LIKELIHOODS[kind]
    outputs = torch.linspace(-1.0, 1.0, 3 * width).reshape(3, width)
    before = y.clone()
    try:
        likelihood.check(outputs, y)
    except ValueError as error:
        assert "y" in str(error)
        return
    assert y.dtype == before.dtype and torch.equal(y, before)
    rows = likelihoods.align(y, likelihood(outputs).event_shape)[:3]
    log_prob = likelihood(outputs[: len(rows)]).log_prob(likelihood.prepare(rows, outputs))
    assert not log_prob.isnan().any()
