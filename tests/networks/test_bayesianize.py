# SPDX-License-Identifier: Apache-2.0
"""Converted networks: the original's outputs at the original's weights, for every kind of layer."""

import copy
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.networks import bayesianize

NORMAL = dist.Normal(0.0, 1.0)


def sites(function, *args):
    """Shapes of the latents by name, in order."""
    trace = poutine.trace(function).get_trace(*args)
    return {name: tuple(site["value"].shape) for name, site in trace.iter_stochastic_nodes()}


def conditioned(network, original):
    """The network with its sites at the original's weights."""
    return poutine.condition(network, {n: p.detach() for n, p in original.named_parameters()})


def in_model(network, likelihood=None, num_data=6, **options):
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(), num_data)
    return model, bbb.AutoSoftplusNormal(model, **options)


def train(model, guide, x, y, epochs=2, **options):
    return bbb.fit(model, guide, (x, y), epochs=epochs, progress=False, **options)


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(3, 3, 2)

    def forward(self, x):
        return self.inner(x, x.square())


class Attention(nn.Module):
    """Attention of inputs to part of themselves."""

    def __init__(self, size=4, **options):
        super().__init__()
        self.size = size
        self.inner = nn.MultiheadAttention(4, 2, kdim=size, batch_first=True, **options)

    def forward(self, x):
        key = x if self.size == 4 else x[..., : self.size]
        return self.inner(x, key, x)[0]


class Listed(nn.Module):
    """Parameters in torch's parameter containers, and one of no dimension."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return sum(x * weight for weight in self.listed) + self.named["a"] * self.scalar


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0][:, -1])


class Twice(nn.Module):
    """One module in two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.body = nn.Sequential(nn.Tanh(), self.first)

    def forward(self, x):
        return self.body(self.first(x))


def encoder_layer():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def tokens():
    return torch.randint(7, (6, 5))


LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(6, 3)),
    "bilinear": (Pairs, lambda: torch.randn(6, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2, stride=2), lambda: torch.randn(6, 2, 6)),
    "conv2d": (
        lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2, padding_mode="circular"),
        lambda: torch.randn(6, 2, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: torch.randn(6, 2, 3, 3, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 2), lambda: torch.randn(6, 2, 6)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, 2), lambda: torch.randn(6, 2, 4, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: torch.randn(6, 2, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(7, 3), tokens),
    "padded": (lambda: nn.Embedding(7, 3, padding_idx=2), tokens),
    "bag": (lambda: nn.EmbeddingBag(7, 3), tokens),
    "prelu": (lambda: nn.PReLU(3), lambda: torch.randn(6, 3)),
    "listed": (Listed, lambda: torch.randn(6, 3)),
    "rnn": (lambda: First(nn.RNN(3, 4, 2, batch_first=True)), lambda: torch.randn(6, 5, 3)),
    "lstm": (
        lambda: First(nn.LSTM(3, 4, batch_first=True, bidirectional=True)),
        lambda: torch.randn(6, 5, 3),
    ),
    "gru": (
        lambda: First(nn.GRU(3, 4, bias=False, batch_first=True)),
        lambda: torch.randn(6, 5, 3),
    ),
    "cell": (lambda: First(nn.LSTMCell(3, 4)), lambda: torch.randn(6, 3)),
    "attention": (Attention, lambda: torch.randn(6, 5, 4)),
    "separate": (
        lambda: Attention(3, add_bias_kv=True),
        lambda: torch.randn(6, 5, 4),
    ),
    "encoder-layer": (encoder_layer, lambda: torch.randn(6, 5, 4)),
    "encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), lambda: torch.randn(6, 5, 4)),
    "normalised": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.ReLU()),
        lambda: torch.randn(6, 2, 5),
    ),
    "tied": (Tied, tokens),
    "twice": (Twice, lambda: torch.randn(6, 3)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def is_norm(parameter_name):
    """Whether a parameter of one of `LAYERS` is of a normalisation layer."""
    return "norm" in parameter_name or parameter_name.split(".")[0] in ("1", "2")


# --- outputs ---


@pytest.mark.parametrize("training", [True, False])
@every_layer
def test_at_the_originals_weights_it_has_the_originals_outputs(name, training):
    torch.set_default_dtype(torch.float64)
    make, inputs = LAYERS[name]
    original, x = make().train(training), inputs()
    before = copy.deepcopy(original)
    network = bayesianize(original, NORMAL)
    shapes = {n: tuple(p.shape) for n, p in original.named_parameters() if not is_norm(n)}
    assert shapes and sites(network, x) == shapes
    assert [type(m) for m in original.modules()] == [type(m) for m in before.modules()]
    assert isinstance(network, PyroModule) and isinstance(network, type(original))
    with torch.set_grad_enabled(training):  # without, attention takes its fast path
        torch.testing.assert_close(
            conditioned(network, original)(x), original(x), rtol=0, atol=1e-12
        )
        assert not torch.equal(network(x), network(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_masked_padding():
    original, x = nn.TransformerEncoder(encoder_layer(), 2).eval(), torch.randn(3, 5, 4)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    network = bayesianize(original, NORMAL).eval()
    with torch.no_grad():  # the path of nested tensors
        expected = original(x, src_key_padding_mask=mask)
        actual = conditioned(network, original)(x, src_key_padding_mask=mask)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", ["embed", "encoder"])
def test_the_fast_path_never_meets_stale_weights(part):
    network = bayesianize(nn.ModuleDict({"encoder": encoder_layer(), "embed": nn.Embedding(7, 4)}))
    module, x = network[part].eval(), tokens() if part == "embed" else torch.randn(6, 5, 4)
    with torch.no_grad():
        before = module(x)
        draws = {n: torch.randn(shape) for n, shape in sites(module, x).items()}
        twice = [poutine.condition(module, draws)(x) for _ in range(2)]
    assert torch.equal(*twice) and not torch.equal(before, twice[0])


# --- recurrent layers ---


def unrolled(draws, x):
    """An LSTM by its equations, one set of weights for all steps (torch's order i, f, g, o)."""
    h = c = torch.zeros(len(x), 4)
    for step in x.unbind(1):
        gates = F.linear(step, draws["weight_ih_l0"], draws["bias_ih_l0"])
        gates = gates + F.linear(h, draws["weight_hh_l0"], draws["bias_hh_l0"])
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


def test_a_recurrent_layer_has_one_draw_per_sequence_and_a_new_one_per_call():
    network, x = bayesianize(nn.LSTM(3, 4, batch_first=True), NORMAL), torch.randn(2, 7, 3)
    seen = []
    for _ in range(2):
        trace = poutine.trace(network).get_trace(x)
        draws = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}
        outputs, _ = trace.nodes["_RETURN"]["value"]
        torch.testing.assert_close(outputs[:, -1], unrolled(draws, x), rtol=1e-4, atol=1e-5)
        seen.append(draws["weight_hh_l0"])
    assert not torch.equal(*seen)


def test_recurrent_layers_move_copy_and_take_packed_sequences():
    network = copy.deepcopy(bayesianize(nn.LSTM(3, 4), NORMAL)).double()
    network.flatten_parameters()
    state = torch.get_rng_state()
    pickle.loads(pickle.dumps(network.float().double()))
    assert torch.equal(torch.get_rng_state(), state)  # none of these draws weights
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3).double() for n in (4, 2)])
    outputs, _ = network(packed)
    assert outputs.data.shape == (6, 4) and outputs.data.dtype == torch.float64


# --- tied weights ---


def test_tied_weights_are_one_site_through_copies_training_and_export():
    network = pickle.loads(pickle.dumps(copy.deepcopy(bayesianize(Tied(), NORMAL))))
    model, guide = in_model(network, bbb.likelihoods.Categorical())
    assert [n for n in guide.site_names if "rnn" not in n] == [
        "network.embed.weight",
        "network.out.bias",
    ]
    x = tokens()
    train(model, guide, x, torch.randint(7, (6,)))
    module = bbb.to_module(model, guide)
    assert module.out.weight is module.embed.weight
    expected = bbb.predict_mean(model, guide, x).probs
    torch.testing.assert_close(module(x).softmax(-1), expected)


def test_tied_weights_are_selected_by_any_of_their_places():
    for where in ("embed", "out.weight", "out"):
        selected = sites(bayesianize(Tied(), where=where), tokens())
        assert "embed.weight" in selected and "out.weight" not in selected


# --- what becomes random ---


def plain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), Head()
    )


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.gain * self.last(x)


LINEAR = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "3.last.weight", "3.last.bias"]
NORMS = ["1.weight", "1.bias", "2.1.weight", "2.1.bias"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, [*LINEAR, "3.gain"]),
        (nn.Linear, LINEAR),
        ((nn.Linear, nn.LayerNorm), [*LINEAR, "2.1.weight", "2.1.bias"]),
        (Head, ["3.gain", "3.last.weight", "3.last.bias"]),
        ("2", ["2.0.weight", "2.0.bias"]),
        ("2.*", ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]),
        ("[02]*.bias", ["0.bias", "2.0.bias", "2.1.bias"]),
        ("*", [*LINEAR, *NORMS, "3.gain"]),
        (["0", "3.gain"], ["0.weight", "0.bias", "3.gain"]),
        (["*.gain", nn.LayerNorm], ["3.gain", "2.1.weight", "2.1.bias"]),
        (lambda path, module: not isinstance(module, nn.Linear), [*NORMS, "3.gain"]),
    ],
)
def test_where_selects_by_pattern_type_or_function(where, expected):
    network = bayesianize(plain(), where=where)
    x = torch.randn(6, 3)
    assert set(sites(network, x)) == set(expected)
    left = {name for name, _ in plain().named_parameters()} - set(expected)
    assert {name for name, _ in network.named_parameters()} == left
    assert network(x).shape == (6, 2)


def test_what_is_not_selected_trains_beside_the_guide_and_is_saved_with_it():
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    for step in (
        lambda model, guide: train(model, guide, x, y, lr=0.1),
        lambda model, guide: SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step(
            x, y
        ),
    ):
        original = plain()
        model, guide = in_model(bayesianize(original, NORMAL, where="3.last"))
        assert guide.site_names == ["network.3.last.weight", "network.3.last.bias"]
        announced = poutine.trace(model.draw_latents).get_trace().param_nodes
        assert set(announced) == {name for name, _ in model.named_parameters()}
        state = model.state_dict()
        before = {name: value.clone() for name, value in state.items()}
        step(model, guide)
        for name, parameter in original.named_parameters():
            if "last" not in name:
                assert not torch.equal(state[f"network.{name}"], before[f"network.{name}"]), name
                assert torch.equal(before[f"network.{name}"], parameter)
        loaded, _ = in_model(bayesianize(plain(), NORMAL, where="3.last"))
        loaded.load_state_dict(state)
        assert torch.equal(loaded.network[0].weight, model.network[0].weight)


def test_frozen_parameters_stay_as_they_are():
    original = plain()
    original[0].requires_grad_(False)
    original[1].requires_grad_(False)
    network, x = bayesianize(original, NORMAL), torch.randn(6, 3)
    network(x)
    model, guide = in_model(network)
    assert not [name for name in guide.site_names if name.startswith(("network.0", "network.1"))]
    train(model, guide, x, torch.randn(6, 2), lr=0.1)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step(x, torch.randn(6, 2))
    for i in (0, 1):
        assert torch.equal(network[i].weight, original[i].weight)
        assert not network[i].weight.requires_grad


def test_existing_sites_are_kept():
    mixture = bbb.BayesianMLP([3, 4], prior=bbb.ScaleMixtureNormal(0.5, 1.0, 0.1))
    network = nn.Sequential(mixture, PyroModule[nn.Linear](4, 2), nn.Linear(2, 1))
    network[1].weight = PyroSample(dist.Normal(5.0, 0.1).expand([2, 4]).to_event(2))
    once = bayesianize(network, dist.Laplace(0.0, 1.0), where="1")
    again = bayesianize(once, NORMAL, where="2")
    trace, x = poutine.trace(again).get_trace(torch.randn(6, 3)), torch.randn(6, 3)
    families = {n: type(s["fn"].base_dist).__name__ for n, s in trace.iter_stochastic_nodes()}
    assert families == {
        "0.fc1.weight": "ScaleMixtureNormal",
        "0.fc1.bias": "ScaleMixtureNormal",
        "1.weight": "Normal",
        "1.bias": "Laplace",
        "2.weight": "SummedNormal",
        "2.bias": "SummedNormal",
    }
    assert trace.nodes["1.weight"]["value"].mean() > 4
    model, guide = in_model(again)
    assert torch.equal(guide.loc("network.1.bias"), network[1].bias)
    module = bbb.to_module(model, guide)
    assert [type(m) for m in module] == [nn.Sequential, nn.Linear, nn.Linear]
    torch.testing.assert_close(module(x), bbb.predict_mean(model, guide, x).mean)


class Gained(PyroModule):
    """A hand-written Pyro network with a constrained parameter."""

    def __init__(self):
        super().__init__()
        self.gain = PyroParam(torch.tensor(2.0), constraint=dist.constraints.positive)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.gain * self.last(self.first(x))


def test_learned_priors_and_pyros_parameters_are_not_made_random():
    prior, x = bbb.priors.LearnedScaleMixture(), torch.randn(6, 3)
    network = bayesianize(bayesianize(Gained(), prior, where="first"), NORMAL)
    linear = [f"{layer}.{name}" for layer in ("first", "last") for name in ("weight", "bias")]
    assert set(sites(network, x)) == set(linear)
    model, guide = in_model(network)
    train(model, guide, x, torch.randn(6, 2), lr=0.1)
    assert network.first.get_submodule("prior").logit != 0 and network.gain != 2
    assert type(bbb.to_module(model, guide).first) is nn.Linear


# --- priors, and where the guide starts ---


def test_priors_match_full_names_and_follow_dtype():
    prior = {"*.bias": dist.Normal(7.0, 1e-3), "3.*": dist.Normal(3.0, 1e-3), "*": NORMAL}
    trace = poutine.trace(bayesianize(plain().double(), prior)).get_trace(
        torch.randn(6, 3).double()
    )
    values = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}
    assert {value.dtype for value in values.values()} == {torch.float64}
    for name, centre in {"2.0.bias": 7, "3.last.bias": 7, "3.gain": 3, "3.last.weight": 3}.items():
        assert (values[name] - centre).abs().max() < 0.01
    seen = []
    bayesianize(nn.Linear(3, 2), lambda *arguments: seen.append(arguments) or NORMAL)
    assert [(type(module).plain_class, *args) for module, *args in seen] == [
        (nn.Linear, "weight", torch.Size([2, 3])),
        (nn.Linear, "bias", torch.Size([2])),
    ]


def test_pretrained_weights_are_the_start_of_the_guide():
    original = plain()
    model, guide = in_model(copy.deepcopy(bayesianize(original)))
    for name in guide.site_names:
        weight = original.get_parameter(name.removeprefix("network."))
        assert torch.equal(guide.loc(name), weight) and guide.loc(name) is not weight
        assert torch.equal(model.initial_locs()[name], weight)
    _, he = in_model(bayesianize(original), init_loc="he")
    assert he.loc("network.0.bias").eq(0).all()
    _, zero = in_model(bayesianize(original), init_loc=0.0)
    assert zero.loc("network.0.weight").eq(0).all()
    train(model, guide, torch.randn(6, 3), torch.randn(6, 2), lr=0.1)
    assert torch.equal(original[0].weight, plain()[0].weight)


def test_the_padding_row_stays_as_it_was():
    original = nn.Embedding(7, 3, padding_idx=2)
    with torch.no_grad():
        original.weight[2] = 5.0
    network = bayesianize(original, NORMAL)
    outputs = network(torch.tensor([[2, 1]]))[0]
    assert outputs[0].eq(5).all() and outputs[1].ne(original.weight[1]).all()
    model, guide = in_model(network)
    guide.loc("network.weight").normal_()
    assert bbb.to_module(model, guide).weight[2].eq(5).all()


# --- the verbs of the library ---


@pytest.mark.filterwarnings("error", "ignore:training ended at")
@pytest.mark.parametrize("name", ["conv2d", "padded", "listed", "lstm", "attention", "normalised"])
def test_fit_predict_prune_and_export(name):
    make, inputs = LAYERS[name]
    original, x = make(), inputs()
    with torch.no_grad():
        y = torch.randn_like(original(x))
    model, guide = in_model(bayesianize(original, NORMAL))
    history = train(model, guide, x, y, num_particles=3)
    assert all(math.isfinite(loss) for loss in history.loss)
    assert any(not torch.equal(guide.loc(n), model.initial_locs()[n]) for n in guide.site_names)
    prediction = bbb.predict(model, guide, x, num_samples=4, seed=0)
    again = bbb.predict(model, guide, x.repeat_interleave(20, 0), num_samples=4, seed=0)
    # few inputs in one batched pass, many draw by draw
    torch.testing.assert_close(again.mean[::20], prediction.mean, rtol=1e-4, atol=1e-5)
    assert prediction.epistemic_std.max() > 0
    for fraction in (0.0, 0.75):
        kept = bbb.prune(guide, fraction)
        module = bbb.to_module(model, kept)
        assert [name for name, _ in module.named_modules()] == [
            name for name, _ in original.named_modules()
        ]
        if fraction == 0:
            assert [type(m) for m in module.modules()] == [type(m) for m in original.modules()]
            assert (
                dict(module.named_parameters()).keys() == dict(original.named_parameters()).keys()
            )
        with torch.no_grad():
            expected = bbb.predict_mean(model, kept, x).mean
            torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["padded", "listed", "lstm", "attention", "tied", "twice"])
def test_converted_networks_copy_and_pickle(name):
    make, inputs = LAYERS[name]
    network, x = bayesianize(make(), NORMAL).eval(), inputs()
    draws = {n: torch.randn(shape) for n, shape in sites(network, x).items()}
    expected = poutine.condition(network, draws)(x)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert type(twin) is type(network)
        assert torch.equal(poutine.condition(twin, draws)(x), expected)


# --- bad input ---


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("fc", r"types: \['BatchNorm1d', 'Head', 'LayerNorm', 'Linear'\]$"),
        (["0", "0.weigth"], r"near it: \['0.weight'.*\]$"),
        (nn.Conv2d, r"types: \['BatchNorm1d', 'Head', 'LayerNorm', 'Linear'\]$"),
        (lambda path, module: False, r"types: \['BatchNorm1d', 'Head', 'LayerNorm', 'Linear'\]$"),
    ],
)
def test_a_criterion_that_selects_nothing_gets_a_hint(where, hint):
    with pytest.raises(ValueError, match=r"where=.*no trainable parameters.*" + hint):
        bayesianize(plain(), where=where)


class WithPrior(nn.Linear):
    prior = 3


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(2), "no shape yet; run the network once"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "a weight is computed"),
        (lambda: old_weight_norm(nn.Linear(3, 2)), "a weight is computed from it"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), "changes it in place"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), "complex"),
        (lambda: WithPrior(3, 2), "attribute named prior"),
        (Scaled, "put it in a module inside"),
    ],
)
def test_parameters_that_cannot_be_random_are_refused_unless_left_out(make, message):
    network = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"'0.*' cannot be random: .*{message}.*, or leave it out"):
        bayesianize(network)
    bayesianize(network, where="1")


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(layer)
    layer.weight = layer.weight.detach()  # else torch cannot copy it
    return layer


def test_scripted_modules_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="must not be scripted, got .* at '1'"):
        bayesianize(nn.Sequential(nn.Linear(3, 3), scripted))


class Headed(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("inside", [False, True])
def test_of_a_compiled_network_the_original_becomes_random(inside):
    plain = Headed(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    compiled = copy.deepcopy(plain)
    if inside:
        compiled.body = torch.compile(compiled.body, backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    model, expected = (
        bbb.BayesianModel(bbb.bayesianize(network), bbb.likelihoods.Gaussian(), num_data=5)
        for network in (compiled, plain)
    )
    assert model.latent_shapes() == expected.latent_shapes()
    x = torch.randn(5, 3)
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, (x, x[:, :1]), epochs=1, progress=False)
    assert torch.equal(compiled(x), plain(x))
    adapted = bbb.adapt(compiled, rank=1)
    assert adapted(x).shape == (5, 1)


def test_a_network_in_data_parallel_is_refused_with_the_remedy():
    wrapped = nn.DataParallel(nn.Linear(3, 1))
    for convert in (bbb.bayesianize, lambda module: bbb.adapt(module, rank=1)):
        with pytest.raises(TypeError, match=r"take its .module; got DataParallel at ''"):
            convert(wrapped)
