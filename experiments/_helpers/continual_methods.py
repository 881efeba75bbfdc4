# SPDX-License-Identifier: Apache-2.0
"""Methods of `continual` on each protocol: a new one is an entry of `methods`.

What was tried for them is said in `continual`.
"""

from dataclasses import dataclass, replace

from pyro.distributions import Normal

from _helpers.continual_kronecker import KroneckerMemory
from _helpers.continual_learners import Settings


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to learn tasks in sequence."""

    label: str
    """Name in tables and figures."""
    settings: Settings
    """Its hyper-parameters."""
    at_once: bool = False
    """Learn all tasks together."""


PERMUTED = Settings(
    guide="softplus_normal",
    options={"init_rho": -2.5},
    temperature=0.3,
    strength=10.0,
    estimator="local_reparam",
    loss="mean_field",
    lr=5e-3,
    epochs=6,
)
SPLIT = replace(
    PERMUTED,
    first_prior=Normal(0.0, 1.0),
    temperature=0.01,
    strength=100.0,
    lr=1e-3,
    epochs=20,
)
EWC_PERMUTED = Settings(
    guide="laplace", options={"structure": "diag"}, strength=3.0, lr=1e-3, draws=0
)
EWC_SPLIT = replace(EWC_PERMUTED, first_prior=Normal(0.0, 1.0), strength=1e4)
KRONECKER_PERMUTED = Settings(
    guide="delta", memory=KroneckerMemory, strength=6.0, lr=2e-3, epochs=12, draws=0
)
KRONECKER_SPLIT = replace(KRONECKER_PERMUTED, first_prior=Normal(0.0, 1.0), strength=100.0)


def methods(vcl: Settings, ewc: Settings, kronecker: Settings) -> dict[str, Method]:
    """The methods of one protocol, by the settings of the three that remember on it."""
    label = f"VCL, strength {vcl.strength:g}"
    plain = replace(vcl, strength=1.0)
    point = Settings(guide="delta", first_prior=vcl.first_prior, strength=0.0, lr=1e-3)
    return {
        "vcl": Method(label=label, settings=vcl),
        "vcl_random": Method(
            label=f"{label}, random coreset", settings=replace(vcl, coreset="random")
        ),
        "vcl_k_center": Method(
            label=f"{label}, k-center coreset", settings=replace(vcl, coreset="k_center")
        ),
        "plain": Method(label="VCL, strength 1", settings=plain),
        "bayes": Method(
            label="VCL, strength 1, temperature 1", settings=replace(plain, temperature=1.0)
        ),
        "laplace": Method(label=f"online Laplace (EWC), strength {ewc.strength:g}", settings=ewc),
        "kronecker": Method(
            label=f"Kronecker Laplace, strength {kronecker.strength:g}", settings=kronecker
        ),
        "fine_tuning": Method(label="fine-tuning", settings=point),
        "joint": Method(label="all tasks at once", settings=point, at_once=True),
    }


METHODS = {
    "permuted": methods(PERMUTED, EWC_PERMUTED, KRONECKER_PERMUTED),
    "split": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
    "split_fashion": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
    "split_one_head": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
}
