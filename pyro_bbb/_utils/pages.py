# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation that warnings cite: one for each cause."""

from __future__ import annotations

_TITLES = {
    "api/estimators": "Estimators",
    "fidelity": "Which posterior to trust",
    "guide/residual_networks": "Residual networks, BatchNorm, attention",
    "guide/trained": "Is it trained?",
    "questions/elbo": "The ELBO does not go down",
    "questions/intervals": "Calibrated intervals",
    "questions/it_does_not_work": "It does not work",
    "questions/kl_weight": "Which KL weight",
    "questions/prior_scales": "Scales of the mixture prior",
}


def read_on(page: str) -> str:
    """Return the last sentence of a warning: title and file of the page that explains it."""
    return f'Read on: "{_TITLES[page]}", docs/{page}.md'
