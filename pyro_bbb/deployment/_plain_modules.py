# SPDX-License-Identifier: Apache-2.0
"""Plain torch modules out of a posterior: `to_module`, the mean network, and `to_ensemble`.

Both are copies of the network without Pyro; `to_ensemble` has the weights of all draws.
"""

from __future__ import annotations

import copy
import inspect
import math
import timeit
import warnings
from collections.abc import Iterable, Mapping
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.poutine.guide import GuideMessenger
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.bisection import bisect, with_derivatives
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.inputs import at_least_single
from pyro_bbb._utils.locking import GLOBAL_LOCK, locked
from pyro_bbb._utils.validation import count, kind, probabilities, require_numbers, tensor
from pyro_bbb.distributions.observation import family_of, stack_draws
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.latents import (
    batches,
    declared_names,
    one_by_one,
    parts_of_prior,
    sample_names,
    stack,
    statistics_in,
)
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import copy_sharing, merge_adapters
from pyro_bbb.prediction import (
    ClassificationPrediction,
    RegressionPrediction,
    class_log_probs,
    posterior_draws,
)
from pyro_bbb.priors import Prior

_PASSES = 20  # of each layer, dense and sparse; the fastest counts
_HALVINGS = 40  # of the bracket of a quantile, to 1e-12 of its width


# --- the mean network ---


@locked
def to_module(model: BayesianModel, guide: Any) -> nn.Module:
    """Return the network with the posterior's central weights, as a plain `torch.nn.Module`.

    It has no random weights, priors or Pyro classes left, and can be saved, compiled and exported.
    Adapters (`adapt`) are added to the weights of their layers.
    The removed weights of a pruned guide are zeros in it (see `sparse_where_faster`).

    Args:
        model: the model; it stays as it is.
        guide: a trained guide; its medians (for `AutoSoftplusNormal` the means) are the weights.

    Returns:
        A module in evaluation mode, with the outputs of `predict_mean`'s network. It does not check
        them: where an input overflows they are NaN or infinite.

    Raises:
        ValueError: the guide lacks a weight of the model.
    """
    kind("model", model, BayesianModel)
    weights = medians(model, guide, "bbb.to_ensemble takes draws")
    return merge_adapters(plain_copy(model.network, "network", weights)).eval()


def medians(model: BayesianModel, guide: Any, hint: str) -> dict[str, Tensor]:
    """Return the guide's medians by site name; TypeError, which ends in a hint, if it has none."""
    if not hasattr(guide, "median") or isinstance(guide, GuideMessenger):
        got = f"{type(guide).__name__}; {hint}"
        raise TypeError(f"guide must have medians without inputs, got {got}")
    with own_store(model, guide):
        return {name: value.detach().clone() for name, value in guide.median().items()}


# --- a copy without Pyro ---


def plain_copy(
    part: nn.Module, path: str, weights: Mapping[str, Tensor], shared: Iterable[nn.Parameter] = ()
) -> nn.Module:
    """Return a copy with given values as parameters for its random weights, without Pyro.

    ``path`` is the name of the part in the model, ``weights`` has the latents by site name. The
    copy has the memory of the ``shared`` parameters, frozen.
    """
    plain = copy_sharing(part, shared)
    for name, module in list(plain.named_modules()):
        if isinstance(module, PyroModule):
            prefix = ".".join(filter(None, [path, name]))
            names = {name: f"{prefix}.{name}" for name in sample_names(module)}
            if missing := [name for name in names.values() if name not in weights]:
                raise ValueError(f"guide lacks the latents {missing}, it has {list(weights)}")
            _strip(module, {name: weights[site] for name, site in names.items()})
    return plain


def _strip(module: PyroModule, values: dict[str, Tensor]) -> None:
    """Turn a Pyro module into one of its plain class, with parameters for its random weights."""
    attributes = (item for cls in type(module).__mro__ for item in vars(cls).items())
    decorated = [name for name, value in attributes if isinstance(value, PyroParam)]
    for name in dict.fromkeys([*module._pyro_params, *decorated]):
        values[name] = getattr(module, name).detach().clone()
        del module._parameters[f"{name}_unconstrained"]
    for name in parts_of_prior(module):
        values.pop(name, None)
        module._parameters.pop(name, None)
    for name, child in list(module._modules.items()):
        if isinstance(child, Prior):
            del module._modules[name]
    if hasattr(type(module), "as_used"):
        values = {name: module.as_used(name, value) for name, value in values.items()}
    tied = vars(module).get("_pyro_bbb_tied", {})
    module.__class__ = _plain_class(type(module))
    for name in [key for key in vars(module) if key.startswith("_pyro_")]:
        del module.__dict__[name]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))
    for name, (owner, owner_name) in tied.items():  # an earlier module, stripped already
        module.register_parameter(name, owner._parameters[owner_name])
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


@cache
def _plain_class(cls: type) -> Any:
    """Return the class without Pyro: torch's if it adds only a constructor, or of its code."""
    if not issubclass(cls, PyroModule):
        return cls
    if "plain_class" in vars(cls):
        return _plain_class(cls.plain_class)  # type: ignore[attr-defined]
    plain = dict.fromkeys(nn.Module if b is PyroModule else _plain_class(b) for b in cls.__bases__)
    bases = tuple(b for b in plain if not any(b is not c and issubclass(c, b) for c in plain))
    code = {} if cls.__module__.startswith("pyro.") else _own_code(cls)
    return bases[0] if len(bases) == 1 and not code else _new_class(cls, bases, code)


def _own_code(cls: type) -> dict[str, Any]:
    """Return a class's own members, but for its constructor and random or learned attributes."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not isinstance(value, (PyroSample, PyroParam))
        and name != "__init__"
        and (callable(value) or not name.startswith("__"))
    }


def _new_class(cls: type, bases: tuple[type, ...], code: dict[str, Any]) -> Any:
    """Return a class of that name and code, in which ``super()`` means the new bases."""
    cell = CellType()
    body = {name: _with_class_cell(value, cell) for name, value in code.items()}
    reduced = {"__reduce_ex__": lambda self, _: (_new_instance, (cls,), self.__getstate__())}
    body = reduced | body  # a saved object names the Pyro class, from which this one is made
    new = type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__, **body})
    cell.cell_contents = new
    return new


def _new_instance(cls: type) -> Any:
    """Return an object without state of a Pyro class's plain class, to unpickle into."""
    plain = _plain_class(cls)
    return plain.__new__(plain)


def _with_class_cell(value: Any, cell: CellType) -> Any:
    """Return a method whose ``super()``, if any, reads its class from the cell."""
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closure = tuple(cell if name == "__class__" else own for name, own in pairs)
    new = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    new.__kwdefaults__ = value.__kwdefaults__
    return new


# --- sparse weights ---


@locked
def sparse_where_faster(module: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of a pruned network, its linear layers sparse where that is faster.

    Each layer is timed on this machine with the inputs that it gets in ``module(x)``: with its
    weight as it is, and in compressed sparse rows (`torch.Tensor.to_sparse_csr`). The faster one
    stays. Sparse weights pay where a few per cent of a large layer are left. Torch can neither
    train nor compile them, nor export them to ONNX.

    Args:
        module: a network from `to_module`, on a CPU; it stays as it is.
        x: inputs ``[batch, ...]``, as many at once as the network will get.

    Returns:
        The network of the same layers, in evaluation mode.
    """
    kind("module", module, nn.Module)
    network, inputs = copy.deepcopy(module).eval(), dict[nn.Linear, Tensor]()

    def record(layer: nn.Linear, args: tuple[Tensor, ...]) -> None:
        inputs[layer] = args[0]

    layers = [layer for layer in network.modules() if type(layer) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    with torch.no_grad():
        network(tensor("x", x))
    for hook in hooks:
        hook.remove()
    for layer, its_inputs in inputs.items():
        sparse = _with_sparse_weight(layer)
        if _seconds(sparse, its_inputs) < _seconds(layer, its_inputs):
            layer.weight = sparse.weight
    return network


def _with_sparse_weight(layer: nn.Linear) -> nn.Linear:
    sparse = copy.copy(layer)
    sparse._parameters = dict(layer._parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        rows = layer.weight.detach().to_sparse_csr()
    row_offsets, columns = rows.crow_indices().int(), rows.col_indices().int()
    weight = torch.sparse_csr_tensor(
        row_offsets, columns, rows.values(), rows.shape, check_invariants=False
    )
    sparse.weight = nn.Parameter(weight, requires_grad=False)
    return sparse


def _seconds(layer: nn.Linear, x: Tensor) -> float:
    with torch.no_grad():
        timer = timeit.Timer(lambda: layer(x))
        return min(timer.repeat(_PASSES, number=1))


# --- an ensemble of draws ---


@locked
def to_ensemble(
    model: BayesianModel,
    guide: Any,
    *,
    num_samples: int = 100,
    seed: int | None = None,
    quantiles: Iterable[float] = (),
) -> DrawnEnsemble:
    """Draw networks from the posterior, as one plain `torch.nn.Module` for a service.

    It answers as `predict` does for the same draws (with ``estimator="reparam"``, and the same seed
    and number), has no priors or Pyro modules left, and draws nothing: it can be saved, moved, and
    exported by `torch.export` and to ONNX, with a batch of any size.

    Args:
        model: the model; it stays as it is.
        guide: a trained guide; the `Chains` of `run_nuts`; a finished Pyro `MCMC`; or draws by site
            name, ``[S, ...]`` each, of which at most ``num_samples`` are used, evenly spaced.
        num_samples: number of networks S.
        seed: makes the draws a function of this number, and leaves torch's random state alone.
        quantiles: probabilities of the quantiles that it gives, each in (0, 1); for `Gaussian` and
            `HeteroscedasticGaussian` likelihoods. Exported ones hold to 1e-7 of probability.

    Returns:
        A module in evaluation mode.

    Raises:
        TypeError: an argument is of another kind, or the guide is a mere function: give its draws.
        ValueError: a number out of range, draws that lack a latent, or quantiles of a likelihood
            without.
    """
    kind("model", model, BayesianModel)
    if not isinstance(guide, (AutoGuide, Mapping, MCMC)) and not hasattr(guide, "sample_posterior"):
        name = type(guide).__name__
        raise TypeError(f"guide must be an autoguide, an MCMC or a dict of draws, got {name}")
    num_samples, levels = count("num_samples", num_samples), _levels(model, quantiles)
    nowhere = torch.zeros(1)  # autoguides do not use the inputs
    with seeded(seed), own_store(model, guide), torch.no_grad():
        drawn = _stacked(model, posterior_draws(model, guide, nowhere, num_samples))
    return DrawnEnsemble(drawn, model.likelihood.family, levels).eval()


class DrawnEnsemble(nn.Module):
    """Ensemble of posterior draws as one plain torch module, the result of `to_ensemble`."""

    levels: Tensor
    scores: Tensor
    _in_one_pass: bool | None = None  # or one by one, chosen at the first call

    def __init__(self, drawn: _Drawn, family: Any, levels: list[float]) -> None:
        super().__init__()
        self.drawn = drawn
        self._family = family
        device = next(drawn.buffers()).device
        known = torch.tensor(levels, dtype=torch.float64, device=device)
        self.register_buffer("levels", known)
        self.register_buffer("scores", torch.special.ndtri(known))  # which ONNX does not have
        checks = "validate_args" in inspect.signature(family).parameters
        self._unchecked = {"validate_args": False} if checks else {}

    def forward(self, x: Tensor, *others: Tensor) -> dict[str, Tensor]:
        """Return the posterior predictive at inputs ``[n, ...]``, by all networks in one pass.

        A network of several inputs takes them by position.

        Returns:
            For classes ``probs`` ``[n, C]`` and, in nats, ``aleatoric`` and ``epistemic`` ``[n]``.
            Else ``mean``, ``aleatoric_std``, ``epistemic_std`` and ``std`` ``[n, d]`` and, if
            chosen, ``quantiles`` ``[n, d, Q]``.

        Raises:
            ValueError: the network overflows at an input, which the message names. A module that
                is compiled or exported cannot raise: all that it returns for such an input is NaN,
                or for real targets infinite; refuse it by ``~(probs.amax(-1) > threshold)``.
        """
        observed = self._observed(x, *others)
        log_probs = class_log_probs(observed)
        if log_probs is not None:
            _require_numbers({"sample_log_probs": log_probs})
            classes = ClassificationPrediction(log_probs)
            return {name: getattr(classes, name) for name in ("probs", "aleatoric", "epistemic")}
        mixture = RegressionPrediction(observed)
        names = ("mean", "aleatoric_std", "epistemic_std")
        answer = {name: getattr(mixture, name) for name in names}
        stds = torch.stack([answer["aleatoric_std"], answer["epistemic_std"]]).double()
        answer["std"] = stds.square().sum(0).sqrt().to(mixture.mean)  # ONNX has no hypot
        if len(self.levels):
            answer["quantiles"] = _quantiles(self.levels, self.scores, observed)
        return answer

    def sample_means(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return each network's mean of real targets or counts, ``[S, n, d]``.

        Raises:
            TypeError: the targets are classes.
        """
        observed = self._observed(x, *others)
        if class_log_probs(observed) is not None:
            name = family_of(observed)
            raise TypeError(f"sample_means needs real targets or counts, got {name}")
        return RegressionPrediction(observed).sample_means

    def extra_repr(self) -> str:
        """Return the number of networks, for the module's printed form."""
        return f"num_samples={len(next(iter(self.drawn.weights().values())))}"

    def _observed(self, *inputs: Tensor) -> Any:
        """Return the observations' distribution, ``[S, n, ...]``, by every network."""
        compiling, weights = torch.compiler.is_compiling(), self.drawn.weights()
        drawn = self.drawn if compiling else _with_shared_tensors(self.drawn)
        run_one = partial(functional_call, drawn, args=inputs)
        if not self.drawn.standard:
            columns = zip(*(values.unbind() for values in weights.values()), strict=True)
            draws = (dict(zip(weights, values, strict=True)) for values in columns)
            return stack_draws([innermost(run_one(draw)) for draw in draws])
        if self._in_one_pass is None and not compiling:
            with GLOBAL_LOCK:
                self._in_one_pass = batches(run_one, weights)
        # an exporter would fix the number of inputs of what torch batches
        if self._in_one_pass and not compiling:
            arguments = torch.vmap(run_one, randomness="different")(weights)
        else:
            arguments = one_by_one(run_one, weights)
        _require_numbers(arguments)
        return self._family(**arguments, **self._unchecked)


class _Drawn(nn.Module):
    """Network and likelihood; their random weights are buffers, ``[S, ...]`` each."""

    def __init__(self, network: nn.Module, likelihood: Any) -> None:
        super().__init__()
        self.network: nn.Module = network
        self.likelihood: Any = likelihood
        self.standard: bool = likelihood.is_standard
        self.names: set[str] = set()

    def weights(self) -> dict[str, Tensor]:
        """Return all draws by name, tied ones once."""
        return {name: value for name, value in self.named_buffers() if name in self.names}

    def forward(self, *x: Tensor) -> Any:
        """Return the likelihood's arguments, or a user's distribution, by single weights."""
        likelihood: Any = self.likelihood
        run = likelihood.arguments if self.standard else likelihood
        outputs = self.network(*x)
        return run(at_least_single(outputs) if isinstance(outputs, Tensor) else outputs)


def _with_shared_tensors(drawn: _Drawn) -> _Drawn:
    """Return a copy for one call, as calls in other threads must not see its weights."""
    values = [value for module in drawn.modules() for value in vars(module).values()]
    unchanged = [*drawn.parameters(), *drawn.buffers(), *(value for value in values if not value)]
    return copy.deepcopy(drawn, {id(value): value for value in unchanged})


def _levels(model: BayesianModel, quantiles: Any) -> list[float]:
    """Return the probabilities of quantiles, for a likelihood that has a formula for them."""
    if isinstance(quantiles, tuple) and not quantiles:
        return []
    levels = probabilities("quantiles", quantiles)
    likelihood = model.likelihood
    if not (likelihood.is_standard and issubclass(likelihood.family, Normal)):
        name = type(model.likelihood).__name__
        raise ValueError(f"quantiles must be left out for the likelihood {name}, got {levels}")
    return levels


def _stacked(model: BayesianModel, chunks: Iterable[Mapping[str, Tensor]]) -> _Drawn:
    """Return network and likelihood with every draw's weights, as their layers use them."""
    random = declared_names(model)
    records = []
    for chunk, s in ((x, s) for x in chunks for s in range(len(next(iter(x.values()))))):
        draw = {name: values[s] for name, values in chunk.items()}
        plain = (plain_copy(getattr(model, name), name, draw) for name in ("network", "likelihood"))
        drawn = _Drawn(*plain).requires_grad_(False)
        own = {name: value for name, value in drawn.named_parameters() if name in random}
        statistics = {name: draw[name] for name in statistics_in(draw)}
        records.append({name: value.data for name, value in own.items()} | statistics)
    stacked = stack(records)
    values = {id(own[name]): stacked[name] for name in own}
    for name in statistics:
        path, _, leaf = name.rpartition(".")
        drawn.get_submodule(path).register_buffer(leaf, stacked[name])
        drawn.names.add(name)
    for name, parameter in list(drawn.named_parameters(remove_duplicate=False)):
        if id(parameter) in values:
            path, _, leaf = name.rpartition(".")
            owner = drawn.get_submodule(path)
            del owner._parameters[leaf]
            owner.register_buffer(leaf, values[id(parameter)])
            drawn.names.add(name)
    return drawn


def _quantiles(levels: Tensor, scores: Tensor, normal: Any) -> Tensor:
    """Return quantiles ``[n, d, Q]`` of mixtures of Normals, bisected between the components'."""
    dtype = normal.loc.dtype
    loc, scale = (x.double().unsqueeze(-1) for x in (normal.loc, normal.scale))  # [S, n, d, 1]
    ends = loc + scale * scores
    low, high = ends.amin(0), ends.amax(0)

    def centred_cdf(x: Tensor) -> Tensor:  # 2 F(x) - 1
        z = (x - loc) / (scale * math.sqrt(2))
        # an exported module computes erf in float32, as ONNX needs
        erf = z.float().erf().double() if torch.compiler.is_compiling() else z.erf()
        return erf.mean(0)

    def slope(x: Tensor) -> Tensor:
        z = (x - loc) / scale
        return (math.sqrt(2 / math.pi) * torch.exp(-0.5 * z * z) / scale).mean(0)

    root = bisect(lambda x: centred_cdf(x) < 2 * levels - 1, low, high, _HALVINGS)
    return with_derivatives(root, centred_cdf, slope).to(dtype)


def _require_numbers(outputs: dict[str, Tensor]) -> None:
    """Raise as `predict` does, unless compiled, captured or transformed, when values are hidden."""
    if not (
        torch.compiler.is_compiling()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        require_numbers(outputs)
