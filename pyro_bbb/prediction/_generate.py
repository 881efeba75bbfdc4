# SPDX-License-Identifier: Apache-2.0
r"""Text from a posterior: each next token drawn from probabilities averaged over the weights.

$$p(t \mid x) = \frac1S \sum_s p(t \mid x, w_s), \qquad w_s \sim q(w)$$

Hugging Face's loop of generation runs as it is; its network returns $\ln p(t \mid x)$ as logits.
"""

from __future__ import annotations

import copy
import math
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, tensor
from pyro_bbb.latents import substituted
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.prediction._draws import single_draws

_CACHES = ("cache", "past_key_values")  # its names in versions of transformers
# a cache of another network, and searches that shorten the cache, of which each draw has one
_REFUSED = (*_CACHES, "assistant_model", "prompt_lookup_num_tokens")


@locked
def generate(
    model: BayesianModel,
    guide: Any,
    input_ids: Tensor,
    *,
    num_samples: int = 10,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Generate text by a Hugging Face causal network, averaged over draws of its weights.

    At each step the next token's probabilities are the mean over the draws, all of which read the
    same text. Each draw has its own cache of keys and values, so a token costs S passes.

    Args:
        model: the model, of a network with a method ``generate``.
        guide: as for `predict`.
        input_ids: the prompt's tokens, ``[batch, length]``.
        num_samples: number of draws S.
        seed: makes the text a function of this number, and leaves torch's random state alone.
        options: arguments of the network's ``generate``, such as ``max_new_tokens``, ``do_sample``,
            ``top_k``, ``attention_mask``. With ``output_logits`` it returns the log-probabilities.

    Returns:
        The result of the network's ``generate``: tokens ``[batch, length + new]`` by default.

    Raises:
        TypeError: the network has no method ``generate``, or an argument is of another kind.
        ValueError: an option that needs a single network's cache, or a number out of range.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    num_samples = count("num_samples", num_samples)
    network: Any = model.network
    if not hasattr(network, "generate"):
        name = type(network).__name__
        raise TypeError(f"model must have a Hugging Face network that generates, got {name}")
    if refused := [name for name in _REFUSED if name in options]:
        raise ValueError(f"{refused[0]} must be left out: each draw has its own cache")
    settings = options.get("generation_config") or network.generation_config
    if (options.get("num_beams") or settings.num_beams or 1) > 1:
        options["use_cache"] = False  # beams reorder the first draw's cache alone
    tokens = tensor("input_ids", input_ids)
    with seeded(seed), evaluating(model), torch.no_grad():
        draws = list(single_draws(model, guide, tokens, num_samples))
        averaged = copy.copy(network)
        averaged.forward = _averaging(model, draws)
        return averaged.generate(tokens, **options)


def _averaging(model: BayesianModel, draws: list[dict[str, Tensor]]) -> Any:
    """Return the network's forward pass, with the log of mean probabilities as its logits."""
    network, caches = model.network, list[Any]()

    @wraps(network.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        name = next((name for name in _CACHES if kwargs.get(name) is not None), None)
        cache = kwargs.pop(name) if name else None
        if not caches or caches[0] is not cache:  # at first it is empty
            caches[:] = [cache, *(copy.deepcopy(cache) for _ in draws[1:])]
        outputs = []
        for draw, its_cache in zip(draws, caches, strict=True):
            with substituted(model, draw):
                outputs.append(network(*args, **kwargs, **({name: its_cache} if name else {})))
        log_probs = torch.stack([output.logits.float().log_softmax(-1) for output in outputs])
        outputs[0].logits = log_probs.logsumexp(0) - math.log(len(draws))
        return outputs[0]

    return forward
