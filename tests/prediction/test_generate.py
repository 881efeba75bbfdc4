# SPDX-License-Identifier: Apache-2.0
"""Text of probabilities averaged over the weights, beside a loop written out."""

import pytest
import torch
from torch import nn

import pyro_bbb as bbb

transformers = pytest.importorskip("transformers")
PROMPT = torch.randint(3, 20, (2, 4), generator=torch.Generator().manual_seed(1))
NEW = 6


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids))
    network = bbb.adapt(gpt, 2, where="*.c_attn|*.c_fc", alpha=3)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=10)
    return model, bbb.AutoSoftplusNormal(model, init_rho=0.0)


def by_hand(model, draws, choose):
    """Run a plain network for each draw over the whole text; return tokens and probabilities."""
    networks, tokens, steps = [], PROMPT, []
    for s in range(len(next(iter(draws.values())))):

        class Draw:
            def median(self, s=s):
                return {name: values[s] for name, values in draws.items()}

        networks.append(bbb.to_module(model, Draw()))
    with torch.no_grad():
        for _ in range(NEW):
            logits = torch.stack([network(tokens).logits[:, -1] for network in networks])
            steps.append(logits.softmax(-1).mean(0))
            tokens = torch.cat([tokens, choose(steps[-1])], 1)
    return tokens, torch.stack(steps)


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_text_is_that_of_a_loop_written_out(posterior, cached):
    model, guide = posterior
    torch.manual_seed(3)
    draws = guide.sample_posterior(3)
    tokens, probs = by_hand(model, draws, lambda p: p.argmax(-1, keepdim=True))
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": cached}
    out = bbb.generate(
        model, draws, PROMPT, output_logits=True, return_dict_in_generate=True, **options
    )
    assert torch.equal(out.sequences, tokens)
    assert torch.allclose(torch.stack(out.logits).exp(), probs, atol=1e-6)
    single = [
        bbb.generate(model, {name: x[s : s + 1] for name, x in draws.items()}, PROMPT, **options)
        for s in range(3)
    ]
    assert any(not torch.equal(one, tokens) for one in single)


def test_sampled_text_is_that_of_a_loop_written_out(posterior):
    model, guide = posterior
    draws = guide.sample_posterior(3)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 5}
    text = bbb.generate(model, draws, PROMPT, **options)
    torch.manual_seed(5)
    tokens, _ = by_hand(model, draws, lambda p: torch.multinomial(p, 1))
    assert torch.equal(text, tokens)


def test_it_is_a_function_of_its_seed_and_leaves_the_model(posterior):
    model, guide = posterior
    model.train()
    options = {"max_new_tokens": NEW, "do_sample": True, "num_samples": 2}
    text = [bbb.generate(model, guide, PROMPT, seed=seed, **options) for seed in (0, 0, 1)]
    assert torch.equal(text[0], text[1]) and not torch.equal(text[0], text[2])
    assert model.training and "forward" not in vars(model.network)


def test_beams_do_not_share_a_cache(posterior):
    model, guide = posterior
    draws = guide.sample_posterior(2)
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    beams = [bbb.generate(model, draws, PROMPT, use_cache=cached, **options) for cached in (0, 1)]
    assert torch.equal(*beams)
