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
    options={"init_rho": -4.0},
    temperature=0.2,
    estimator="local_reparam",
    epochs=20,
)
POINT = Settings(guide="delta", remember=False, lr=1e-3)

METHODS = {
    "vcl": Method(label="VCL", settings=VCL),
    "vcl_random": Method(label="VCL, random coreset", settings=replace(VCL, coreset="random")),
    "vcl_k_center": Method(
        label="VCL, k-center coreset", settings=replace(VCL, coreset="k_center")
    ),
    "bayes": Method(label="VCL at temperature 1", settings=replace(VCL, temperature=1.0)),
    "laplace": Method(
        label="online Laplace, diagonal (EWC)",
        settings=replace(POINT, guide="laplace", options={"structure": "diag"}, remember=True),
    ),
    "fine_tuning": Method(label="fine-tuning", settings=POINT),
    "joint": Method(label="all tasks at once", settings=POINT, at_once=True),
}
