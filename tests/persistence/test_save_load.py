# SPDX-License-Identifier: Apache-2.0
"""What was saved and loaded is the same model, for any network, prior, likelihood and guide."""

import json
import math
import shutil
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods, priors
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.saving import SAVED_CLASSES, attributes, saveable
from pyro_bbb.likelihoods import Gaussian
from pyro_bbb.persistence import LoadError
from tests._support.guide_names import ANY_MODEL

GOLDEN = Path(__file__).parents[1] / "saved" / "format_1"


def inputs(*shape, n=6):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


X = inputs(3)


def mlp(prior=None, outputs=2):
    return bbb.BayesianMLP([3, 4, outputs], prior=prior, activation=nn.Tanh)


def converted(prior=None, outputs=2):
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, outputs)
    return bbb.bayesianize(nn.Sequential(*layers), prior)


def disturb(model, guide):
    """Change all parameters and buffers from what a constructor makes."""
    with torch.no_grad():
        for module in (model, guide):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1 + 0.1 * torch.rand_like(tensor)).add_(0.01)
    for module in guide.modules():
        if isinstance(module, guides.Laplace):
            module.parts[0].set(scale_tril=0.1 * torch.eye(module.latent_dim))
        if isinstance(module, guides.SWAG):
            module.collect()
            ones = torch.ones(module.latent_dim, 2)
            module.parts[0].set(factor=0.1 * ones, scale=0.1 * ones[:, 0])


def trained(network, likelihood=None, guide="softplus_normal", **options):
    model = bbb.BayesianModel(network, likelihood or likelihoods.Categorical(), num_data=len(X))
    guide = guides.make(guide, model, **options)
    disturb(model, guide)
    return model, guide


def round_trip(tmp_path, model, guide, **options):
    bbb.save(tmp_path / "saved", model, guide)
    return bbb.load(tmp_path / "saved", **options)


def scores(model, guide, x, y):
    return bbb.predict(model, guide, x, num_samples=5, seed=3).log_prob(y)


def target(model, x):
    with torch.random.fork_rng(), torch.no_grad(), evaluating(model):
        y = model(x)
    return y.long() if isinstance(model.likelihood, likelihoods.Bernoulli) else y


def assert_same(pair, loaded, x=X):
    (model, guide), (new_model, new_guide) = pair, loaded
    y = target(model, x)
    assert torch.equal(scores(model, guide, x, y), scores(new_model, new_guide, x, y))
    assert type(new_guide) is type(guide)
    assert_same_state(model, new_model)
    assert_same_state(guide, new_guide)
    assert repr(model) == repr(new_model), "a prior or a layer differs"


def assert_same_state(original, new):
    before, after = original.state_dict(keep_vars=True), new.state_dict(keep_vars=True)
    assert list(before) == list(after)
    for name, value in before.items():
        assert torch.equal(value, after[name]) and value.dtype == after[name].dtype
        assert value.requires_grad == after[name].requires_grad


# --- every guide, network, prior and likelihood ---

NETWORKS = {"mlp": mlp, "converted": converted}
PRIORS = {
    "default": lambda: None,
    "Normal": lambda: dist.Normal(0.1, 1 / 3),
    "tensors": lambda: dist.Normal(torch.zeros(1), torch.full((1,), 0.3)),
    "Laplace": lambda: dist.Laplace(0.0, 0.1),
    "Cauchy": lambda: dist.Cauchy(0.0, 0.1),
    "StudentT": lambda: dist.StudentT(3.0, 0.0, 0.7),
    "mixture": lambda: bbb.ScaleMixtureNormal(0.3, 1.0, math.exp(-6)),
    "fan in": lambda: priors.FanInNormal(1.3),
    "learned mixture": lambda: priors.LearnedScaleMixture(0.4, 1.0, 0.2),
    "learned": lambda: priors.LearnedNormal(0.7),
    "hierarchical": lambda: priors.HierarchicalNormal(variance=dist.Gamma(2.0, 1.0)),
    "horseshoe": lambda: "horseshoe",
    "inverse gamma": lambda: "inverse_gamma",
    "posterior": lambda: priors.from_guide(trained(mlp())[1], default="laplace"),
    "by name": lambda: {"*bias": "laplace", "*": {"*.weight": priors.LearnedScaleMixture()}},
}


# the members share the statistics of BatchNorm, which this test does not score
@pytest.mark.filterwarnings("ignore:BatchNorm's running statistics")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("guide", sorted(ANY_MODEL))
def test_every_guide_predicts_as_before(tmp_path, guide, network):
    prior = {"*bias": "horseshoe", "*": "learned_normal"}
    pair = trained(NETWORKS[network](prior), guide=guide)
    random_state = torch.get_rng_state()
    loaded = round_trip(tmp_path, *pair)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(pair, loaded)
    assert loaded.guide.model is loaded.model


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("prior", PRIORS)
def test_every_prior_is_the_same_again(tmp_path, prior, network):
    pair = trained(NETWORKS[network](PRIORS[prior]()))
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded)
    y, log_probs = target(pair[0], X), []
    for model, guide in (pair, loaded):
        pyro.set_rng_seed(0)
        guide_trace = pyro.poutine.trace(guide).get_trace(X, y)
        replayed = pyro.poutine.replay(model.eval(), trace=guide_trace)
        log_probs.append(pyro.poutine.trace(replayed).get_trace(X, y).log_prob_sum())
    assert torch.equal(*log_probs)


@pytest.mark.parametrize(
    "likelihood",
    [
        likelihoods.Bernoulli(),
        likelihoods.Poisson(),
        likelihoods.NegativeBinomial(),
        likelihoods.NegativeBinomial.learned(torch.tensor([0.1, 0.2])),
        likelihoods.NegativeBinomial(dist.Gamma(2.0, 0.1)),
        likelihoods.HeteroscedasticGaussian(),
        Gaussian(1 / 3),
        Gaussian(torch.tensor([0.1, 0.2])),
        Gaussian.learned(torch.tensor([0.1, 0.2])),
        Gaussian(dist.HalfCauchy(0.7)),
        likelihoods.StudentT(dist.Gamma(2.0, 0.1), 0.5),
        likelihoods.StudentT(4.0, dist.LogNormal(torch.zeros(2), torch.ones(2))),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_every_likelihood_is_the_same_again(tmp_path, likelihood):
    pair = trained(mlp(), likelihood)
    assert_same(pair, round_trip(tmp_path, *pair))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: bbb.BayesianLeNet5(3), (1, 28, 28)),
        (
            lambda: PyroModule[nn.Sequential](
                bbb.BayesianConv2d(2, 3, 3, stride=2, padding=1, bias=False),
                nn.GELU("tanh"),
                PyroModule[nn.Sequential](nn.Flatten(), bbb.BayesianLinear(12, 4, bias=False)),
                PyroModule[nn.Linear](4, 2),
            ),
            (2, 4, 4),
        ),
        (
            lambda: bbb.bayesianize(
                nn.Sequential(
                    nn.Conv1d(2, 4, 3, padding="same", padding_mode="circular", bias=False),
                    nn.GroupNorm(2, 4),
                    nn.LeakyReLU(0.2),
                    nn.ConvTranspose1d(4, 3, 2, stride=2, output_padding=1),
                    nn.AdaptiveAvgPool1d(2),
                    nn.Flatten(),
                    nn.LayerNorm(6),
                    nn.Linear(6, 2),
                )
            ),
            (2, 5),
        ),
        (
            lambda: bbb.bayesianize(
                nn.Sequential(
                    nn.Conv3d(1, 2, 2, groups=1, dilation=2),
                    nn.BatchNorm3d(2, affine=False),
                    nn.MaxPool3d(2, stride=1, ceil_mode=True),
                    nn.PReLU(2, 0.1),
                    nn.Flatten(),
                    nn.Softplus(2.0),
                    nn.Linear(2, 2),
                ),
                where=nn.Linear,
            ),
            (1, 4, 4, 4),
        ),
    ],
    ids=["lenet", "nested", "1d", "3d, in part"],
)
def test_networks_of_known_layers_come_back_by_themselves(tmp_path, make, shape):
    pair = trained(make())
    assert_same(pair, round_trip(tmp_path, *pair), inputs(*shape))


def test_an_embedding_keeps_its_padding_and_its_weights_before_conversion(tmp_path):
    words = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        words[0].weight[0] = 2.0  # the row that is kept
    pair = trained(bbb.bayesianize(words))
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded, torch.tensor([[0, 1], [2, 0], [4, 3]]))
    assert_same_state(*(bbb.AutoSoftplusNormal(model) for model in (pair[0], loaded.model)))


def test_shared_parameters_are_stored_once_and_come_back_shared(tmp_path):
    prior = priors.LearnedScaleMixture()
    layers = [nn.Linear(3, 3) for _ in range(4)]
    layers[1].weight = layers[0].weight  # random
    layers[3].bias = layers[2].bias  # not
    plain = nn.Sequential(*layers, layers[0])
    pair = trained(bbb.bayesianize(plain, prior, where=["0", "2.weight"]))
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded)
    network = loaded.model.network
    assert network[4] is network[0] and network[3].bias is network[2].bias
    assert network[0].prior is network[2].prior
    assert pair[1].site_names == loaded.guide.site_names
    assert len(pair[1].site_names) == 3  # the weight of layer 1 is that of layer 0
    names = [name for name, _ in loaded.model.named_parameters()]
    assert names == [name for name, _ in pair[0].named_parameters()]
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    header = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert sum("log_sigma1" in name for name in header) == 1
    assert sum(name.startswith("model.network.3") for name in header) == 1  # its weight


def test_frozen_parameters_and_parts_in_evaluation_mode_stay_so(tmp_path):
    backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    backbone[0].requires_grad_(False)
    model, guide = trained(bbb.bayesianize(backbone, where="2"))
    model.network[1].eval()
    new, _ = round_trip(tmp_path, model, guide)
    trainable = {name for name, x in new.named_parameters() if x.requires_grad}
    assert trainable == {"network.1.weight", "network.1.bias"}
    modes = [m.training for m in new.modules()]
    assert modes == [m.training for m in model.modules()] and not all(modes)


def test_a_pruned_guide_stays_pruned(tmp_path):
    model, guide = trained(mlp())
    pruned = bbb.prune(guide, 0.6)
    new_model, new = round_trip(tmp_path, model, pruned)
    assert_same((model, pruned), (new_model, new))
    options = {"epochs": 2, "progress": False, "batch_size": 2}
    bbb.fit(new_model, new, (X, torch.arange(6) % 2), **options)
    for name, unpruned in pruned.unpruned.items():
        assert torch.equal(new.unpruned[name], unpruned) and not unpruned.all()
        assert (new.loc(name)[~unpruned] == 0).all() and (new.scale(name)[~unpruned] == 0).all()


def test_latents_without_a_declaration_are_refused_before_anything_is_written(tmp_path):
    class Scaled(PyroModule):
        def __init__(self):
            super().__init__()
            self.fc = bbb.BayesianLinear(3, 2)

        def forward(self, x):
            return pyro.sample("scale", dist.HalfCauchy(1.0)) * self.fc(x)

    model = bbb.BayesianModel(Scaled(), likelihoods.Categorical(), 20)
    guide = bbb.AutoSoftplusNormal(model)
    guide(X)
    with pytest.raises(ValueError, match="latent 'scale', .* declared as a PyroSample"):
        bbb.save(tmp_path / "saved", model, guide)
    assert not (tmp_path / "saved").exists()


# --- a new prior and a new guide ---


def test_a_new_prior_is_saved_as_its_class_says(tmp_path, monkeypatch):
    monkeypatch.setitem(SAVED_CLASSES, "Wide", None)  # removed again afterwards

    @saveable(attributes("spread"))
    class Wide(priors.Prior):
        def __init__(self, spread=2.0):
            super().__init__()
            self.spread = spread

        def forward(self, module, name, shape):
            return dist.Normal(torch.zeros(shape), self.spread).to_event(len(shape))

    monkeypatch.setitem(priors.PRIORS, "wide", Wide)
    pair = trained(mlp("wide"))
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded)
    assert type(loaded.model.network[0].prior) is Wide and loaded.model.network[0].prior.spread == 2


def test_a_new_guide_is_saved_by_its_name_and_options(tmp_path, monkeypatch):
    class Diagonal(guides.Normal):
        def __init__(self, model, *, init_loc=None, init_scale=0.1, label=None):
            super().__init__(model, init_loc=init_loc, init_scale=init_scale)
            self._label = label

    monkeypatch.setitem(guides.GUIDES, "diagonal", Diagonal)
    pair = trained(mlp(), guide="diagonal", label="x")
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded)
    assert loaded.guide.options == {"init_scale": 0.1, "label": "x"}


# --- networks of a class of one's own ---


class Own(PyroModule):
    def __init__(self, hidden=4, prior=None):
        super().__init__()
        self.first = bbb.BayesianLinear(3, hidden, prior=prior)
        self.second = nn.Linear(hidden, 2)
        self.both = [self.second.weight]  # what else refers to a parameter

    def forward(self, x):
        return self.first(x).tanh() @ self.both[0].T + self.second.bias


def test_a_network_of_ones_own_class_is_given(tmp_path):
    pair = trained(Own())
    with pytest.raises(LoadError, match=r"is a tests?.*\.Own.*load\(path, network=...\)"):
        round_trip(tmp_path, *pair)
    own = Own().double()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    loaded = bbb.load(tmp_path / "saved", network=own)
    assert_same(pair, loaded)
    assert loaded.model.network is not own
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Own(hidden=5),
            r"network.first.weight has shape \[4, 3\], .* expects \[5, 3\]: pass a network",
        ),
        (mlp(), r"random weight network.first.weight has shape \[4, 3\], .* expects none"),
        (PyroModule[nn.Sequential](Own()), "network.first.weight has shape .* expects none"),
        (Own(prior=priors.LearnedScaleMixture()), "tensor model.network.first.prior.logit is not"),
    ],
)
def test_a_network_of_another_architecture_is_refused(tmp_path, given, message):
    bbb.save(tmp_path, *trained(Own()))
    with pytest.raises(LoadError, match=message):
        bbb.load(tmp_path, network=given)


def test_a_network_that_lacks_or_ties_a_tensor_is_refused(tmp_path):
    class Square(PyroModule):
        def __init__(self, bias=True, tied=False):
            super().__init__()
            self.first = bbb.BayesianLinear(3, 3)
            self.second, self.third = nn.Linear(3, 3, bias), nn.Linear(3, 3)
            if tied:
                self.third.weight = self.second.weight

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    bbb.save(tmp_path, *trained(Square()))
    with pytest.raises(LoadError, match="expects no tensors .*'model.network.second.bias'"):
        bbb.load(tmp_path, network=Square(bias=False))
    with pytest.raises(LoadError, match="tensor model.network.third.weight is not shared"):
        bbb.load(tmp_path, network=Square(tied=True))
    pair = trained(Square(tied=True))
    bbb.save(tmp_path, *pair)
    with pytest.raises(LoadError, match="tensor model.network.third.weight is not shared"):
        bbb.load(tmp_path, network=Square())
    assert_same(pair, bbb.load(tmp_path, network=Square(tied=True)))


class Steep(nn.Tanh):
    pass


def hooked(network):
    network[0].register_forward_hook(print)


def renewed(network):
    network[4].bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]))


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lambda: mlp(lambda *_: dist.Normal(0.0, 1.0)), None, "network.fc1.prior is a .*Function"),
        (lambda: bbb.BayesianMLP([3, 4, 2], activation=Steep), None, "activation1 is a .*Steep"),
        (converted, hooked, "network.0 has hooks"),
        (converted, lambda network: setattr(network[0], "forward", abs), "network.0 .*forward"),
        (converted, lambda network: delattr(network[2], "p"), "network.2, a Dropout.* lacks"),
        (converted, renewed, "network.4"),
    ],
    ids=["callable", "subclass", "hook", "method", "attribute", "site"],
)
def test_what_the_format_has_no_words_for_is_said(tmp_path, make, change, reason):
    network = make()
    if change:
        change(network)
    model = bbb.BayesianModel(network, likelihoods.Categorical(), 20)
    bbb.save(tmp_path, model, bbb.AutoSoftplusNormal(model, init_loc=0.0))
    with pytest.raises(LoadError, match=rf"without its architecture \(.*{reason}.*network=..."):
        bbb.load(tmp_path)


def test_a_likelihood_of_ones_own_class_is_given(tmp_path):
    class Wide(Gaussian):
        def arguments(self, outputs):
            return {"loc": outputs, "scale": self.scale * torch.ones_like(outputs) + 1}

    pair = trained(mlp(), Wide.learned(0.5))
    with pytest.raises(LoadError, match=r"load\(path, likelihood=...\)"):
        round_trip(tmp_path, *pair)
    assert_same(pair, bbb.load(tmp_path / "saved", likelihood=Wide.learned(1.0)))


# --- devices, dtypes, records ---


# the members share the statistics of BatchNorm, which this test does not score
@pytest.mark.filterwarnings("ignore:BatchNorm's running statistics")
@pytest.mark.parametrize("guide", ["softplus_normal", "low_rank", "flow", "ensemble"])
def test_another_dtype(tmp_path, guide):
    pair = trained(converted({"*bias": "horseshoe", "*": "learned_normal"}), guide=guide)
    loaded = round_trip(tmp_path, *pair, dtype=torch.float64)
    floats = [x for m in loaded for x in (*m.parameters(), *m.buffers())]
    assert {x.dtype for x in floats if x.is_floating_point()} == {torch.float64}
    y = target(pair[0], X)
    assert scores(*loaded, X.double(), y).dtype == torch.float64
    bbb.fit(*loaded, (X.double(), y), epochs=1, batch_size=3, progress=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [mlp, converted])
def test_dtypes_are_kept(tmp_path, make, dtype):
    pair = trained(make("fan_in_normal"))
    for module in pair:
        module.to(dtype)
    loaded = round_trip(tmp_path, *pair)
    assert_same(pair, loaded, X.to(dtype))
    again = bbb.load(tmp_path / "saved", network=make("fan_in_normal"))
    assert_same_state(pair[0], again.model)
    for model in (pair[0], loaded.model, again.model):
        prior = model.network[0].prior.by_fan_in["3"].distribution
        assert prior.loc.dtype == prior.scale.dtype == dtype


def test_another_device(tmp_path):
    pair = trained(converted("learned_scale_mixture"))
    loaded = round_trip(tmp_path, *pair, device="meta")
    tensors = [x for m in loaded for x in m.state_dict().values()]
    assert all(x.is_meta for x in tensors)
    assert all(x.is_meta for x in loaded.model.initial_locs().values())
    assert not any(x.is_meta for m in pair for x in m.state_dict().values())


def test_metadata_and_versions_come_back(tmp_path):
    metadata = {"accuracy": 0.98, "runs": [1, None, True], "note": "Grüße", "empty": {}}
    pair = trained(mlp())
    bbb.save(str(tmp_path), *pair, metadata=metadata)
    loaded = bbb.load(str(tmp_path))
    assert loaded.metadata == metadata
    assert loaded.versions["torch"] == torch.__version__
    model, guide = loaded
    assert model is loaded.model and guide is loaded.guide
    assert model.num_data == 6


def test_saving_changes_nothing(tmp_path):
    model, guide = trained(converted("learned_normal"))
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, guide)]
    random_state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    bbb.save(tmp_path, model, guide)
    for module, state in zip((model, guide), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert modes == [m.training for m in model.modules()]
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bbb.save(tmp_path, model, guide)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


# --- wrong arguments ---


class Stateful(PyroModule):
    def __init__(self):
        super().__init__()
        self.fc = bbb.BayesianLinear(3, 2)

    def get_extra_state(self):
        return {"x": 1}


def test_extra_state_that_is_no_tensor_is_refused_before_anything_is_written(tmp_path):
    model = bbb.BayesianModel(Stateful(), likelihoods.Categorical(), 20)
    with pytest.raises(TypeError, match="extra_state must be a tensor"):
        bbb.save(tmp_path / "saved", model, bbb.AutoSoftplusNormal(model))
    assert not (tmp_path / "saved").exists()


# --- saved by earlier versions ---


def test_what_the_first_format_saved_still_loads(tmp_path):
    loaded = bbb.load(GOLDEN)
    expected = torch.tensor(loaded.metadata["mean outputs"])
    x = torch.tensor(loaded.metadata["x"])
    torch.testing.assert_close(bbb.to_module(*loaded)(x), expected)
    assert isinstance(loaded.model.network[0].prior.priors[0], priors.LearnedScaleMixture)
    shutil.copytree(GOLDEN, tmp_path / "copy")
    assert_same(loaded, bbb.load(tmp_path / "copy"), inputs(2))


# --- chains ---


def sampled(dtype=torch.float32):
    torch.manual_seed(0)
    model = bbb.BayesianModel(mlp(), Gaussian(dist.HalfNormal(1.0)), num_data=6).to(dtype)
    options = {"num_chains": 3, "num_samples": 4, "warmup_steps": 5, "thin": 2, "lr": 1e-4}
    y = torch.randn(6, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    return model, bbb.run_sgmcmc(model, (X.to(dtype), y), **options, seed=0, progress=False), y


def test_chains_are_a_posterior_that_is_saved(tmp_path):
    model, chains, y = sampled()
    bbb.save(tmp_path, model, chains, metadata={"a": 1})
    loaded = bbb.load(tmp_path)
    assert loaded.metadata == {"a": 1} and repr(loaded.guide) == repr(chains)
    assert torch.equal(loaded.guide.log_density, chains.log_density)
    assert all(torch.equal(loaded.guide[name], chains[name]) for name in chains)
    for use in (
        lambda *of: bbb.predict(*of, X).components.loc,
        lambda *of: bbb.to_ensemble(*of)(X)["mean"],
        lambda *of: bbb.evaluate(*of, (X, y)).predictions["test"].mean,
        lambda *of: bbb.conformal(lambda x: bbb.predict(*of, x), (X, y), 0.5).interval(X)[0],
    ):
        assert torch.equal(use(*loaded), use(model, chains))
    for refuse, remedy in ((lambda *of: bbb.prune(of[1], 0.5), "fit"), (bbb.to_module, "ensemble")):
        with pytest.raises(TypeError, match=f"guide must .*Chains.*{remedy}"):
            refuse(*loaded)


def test_chains_are_saved_in_float32_and_loaded_in_their_type(tmp_path):
    model, chains, _ = sampled(torch.float64)
    bbb.save(tmp_path, model, chains)
    loaded = bbb.load(tmp_path)
    for name, values in loaded.guide.items():
        assert values.dtype == torch.float64
        torch.testing.assert_close(values, chains[name].float().double(), rtol=0, atol=0)
    single = bbb.load(tmp_path, dtype=torch.float32)
    assert bbb.predict(*single, X).mean.dtype == torch.float32


def test_thinned_chains_keep_their_last_draws_and_diagnostics():
    _, chains, _ = sampled()
    thin = chains.thin(7)  # of 12: two of each of the three chains
    assert torch.equal(thin.log_density, chains.log_density[:, [1, 3]])
    assert all(
        torch.equal(x, chains.by_chain[name][:, [1, 3]]) for name, x in thin.by_chain.items()
    )
    assert torch.equal(chains.thin(1).log_density, chains.log_density[:, [3]])
    assert torch.equal(thin.num_gradients, 2 * chains.num_gradients[:, :2])
