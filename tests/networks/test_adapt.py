# SPDX-License-Identifier: Apache-2.0
"""Adapters: the network with W + (alpha / r) B A in place of W, for every kind of layer."""

import copy
import pickle
import warnings

import pytest
import torch
from pyro import poutine
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pyro_bbb as bbb


class Attention(nn.Module):
    """Attention of a sequence to another one, of other sizes if ``apart``."""

    def __init__(self, apart):
        super().__init__()
        sizes = {"kdim": 5, "vdim": 7} if apart else {}
        self.keys, self.values = sizes.get("kdim", 8), sizes.get("vdim", 8)
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)

    def forward(self, x):
        return self.inner(x, x[..., : self.keys], x[..., : self.values], need_weights=False)[0]


class Words(nn.Module):
    """An encoder of words, its sequences padded by 0."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        h = self.encoder(self.embedding(words), src_key_padding_mask=words == 0)
        return self.head(h.masked_fill((words == 0).unsqueeze(-1), 0).sum(1))


def transformers():
    return pytest.importorskip("transformers")


def gpt2():
    config = transformers().GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    return transformers().GPT2LMHeadModel(config)


def vit():
    config = transformers().ViTConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return transformers().ViTForImageClassification(config)


def convolution(**options):
    return nn.Conv2d(3, 4, 3, **options)


FLOATS, IMAGES = torch.randn(6, 5, 8), torch.randn(6, 3, 8, 8)
WORDS = torch.randint(1, 20, (6, 5), generator=torch.Generator().manual_seed(1))
WORDS[:, 3:] = torch.tensor([[0, 0], [0, 0], [4, 0], [5, 6], [7, 8], [9, 0]])
CASES = {
    "linear": (lambda: nn.Linear(8, 4), FLOATS),
    "linear without bias": (lambda: nn.Linear(8, 4, bias=False), FLOATS),
    "convolution": (convolution, IMAGES),
    "convolution with stride": (
        lambda: convolution(stride=2, padding=2, dilation=2, padding_mode="circular"),
        IMAGES,
    ),
    "embedding": (lambda: nn.Embedding(20, 8), WORDS),
    "embedding with padding": (lambda: nn.Embedding(20, 8, padding_idx=0), WORDS),
    "attention": (lambda: Attention(apart=False), FLOATS),
    "attention of several sizes": (lambda: Attention(apart=True), FLOATS),
    "encoder": (Words, WORDS),
    "GPT-2": (gpt2, WORDS),
    "ViT": (vit, IMAGES),
}


@pytest.fixture(params=CASES)
def case(request):
    make, x = CASES[request.param]
    torch.manual_seed(0)
    return make().eval(), x


def outputs(network, x):
    output = network(x)
    return getattr(output, "logits", output)


def with_values(module, seed=0, **options):
    """An adapted network, neither of whose factors is 0."""
    torch.manual_seed(seed)
    network = bbb.adapt(module, **{"rank": 2, "alpha": 3, **options}).eval()
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return network


def in_model(network, likelihood=None, num_data=6):
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Categorical(), num_data)
    return model, bbb.AutoSoftplusNormal(model)


def test_at_first_the_outputs_are_the_given_networks(case):
    module, x = case
    network = bbb.adapt(module, 2).eval()
    assert torch.equal(outputs(network, x), outputs(module, x))


def test_outputs_are_those_of_the_sum_of_the_weights(case):
    module, x = case
    network = with_values(module)
    model, guide = in_model(network)
    draw = {name: value[0] for name, value in guide.sample_posterior(1).items()}
    plain = bbb.to_module(model, Points(draw))
    assert [type(m) for m in plain.modules()] == [type(m) for m in module.modules()]
    expected = outputs(poutine.condition(network, draw), x)
    assert torch.allclose(outputs(plain, x), expected, atol=1e-5)
    assert not torch.allclose(outputs(module, x), expected, atol=1e-2)


class Points:
    """A posterior of one point."""

    def __init__(self, draw):
        self.draw = draw

    def median(self):
        return self.draw


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_outputs_are_those_of_peft(name):
    peft = pytest.importorskip("peft")
    make, x = CASES[name]
    torch.manual_seed(0)
    module = make().eval()
    targets = {"GPT-2": ["c_attn", "c_fc"], "ViT": ["q_proj", "v_proj", "fc1"]}[name]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the layout of GPT-2's weights
        theirs = peft.get_peft_model(copy.deepcopy(module), config).eval()
    network = bbb.adapt(module, 2, alpha=3, where=[f"*.{target}" for target in targets]).eval()
    values, draw = dict(theirs.named_parameters()), {}
    for key, value in values.items():
        if ".lora_" in key:
            nn.init.normal_(value)
            own = key.removeprefix("base_model.model.").replace(".default.weight", "")
            if own.endswith("lora_A"):
                draw[own] = value
            else:
                network.get_parameter(own).data.copy_(value)
    assert len(draw) == len(targets)
    ours = outputs(poutine.condition(network, draw), x)
    assert torch.allclose(ours, outputs(theirs, x), atol=1e-5)


def test_the_base_is_shared_and_stays():
    torch.manual_seed(0)
    module = Words()
    before = copy.deepcopy(module.state_dict())
    network = bbb.adapt(module, 2, where="encoder", trainable="head")
    for name, value in module.named_parameters():
        own = dict(network.named_parameters())[name]
        assert (own.data_ptr() == value.data_ptr()) == (not name.startswith("head"))
        assert own.requires_grad == name.startswith("head") and value.requires_grad
    model, guide = in_model(network)
    bbb.fit(model, guide, (WORDS, torch.arange(6) % 3), epochs=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not torch.equal(network.head.weight, module.head.weight)


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam", "flipout"])
@pytest.mark.parametrize("layer", [nn.Linear(8, 4), nn.Conv2d(8, 4, 1)], ids=["linear", "conv"])
def test_estimators_act_on_the_adapter(estimator, layer):
    network = with_values(layer)
    _, guide = in_model(network, bbb.likelihoods.Gaussian(), 2)
    x = torch.ones(2, 8, *[1] * (layer.weight.dim() - 2))
    with {
        "reparam": warnings.catch_warnings,
        "local_reparam": bbb.local_reparameterization,
        "flipout": bbb.flipout,
    }[estimator]():
        draw = guide(x)
        first, second = poutine.condition(network, draw)(x)
    assert torch.equal(first, second) == (estimator == "reparam")


def test_a_pattern_has_alternatives_and_kinds_select():
    module = Words()
    latents = {
        where: sorted(
            name.removesuffix(".lora_A")
            for name in in_model(bbb.adapt(module, where=where))[0].latent_shapes()
        )
        for where in ("*.linear1|head", nn.Embedding, "*.1.self_attn")
    }
    assert latents["*.linear1|head"] == [
        *(f"network.encoder.layers.{i}.linear1" for i in range(2)),
        "network.head",
    ]
    assert latents[nn.Embedding] == ["network.embedding"]
    path = "network.encoder.layers.1.self_attn"
    assert latents["*.1.self_attn"] == [f"{path}.in_proj_lora_A", f"{path}.out_proj"]


def test_composes_with_bayesianize_in_both_orders():
    module = Words()
    first = bbb.adapt(bbb.bayesianize(module, where="head"), where="*.linear1")
    second = bbb.bayesianize(bbb.adapt(module, where="*.linear1", trainable="head"), where="head")
    names = [
        *(f"network.encoder.layers.{i}.linear1.lora_A" for i in range(2)),
        *("network.head.weight", "network.head.bias"),
    ]
    for network in (first, second):
        assert list(in_model(network)[0].latent_shapes()) == names


def test_an_ensemble_starts_at_the_network_with_adapters_of_its_own():
    module = Words()
    model, _ = in_model(bbb.adapt(module, random="both"))
    guide = bbb.guides.make("ensemble", model, size=3)
    for member in guide.members:
        assert torch.equal(bbb.to_module(model, member)(WORDS), module(WORDS))
    name = "network.head.lora_A"
    values = [member.median()[name] for member in guide.members]
    assert not any(torch.equal(values[i], values[i - 1]) for i in range(3))


def test_a_prediction_runs_the_trunk_once():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    module, x = nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(4, 64)
    model, guide = in_model(bbb.adapt(module, 2, where="8"))
    with FlopCounterMode(display=False) as counted:
        bbb.predict(model, guide, x, num_samples=10)
    once, rank = 2 * 4 * 64 * 64, 2 * 4 * 64 * 2
    assert counted.get_total_flops() == 9 * once + 10 * 2 * rank


def test_copies_and_pickles():
    network = with_values(Words())
    draw = {k: v[0] for k, v in in_model(network)[1].sample_posterior(1).items()}
    expected = poutine.condition(network, draw)(WORDS)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(poutine.condition(twin, draw)(WORDS), expected)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Words(), {"where": "heads"}, "near it: \\['head'"),
        (Words(), {"where": "head|*.v_proj"}, "where='\\*.v_proj' has no layers"),
        (nn.Sequential(nn.LSTM(3, 3)), {"where": "0"}, "'0' cannot be adapted: it is a LSTM"),
        (
            nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Linear(2, 2)),
            {"where": ["0", "1"]},
            "'0' cannot be adapted: it is a Conv2d, not one of Linear, Conv2d \\(without groups",
        ),
        (bbb.BayesianMLP([2, 3]), {}, "module has no layers to adapt"),
        (bbb.BayesianMLP([2, 3]), {"where": "fc1"}, "'fc1' cannot be adapted: some of its weights"),
        (nn.Sequential(nn.LazyLinear(2)), {"where": "0"}, "'0' cannot be adapted: it has no shape"),
        (
            bbb.adapt(nn.Sequential(nn.Linear(2, 2))),
            {"where": "0"},
            "'0' cannot be adapted: it has an adapter already",
        ),
        (Words(), {"prior": {"encoder.*": bbb.priors.FanInNormal()}}, "prior has no pattern"),
    ],
)
def test_what_cannot_be_adapted_says_so(module, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        bbb.adapt(module, **options)


def test_gradient_checkpointing_of_hugging_faces_models():
    config = {"resid_pdrop": 0.1, "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20}
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        gpt = transformers().GPT2LMHeadModel(transformers().GPT2Config(**config))
        model, guide = in_model(bbb.adapt(gpt, 2, where="*.c_attn|*.c_fc", random="both"))
        if checkpointed:
            options = {"use_reentrant": False, "context_fn": model.checkpoint_contexts}
            model.network.activation_checkpointing_enable(options)
        objective = bbb.negative_elbo(model.train(), guide, estimator="flipout")
        torch.manual_seed(1)
        objective(WORDS[:, :-1], WORDS[:, 1:]).backward()
        gradients.append([x.grad for x in objective.parameters() if x.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
