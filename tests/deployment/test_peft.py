# SPDX-License-Identifier: Apache-2.0
"""Adapters read from and written for the library `peft`, and a posterior without training."""

import copy
import json

import pytest
import torch
from torch import nn

import pyro_bbb as bbb

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft's, of Conv1D
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers', in peft
]
TOKENS = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(1))


class Mixed(nn.Module):
    """A network of a convolution, an embedding and linear layers, of images and words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6))
        self.picture = nn.Conv2d(1, 3, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, words):
        h = self.inner(self.words(words))
        return self.head(h.mean(1)) + self.picture(h.unsqueeze(1)).mean((2, 3))


def gpt2(kind="GPT2LMHeadModel"):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "num_labels": 3}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, **ids)
    return getattr(transformers, kind)(config).eval()


def mixed():
    torch.manual_seed(0)
    return Mixed().eval()


CASES = {  # network, layers, and options of an adapter
    "GPT-2": (gpt2, ["c_attn", "c_fc"], {}),
    "GPT-2 with embeddings": (gpt2, ["wpe", "c_attn"], {"use_rslora": True}),
    "classes": (
        lambda: gpt2("GPT2ForSequenceClassification"),
        ["c_attn"],
        {"task_type": "SEQ_CLS"},
    ),
    "mixed": (mixed, ["words", "0", "picture"], {"modules_to_save": ["head"]}),
}


@pytest.fixture(params=CASES)
def case(request):
    """A network, and a trained adapter of peft on a copy."""
    make, layers, options = CASES[request.param]
    network = make()
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=layers, **options)
    theirs = peft.get_peft_model(copy.deepcopy(network), config).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    if isinstance(network, Mixed):  # a padding row has no gradient, and stays
        theirs.base_model.model.words.lora_embedding_A["default"].data[:, 0] = 0
    return network, theirs


def outputs(network, x=TOKENS):
    output = network(x)
    return getattr(output, "logits", output).detach()


def in_model(network, **options):
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=6)
    return model, bbb.AutoSoftplusNormal(model, **options)


def of_peft(network, folder):
    return peft.PeftModel.from_pretrained(copy.deepcopy(network), folder).eval()


def loaded(theirs, network, folder):
    """Return the network with an adapter of peft, by its folder."""
    theirs.save_pretrained(folder)
    return bbb.peft.load(folder, network)


def test_an_adapter_of_peft_is_the_guides_mean(case, tmp_path):
    network, theirs = case
    before = outputs(network)
    model, guide = in_model(loaded(theirs, network, tmp_path))
    probs = bbb.predict_mean(model, guide, TOKENS).probs
    assert torch.allclose(probs, outputs(theirs).softmax(-1), atol=1e-5)
    assert torch.equal(outputs(network), before)
    assert not torch.allclose(outputs(theirs), before, atol=1e-2)


def test_peft_loads_the_mean_and_the_draws(case, tmp_path):
    network, theirs = case
    model, guide = in_model(loaded(theirs, network, tmp_path), init_rho=-1.0)
    bbb.peft.save(tmp_path / "mean", model, guide)
    mean = of_peft(network, tmp_path / "mean")
    assert torch.allclose(outputs(mean), outputs(theirs), atol=1e-5)

    draws = guide.sample_posterior(3)
    bbb.peft.save(tmp_path / "draws", model, draws, num_samples=3)
    drawn = of_peft(network, tmp_path / "draws" / "0")
    for number in ("1", "2"):
        drawn.load_adapter(tmp_path / "draws" / number, adapter_name=number)
    probs = []
    for number in ("default", "1", "2"):
        drawn.set_adapter(number)
        probs.append(outputs(drawn).softmax(-1))
    ours = bbb.predict(model, draws, TOKENS, num_samples=3)
    assert torch.allclose(torch.stack(probs), ours.sample_probs, atol=1e-5)
    assert (probs[0] - probs[1]).abs().max() > 1e-3


def test_a_random_last_layer_is_written_with_each_draw(tmp_path):
    network = mixed()
    adapted = bbb.adapt(bbb.bayesianize(network, where="head"), 2, where="inner|words")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model, guide = in_model(adapted, init_rho=-1.0)
    bbb.peft.save(tmp_path, model, guide, num_samples=2, seed=0)
    drawn = of_peft(network, tmp_path / "0")
    drawn.load_adapter(tmp_path / "1", adapter_name="1")
    ours = bbb.predict(model, guide, TOKENS, num_samples=2, seed=0).sample_probs
    assert (TOKENS == 0).any()  # a padding row stays as it is
    for name, probs in zip(("default", "1"), ours, strict=True):
        drawn.set_adapter(name)
        assert torch.allclose(outputs(drawn).softmax(-1), probs, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, r"an adapter W \+ BA, got one of peft_type='IA3'"),
        ({"bias": "all"}, "got one of bias='all'"),
        ({"use_dora": True}, "got one of use_dora=True"),
        ({"rank_pattern": {"0": 3}}, "got one of rank_pattern={'0': 3}"),
        ({"init_lora_weights": "pissa"}, "got one of init_lora_weights='pissa'"),
        ({"r": 3}, r"path must fit the network, got inner.0.lora_"),
    ],
)
def test_an_adapter_of_another_formula_is_refused(changed, message, tmp_path):
    network = mixed()
    bbb.peft.save(tmp_path, *in_model(bbb.adapt(network, 2, where="inner.0")))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        bbb.peft.load(tmp_path, network)


def test_what_peft_has_no_form_for_is_refused(tmp_path):
    attention = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    inner, out = "0.self_attn", "0.self_attn.out_proj"
    projections = [bbb.adapt(attention, 2, where=where) for where in (inner, out)]
    for network in (*projections, bbb.adapt(nn.Linear(8, 3), 2)):
        with pytest.raises(ValueError, match="adapters that peft can represent, got"):
            bbb.peft.save(tmp_path, *in_model(network))
    two_ranks = bbb.adapt(bbb.adapt(mixed(), 2, where="inner"), 3, where="head")
    with pytest.raises(ValueError, match="of one alpha / rank and rank, got"):
        bbb.peft.save(tmp_path, *in_model(two_ranks))


def test_a_pattern_matches_the_adapted_layers_alone(tmp_path):
    """Paths that end as an adapted layer's path are another layer's, here of no kind for LoRA."""
    network = nn.Sequential(nn.Linear(8, 3), nn.Sequential(nn.LayerNorm(3)))
    bbb.peft.save(tmp_path, *in_model(bbb.adapt(network, 2, where="0")))
    assert len([x for x in of_peft(network, tmp_path).modules() if hasattr(x, "lora_A")]) == 1


# --- a posterior without training ---


def matrices(layer, a):
    """Return A of a layer, or its draws, as matrices with a row for each rank."""
    return a.mT if isinstance(layer, nn.Embedding) else a.flatten(a.dim() - layer.weight.dim() + 1)


def test_training_free_has_the_mean_and_the_isotropic_covariance_of_the_weights(case, tmp_path):
    """The weights' columns are independent, of covariance sigma^2 times the projector on B."""
    network, theirs = case
    model, guide = in_model(loaded(theirs, network, tmp_path))
    before = bbb.predict_mean(model, guide, TOKENS).probs
    layers = {
        name: model.network.get_submodule(name.removeprefix("network.").rpartition(".")[0])
        for name in guide.site_names
    }
    projectors = {}
    for name, layer in layers.items():
        b = layer._parameters["lora_B"].detach().flatten(1)
        projectors[name] = b @ torch.linalg.pinv(b)
    data = (TOKENS, before.argmax(-1))
    sigma = bbb.peft.training_free(model, guide, data, num_samples=4, seed=0)
    assert torch.allclose(bbb.predict_mean(model, guide, TOKENS).probs, before, atol=1e-5)

    for name, layer in layers.items():
        b = layer.lora_scale * layer._parameters["lora_B"].detach().flatten(1)
        for variance in matrices(layer, guide.scale(name).square()).T:  # of each column
            covariance = b @ variance.diag() @ b.T
            assert torch.allclose(covariance, sigma**2 * projectors[name], atol=1e-4 * sigma**2)

    torch.manual_seed(0)
    draws = guide.sample_posterior(4000)
    name, layer = next(iter(layers.items()))
    b = layer.lora_scale * layer._parameters["lora_B"].detach().flatten(1)
    changes = (b @ matrices(layer, draws[name] - guide.loc(name)))[:, :3] / sigma
    inside = changes[..., 0].unsqueeze(-1) * changes[..., 0].unsqueeze(-2)
    across = changes[..., 0].unsqueeze(-1) * changes[..., 1].unsqueeze(-2)
    for products, known in ((inside, projectors[name][:3, :3]), (across, torch.zeros(()))):
        error = (products.mean(0) - known).abs()
        assert (error < 6 * products.std(0) / 4000**0.5).all()  # 6 standard errors


def test_training_free_takes_the_widest_posterior_within_the_tolerance():
    r"""One output of noise s: the predictive is N(m, s^2 + sigma^2 |x|^2) in closed form."""
    torch.manual_seed(0)
    adapted = bbb.adapt(nn.Sequential(nn.Linear(5, 1)), 1, alpha=2.5)
    nn.init.normal_(adapted[0].lora_B)
    model = bbb.BayesianModel(adapted, bbb.likelihoods.Gaussian(0.5), num_data=40)
    guide = bbb.AutoSoftplusNormal(model)
    x = torch.randn(40, 5)
    mean = bbb.predict_mean(model, guide, x).mean
    y = mean + 0.5 * torch.randn(40, 1)
    options = {"tolerance": 0.1, "num_samples": 4000, "seed": 0}
    sigma = bbb.peft.training_free(model, guide, (x, y), **options)

    def loss(sigma):
        scale = (0.25 + sigma**2 * x.square().sum(1, keepdim=True)).sqrt()
        return -torch.distributions.Normal(mean, scale).log_prob(y).mean().item()

    # bisected to 1.3 %; a mixture of 4,000 draws has the closed form's loss to 1 %
    assert loss(0.95 * sigma) < loss(0) + 0.1 < loss(1.05 * sigma)


def test_training_free_needs_data_that_need_the_adapters():
    adapted = bbb.adapt(nn.Sequential(nn.Linear(3, 2)), 1)
    nn.init.normal_(adapted[0].lora_B)
    model, guide = in_model(adapted)
    before = bbb.predict_mean(model, guide, torch.ones(1, 3)).probs
    with pytest.raises(
        ValueError, match="data must need the adapters, but their loss stays within"
    ):
        bbb.peft.training_free(model, guide, (torch.zeros(4, 3), torch.arange(4) % 2))
    after = bbb.predict(model, guide, torch.ones(1, 3), num_samples=10).sample_probs
    assert torch.allclose(after, before.expand(10, 1, 2), atol=1e-3)


def test_training_free_at_directions_without_effect():
    torch.manual_seed(0)
    adapted = bbb.adapt(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), 4)  # B is [2, 4]
    for layer in adapted:
        nn.init.normal_(layer.lora_B)
    adapted[0].lora_B.data[:, 1:] = adapted[0].lora_B.data[:, :1]  # of rank 1
    model, guide = in_model(adapted)
    x = torch.randn(6, 6)
    before = bbb.predict_mean(model, guide, x).probs
    bbb.peft.training_free(model, guide, (x, before.argmax(-1)), seed=0)
    assert torch.allclose(bbb.predict_mean(model, guide, x).probs, before, atol=1e-6)
    effects = [(layer.lora_B.norm(dim=0) > 1e-6).sum().item() for layer in adapted]
    assert effects == [1, 2]
    assert all(guide.scale(name).max() < 10 for name in guide.site_names)


@pytest.mark.parametrize(
    ("random", "message"), [("A", "trained adapters, got B = 0"), ("both", "random A alone")]
)
def test_training_free_refuses_other_adapters(random, message):
    model, guide = in_model(bbb.adapt(mixed(), 2, where="inner", random=random))
    data = (TOKENS, torch.arange(6) % 3)
    with pytest.raises(ValueError, match=message):
        bbb.peft.training_free(model, guide, data)
    with pytest.raises(ValueError, match="guide must not be pruned"):
        bbb.peft.training_free(model, bbb.prune(guide, 0.5), data)
