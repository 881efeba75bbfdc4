# SPDX-License-Identifier: Apache-2.0
"""All public functions and methods, and jobs that call those which may run Pyro or draw.

A job returns the same tensors each time; where draws have no seed, their shapes.
"""

import copy
import importlib
import inspect
import pickle
import tempfile
from functools import cache, partial
from itertools import count
from pathlib import Path

import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._utils.context import seeded
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor
from tests._support.guide_names import ANY_MODEL

# without Pyro's statements: data, distributions, likelihoods, metrics, plots
PACKAGES = "bandits deployment estimators evaluation guides mcmc models networks persistence"
PACKAGES += " prediction priors pruning sklearn training"
RESULTS = "Comparison ClassificationPrediction EpochEnd Evaluation GaussianPrediction Loaded"
RESULTS += " RegressionPrediction Uncertainty Verdict"
PARTS = "Adapted BayesianConv2d BayesianLeNet5 BayesianLinear ByName Converted FanInNormal"
PARTS += " FromGuide Function HierarchicalNormal Independent KLSchedule LearnedNormal"
PARTS += " LearnedScaleMixture Prior"
NEITHER = """
    BayesianMLP.forward BayesianModel.checkpoint_contexts BayesianModel.initial_locs
    BayesianModel.log_likelihood BayesianModel.log_prior BayesianModel.latent_sites
    Guide.consecutive Guide.draw Guide.vectors
    BayesianEstimator BayesianEstimator.changed_training_options BayesianEstimator.fit
    BayesianEstimator.from_loaded BayesianEstimator.load BayesianEstimator.posterior_predictive
    BayesianEstimator.save
    BayesianClassifier.changed_training_options BayesianRegressor.changed_training_options
    ConformalPredictor.load ConformalPredictor.save TemperatureScaled.load TemperatureScaled.save
    DrawnEnsemble DrawnEnsemble.extra_repr Guide.option_names Guide.plan
    as_prior collected declare default_prior class_log_probs merge_adapters mix_in weighs_kl keeping
"""

X = torch.linspace(-1, 1, 20)[:, None]
PAIR = X, X.cos()
LABELS = (X[:, 0] > 0).long()
QUIET = {"epochs": 2, "batch_size": 8, "progress": False, "seed": 1}


def doors():
    """Names of all public functions, and of the methods of classes that are no mere results."""
    names = set()
    for package in PACKAGES.split():
        module = importlib.import_module(f"pyro_bbb.{package}")
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", 0) == module.__name__]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if inspect.isfunction(value) and not name.startswith("_"):
                names.add(name)
            if inspect.isclass(value) and name not in RESULTS.split() + PARTS.split():
                names |= methods(name, value)
    return names


def methods(name, cls):
    """The constructor and the public methods; those of all guides as a Guide's."""
    if issubclass(cls, BaseException) or getattr(cls, "_is_protocol", False):
        return set()
    name = "Guide" if issubclass(cls, bbb.guides.Guide) else name
    functions = {
        key: getattr(inspect.getattr_static(cls, key), "__func__", inspect.getattr_static(cls, key))
        for key in dir(cls)
        if not key.startswith("_")
    }
    own = (
        key
        for key, value in functions.items()
        if inspect.isfunction(value) and value.__module__.startswith("pyro_bbb")
    )
    return {name, *(f"{name}.{key}" for key in own)}


def make(likelihood=None, outputs=1, guide="softplus_normal", **options):
    """A small model and its guide, the same each time."""
    with seeded(0):
        network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, outputs))
        where = ["2"] if guide == "vbll" else None
        network = bbb.bayesianize(network, where=where)
        model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(0.3), num_data=20)
        return model, bbb.guides.make(guide, model, **options)


def trained(name):
    model, guide = make(guide=name)
    bbb.fit(model, guide, PAIR, **QUIET | ({"epochs": 9} if name == "swag" else {}))
    return model, guide


def tensors(*modules):
    return [x.detach().clone() for module in modules for x in module.state_dict().values()]


def shapes(draws):
    return [torch.tensor(draws[name].shape) for name in sorted(draws)]


def values(draws):
    return [draws[name] for name in sorted(draws)]


# --- jobs ---


def of_guide(name):
    """Jobs for the methods of a guide."""
    model, guide = trained(name)
    centred = name not in ("ensemble", "rank1_ensemble", "flow")

    def draw():
        one = copy.deepcopy(guide)(X, PAIR[1])  # some count their calls
        return shapes(guide.sample_posterior(4)) + shapes(one)

    def read():
        repr(guide), getattr(guide, "_repr_markdown_", guide.__repr__)()
        found = [torch.tensor(guide.latent_shapes()[name]) for name in guide.site_names]
        if centred:
            found += values(guide.median()) + values(guide.quantiles([0.1, 0.9]))
        return found

    def renew():
        new = make(guide=name)[1]
        copies = [copy.deepcopy(guide)]  # which no other thread uses, as pickling needs
        copies.append(pickle.loads(pickle.dumps(copies[0])))
        return [torch.tensor(len(list(new.parameters()))), *tensors(*copies)]

    return {
        f"Guide.sample_posterior Guide.forward {name}": draw,
        f"Guide.median Guide.quantiles Guide.latent_shapes {name}": read,
        f"Guide make {name}": renew,
    }


def of_particular_guides():
    guide = {name: trained(name)[1] for name in ("softplus_normal", "laplace", "swag", "flow")}
    (model, layer), rank1 = trained("vbll"), trained("rank1_ensemble")[1]
    weight = guide["softplus_normal"].site_names[0]

    def softplus():
        q = guide["softplus_normal"]
        mask = {weight: q.loc(weight) > 0}
        q.add_latents({})
        moments = q.output_moments(q.model, X)
        drawn = shapes(q.sampler()(3))
        return [q.loc(weight), q.scale(weight), moments.mean, *drawn, *tensors(q.without(mask))]

    def laplace():
        new = copy.deepcopy(guide["laplace"])
        new.reset()
        new.approximate(PAIR)
        return tensors(new) + [new.unconstrained_normal().loc]

    def swag():
        new = copy.deepcopy(guide["swag"])
        new.collect()
        return tensors(new)

    def flow():
        q = guide["flow"]
        return [q.get_base_dist().base_dist.loc, torch.tensor(len(q.get_transform()))]

    def last_layer():
        layer.in_closed_form(model)
        with layer.observed_head():
            return values(layer.median())

    def members():
        new = copy.deepcopy(trained("ensemble")[1])
        new.add(bbb.guides.make("delta", new.model))
        return [*tensors(new), *values(rank1.member(0))]

    return {
        "Guide.loc Guide.scale Guide.without Guide.sampler Guide.output_moments "
        "Guide.add_latents": softplus,
        "Guide.approximate Guide.reset Guide.unconstrained_normal": laplace,
        "Guide.collect Guide.get_posterior": swag,
        "Guide.get_base_dist Guide.get_transform": flow,
        "Guide.in_closed_form Guide.observed_head": last_layer,
        "Guide.add Guide.member ensemble": members,
    }


def of_models(folder):
    (model, guide), normal = trained("softplus_normal"), trained("normal")[1]
    numbers = count()

    def inspect_model():
        sizes = [torch.tensor(size) for size in model.latent_shapes().values()]
        model.check(*PAIR)
        repr(model), model.draw_latents()
        arguments = model.predictive(X)
        model.observed({name: value[None] for name, value in arguments.items()})
        return sizes + [torch.tensor(x.shape) for x in (model(X), *arguments.values())]

    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def converted():
        bbb.BayesianModel(bbb.BayesianMLP([1, 3, 1]), likelihoods.Gaussian(0.3), num_data=20)
        made = bbb.bayesianize(network), bbb.adapt(network, rank=1)
        return [torch.tensor(len(list(new.parameters()))) for new in made]

    def fitted():
        new = make()
        history = bbb.fit(*new, PAIR, **QUIET)
        return [torch.tensor(history.loss), *tensors(*new)]

    def by_hand():
        new = make()
        loss = bbb.negative_elbo(*new)
        loss(*PAIR).backward()
        return [torch.tensor(len(list(loss.parameters())))]

    def by_pyro_alone():
        """Model and guide called by a thread that is in no function of the library."""
        return [torch.tensor(guide(X, None)[name].shape) for name in guide.site_names]

    def estimated():
        found = []
        for estimator in (bbb.flipout, bbb.local_reparameterization, bbb.sticking_the_landing):
            with estimator():
                found.append(torch.tensor(model(X, PAIR[1]).shape))
        return found

    def saved():
        path = folder / str(next(numbers))
        bbb.save(path, model, guide)
        return tensors(bbb.load(path).guide)

    def nuts():
        options = {"num_samples": 8, "warmup_steps": 8, "max_tree_depth": 3, "num_chains": 2}
        chains = bbb.run_nuts(model, PAIR, **options, seed=1, progress=False)
        chains.to_arviz(model, PAIR)
        return [x for part in (chains, chains.r_hat(), chains.ess()) for x in values(part)]

    def sgmcmc():
        options = {"num_samples": 4, "warmup_steps": 4, "batch_size": 10, "lr": 1e-4, "seed": 1}
        return values(bbb.run_sgmcmc(model, PAIR, **options, progress=False).thin(2).to("cpu"))

    def sampled():
        options = {"num_chains": 2, "max_steps": 60, "num_samples": 32, "seed": 1}
        return values(bbb.sample(model, PAIR, **options, progress=False))

    def pruned():
        return tensors(bbb.prune(guide, 0.5)) + values(bbb.signal_to_noise(guide))

    def drawn():
        return shapes(next(iter(bbb.prediction.posterior_draws(model, guide, X, 3))))

    plain = bbb.to_module(model, guide)
    return {
        "BayesianModel BayesianMLP bayesianize adapt": converted,
        "BayesianModel.check BayesianModel.draw_latents BayesianModel.extra_repr "
        "BayesianModel.forward BayesianModel.latent_shapes BayesianModel.observed "
        "BayesianModel.predictive": inspect_model,
        "fit": fitted,
        "negative_elbo NegativeELBO NegativeELBO.forward": by_hand,
        "Guide.forward": by_pyro_alone,
        "flipout local_reparameterization sticking_the_landing": estimated,
        "save load": saved,
        "run_nuts Chains Chains.to_arviz Chains.r_hat Chains.ess": nuts,
        "sample": sampled,
        "run_sgmcmc Chains.thin Chains.to": sgmcmc,
        "prune signal_to_noise": pruned,
        "from_guide": lambda: tensors(bbb.priors.from_guide(normal)),
        "to_module": lambda: tensors(bbb.to_module(model, guide)),
        "sparse_where_faster": lambda: [bbb.deployment.sparse_where_faster(plain, X)(X)],
        "posterior_draws": drawn,
    }


def of_predictions():
    model, guide = trained("softplus_normal")
    classes = make(likelihoods.Categorical(), outputs=2)
    predict_fn = partial(bbb.predict, model, guide, num_samples=5, seed=3, estimator="reparam")
    of_classes = partial(bbb.predict, *classes, num_samples=5, seed=3, estimator="reparam")
    labels = of_classes(X).label ^ (torch.arange(20) % 5 == 0)  # some are wrong
    intervals = bbb.conformal(predict_fn, PAIR)
    sets = bbb.conformal(of_classes, (X, labels), score="randomized", seed=1)
    scaled = bbb.temperature_scaling(of_classes, (X, labels))
    ensemble = bbb.to_ensemble(model, guide, num_samples=5, seed=1)
    ensemble(X)

    def predicted():
        one = bbb.predict(model, guide, X[:1], num_samples=5, seed=3)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*PAIR), 8)
        batches = bbb.predict(model, guide, loader, num_samples=5, seed=3)
        mean = bbb.predict_mean(model, guide, X)
        return [predict_fn(X).mean, one.mean, batches.std, mean.mean, of_classes(X).probs]

    def calibrated():
        bbb.conformal(of_classes, (X, labels), score="randomized")
        return [
            bbb.conformal(predict_fn, PAIR).threshold,
            *intervals.interval(X),
            sets.label_set(X, seed=2),
            torch.tensor(sets.label_set(X).shape),
        ]

    def scored():
        evaluation = bbb.evaluate(model, guide, PAIR, num_samples=5, seed=1)
        bbb.compare({"one": evaluation, "other": evaluation})
        verdict = bbb.check(model, guide, PAIR, num_samples=100, seconds=0, seed=1)
        assert [row.value for row in verdict.rows]
        return [torch.tensor(list(evaluation.scores["test"].values()))]

    def acquired():
        prediction = of_classes(X)
        batch = bbb.batch_bald(prediction, 2, seed=0)
        return [batch, bbb.diverse_bald(prediction, 2)]

    def ensembled():
        bbb.to_ensemble(model, guide, num_samples=2)
        drawn = bbb.to_ensemble(model, guide, num_samples=5, seed=1)
        return [drawn(X)["mean"], ensemble(X)["std"], ensemble.sample_means(X)]

    return {
        "predict predict_mean": predicted,
        "conformal ConformalPredictor ConformalPredictor.interval "
        "ConformalPredictor.label_set": calibrated,
        "temperature_scaling TemperatureScaled": lambda: [
            bbb.temperature_scaling(of_classes, (X, labels))(X).probs,
            scaled(X).probs,
        ],
        "evaluate compare check": scored,
        "batch_bald diverse_bald": acquired,
        "to_ensemble DrawnEnsemble.forward DrawnEnsemble.sample_means": ensembled,
    }


def of_agents():
    def acted(agent):
        """The agent's own methods, and no numbers, as its draws have no seed."""
        agent.values(X), agent.act(X)
        agent.observe(X, LABELS, X[:, 0])
        agent.learn()
        return [torch.tensor(agent.act(X).shape)]

    def thompson():
        agent = bbb.bandits.ThompsonAgent(*make(), lambda x, a: x + a, 2, memory=40, num_batches=2)
        agent.remember(X, LABELS, X[:, 0])
        return acted(agent)

    features = nn.Sequential(nn.Linear(1, 3), nn.ReLU())

    def last_layer():
        return acted(bbb.bandits.LastLayerAgent(copy.deepcopy(features), 2, 3, num_batches=2))

    def all_of(name):
        return " ".join(sorted(door for door in doors() if door.partition(".")[0] == name))

    return {all_of("ThompsonAgent"): thompson, all_of("LastLayerAgent"): last_layer}


def of_estimators(folder):
    numbers = count()
    options = {"hidden_sizes": (4,), "epochs": 2, "num_samples": 5, "random_state": 0}
    x, y, labels = X.numpy(), PAIR[1][:, 0].numpy(), LABELS.numpy()
    regressor, classifier = BayesianRegressor(**options), BayesianClassifier(**options)
    regressor.fit(x, y), classifier.fit(x, labels)

    def learned(cls, targets):
        path = folder / f"estimator{next(numbers)}"
        new = cls(**options).fit(x, targets).partial_fit(x, targets)
        new.save(path)
        return cls.load(path).predict(x)

    def asked(estimator):
        found = [estimator.predict(x), *estimator.predict_uncertainty(x), estimator.sample_y(x, 2)]
        found.append(estimator.score(x, estimator.predict(x)))
        repr(estimator.posterior_predictive(x))
        return found

    def jobs(*arrays):
        return [torch.as_tensor(array) for array in arrays]

    return {
        "BayesianRegressor BayesianRegressor.fit BayesianRegressor.partial_fit "
        "BayesianRegressor.save BayesianRegressor.load BayesianRegressor.from_loaded": lambda: jobs(
            learned(BayesianRegressor, y)
        ),
        "BayesianClassifier BayesianClassifier.fit BayesianClassifier.partial_fit "
        "BayesianClassifier.save BayesianClassifier.load BayesianClassifier.from_loaded": lambda: (
            jobs(learned(BayesianClassifier, labels))
        ),
        "BayesianRegressor.predict BayesianRegressor.predict_uncertainty "
        "BayesianRegressor.sample_y BayesianRegressor.posterior_predictive "
        "BayesianRegressor.predict_interval": lambda: jobs(
            *asked(regressor), *regressor.predict_interval(x)
        ),
        "BayesianClassifier.predict BayesianClassifier.predict_uncertainty "
        "BayesianClassifier.sample_y BayesianClassifier.posterior_predictive "
        "BayesianClassifier.predict_proba BayesianClassifier.predict_log_proba": lambda: jobs(
            *asked(classifier), classifier.predict_proba(x), classifier.predict_log_proba(x)
        ),
    }


GROUPS = {
    "models": of_models,
    "predictions": lambda folder: of_predictions(),
    "agents": lambda folder: of_agents(),
    "estimators": of_estimators,
    "particular guides": lambda folder: of_particular_guides(),
    **{name: lambda folder, name=name: of_guide(name) for name in [*ANY_MODEL, "vbll"]},
}


@cache
def jobs(group):
    """The jobs of a group, by the names of the doors that they go through."""
    return GROUPS[group](Path(tempfile.mkdtemp()))
