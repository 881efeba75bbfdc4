# SPDX-License-Identifier: Apache-2.0
"""Methods of `continual`: a new one is an entry of `METHODS`.

What was tried for them is said in `continual`.
"""

from dataclasses import dataclass, replace

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


VCL = Settings(
    guide="softplus_normal",
    options={"init_rho": -3.5},
    temperature=0.3,
    strength=3.0,
    estimator="local_reparam",
    loss="mean_field",
    lr=5e-3,
    epochs=20,
)
POINT = Settings(guide="delta", strength=0.0, lr=1e-3)

METHODS = {
    "vcl": Method(label="VCL, strength 3", settings=VCL),
    "vcl_random": Method(
        label="VCL, strength 3, random coreset", settings=replace(VCL, coreset="random")
    ),
    "vcl_k_center": Method(
        label="VCL, strength 3, k-center coreset", settings=replace(VCL, coreset="k_center")
    ),
    "plain": Method(label="VCL, strength 1", settings=replace(VCL, strength=1.0)),
    "bayes": Method(
        label="VCL, strength 1, temperature 1",
        settings=replace(VCL, strength=1.0, temperature=1.0),
    ),
    "laplace": Method(
        label="online Laplace, diagonal (EWC)",
        settings=replace(POINT, guide="laplace", options={"structure": "diag"}, strength=1.0),
    ),
    "fine_tuning": Method(label="fine-tuning", settings=POINT),
    "joint": Method(label="all tasks at once", settings=POINT, at_once=True),
}
