# SPDX-License-Identifier: Apache-2.0
"""Selection of parameters by the argument ``where`` of `bayesianize` and `adapt`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from pyro_bbb.latents import parts_of_prior
from pyro_bbb.priors import Prior

Criterion: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Where: TypeAlias = "Criterion | list[Criterion] | tuple[Criterion, ...]"
ParameterPath: TypeAlias = tuple[str, str]  # a module's path, and a name of its parameters
_NORMS = (
    nn.modules.batchnorm._NormBase,  # batch and instance normalisation
    *(getattr(nn, f"{norm}Norm") for norm in ("Layer", "Group", "RMS")),
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return a network's modules by path, without modules of priors."""
    priors = {m for prior in root.modules() if isinstance(prior, Prior) for m in prior.modules()}
    return ((path, m) for path, m in root.named_modules() if m not in priors)


def parameter_paths(root: nn.Module) -> list[ParameterPath]:
    """Return the paths of trainable parameters, several for a shared one."""
    return [
        (path, name)
        for path, module in modules_of(root)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
        if name.removesuffix("_unconstrained") not in getattr(module, "_pyro_params", ())
        if name not in parts_of_prior(module)
    ]


def select(root: nn.Module, where: Where | None, argument: str = "where") -> list[ParameterPath]:
    """Return the paths of the parameters that ``where`` selects, as in `bayesianize`."""
    modules, candidates = dict(modules_of(root)), parameter_paths(root)
    what = "trainable parameters to convert"
    chosen = select_among(modules, candidates, where, what, argument)
    for path, name in chosen:
        if reason := obstacle(modules[path], name):
            full_name = _join(path, name)
            raise ValueError(
                f"{full_name!r} cannot be random: {reason}, or leave it out by {argument}="
            )
    return chosen


def select_among(
    modules: dict[str, nn.Module],
    candidates: list[ParameterPath],
    where: Where | None,
    what: str,
    argument: str = "where",
) -> list[ParameterPath]:
    """Return the candidates that ``where`` selects; ``what`` they are, if there is none."""
    chosen: set[ParameterPath] = set()
    for criterion in _criteria(where, argument):
        selected = {path for path in candidates if _selects(criterion, modules, path)}
        if not selected:
            by = "module" if where is None else f"{argument}={criterion!r}"
            near = _near(criterion, modules, candidates)
            raise ValueError(f"{by} has no {what}{near}")
        chosen |= selected
    return [path for path in candidates if path in chosen]


def without_parameters_inside(
    modules: dict[str, nn.Module], able: set[str], where: Where | None
) -> list[str]:
    """Return modules that ``where`` names directly, with parameters but no able module."""
    return [
        path
        for criterion in ([] if where is None else _criteria(where))
        for path, module in modules.items()
        if _matches(criterion, path, module) and not isinstance(module, _NORMS)
        if any(True for _ in module.parameters(recurse=False)) or vars(module).get("_pyro_samples")
        if not any(inner == path or inner.startswith(path and f"{path}.") for inner in able)
    ]


def _near(criterion: Any, modules: dict[str, nn.Module], parameters: list[ParameterPath]) -> str:
    """Return names like a pattern, or the types of modules that have parameters."""
    if isinstance(criterion, str):
        names = [*modules, *(_join(*path) for path in parameters)]
        if near := get_close_matches(criterion, names, n=3, cutoff=0.5):
            return f"; near it: {near}"
    return f"; types: {sorted({type(modules[path]).__name__ for path, _ in parameters})}"


def _criteria(where: Any, argument: str = "where") -> list[Any]:
    if where is None:
        return [lambda path, module: not isinstance(module, _NORMS)]
    listed = list(where) if isinstance(where, (list, tuple)) else [where]
    criteria = [c for x in listed for c in (x.split("|") if isinstance(x, str) else [x])]
    if not criteria:
        raise ValueError(f"{argument} must not be empty, got {where!r}")
    for criterion in criteria:
        if isinstance(criterion, type):
            valid = issubclass(criterion, nn.Module)
        else:
            valid = isinstance(criterion, str) or callable(criterion)
        if not valid:
            raise TypeError(
                f"{argument} must be a name pattern, a module type, a function (path, module) -> "
                f"bool, or a list of these, got {criterion!r}"
            )
    return criteria


def _selects(criterion: Any, modules: dict[str, nn.Module], parameter: ParameterPath) -> bool:
    """Return whether a criterion matches a parameter, its module, or one around that."""
    path, name = parameter
    module = modules[path]
    if _matches(criterion, path, module):
        return True
    if isinstance(criterion, str) and fnmatchcase(_join(path, name), criterion):
        return True
    if not isinstance(criterion, (str, type)) or isinstance(module, _NORMS):
        return False  # a function is of the module's own parameters
    steps = path.split(".")
    around = [".".join(steps[:i]) for i in range(len(steps))] if path else []
    return any(_matches(criterion, above, modules[above]) for above in around)


def _matches(criterion: Any, path: str, module: nn.Module) -> bool:
    """Return whether a criterion selects a module directly."""
    if isinstance(criterion, str):
        return fnmatchcase(path, criterion)
    if isinstance(criterion, type):
        return isinstance(module, criterion)
    return bool(criterion(path, module))


def obstacle(module: nn.Module, name: str) -> str | None:
    """Return the reason why a parameter cannot be random or adapted, if any."""
    parameter = module._parameters[name]
    hooks = {type(hook).__module__ for hook in module._forward_pre_hooks.values()}
    parametrised = isinstance(module, nn.utils.parametrize.ParametrizationList)
    if parameter is not None and is_lazy(parameter):
        return "it has no shape yet; run the network once before"
    if parameter is not None and parameter.is_complex():
        return "it is complex"
    if parametrised or any(hook.startswith("torch.nn.utils") for hook in hooks):
        return "a weight is computed from it (weight norm or the like); remove the parametrisation"
    if getattr(module, "max_norm", None) is not None:
        return "its module changes it in place (max_norm)"
    if isinstance(module, _CONTAINERS):
        return f"its module is a {type(module).__name__}; put it in a module inside"
    if hasattr(module, "prior"):
        return "its module has an attribute named prior already"
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
