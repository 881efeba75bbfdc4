# SPDX-License-Identifier: Apache-2.0
"""Checks that two processes make together; each ends with nothing or with what went wrong.

    python together.py FOLDER

The processes are forked with the variables that torchrun sets, and join when `fit` first asks.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import traceback
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
import torch.distributed as group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.persistence import archive as _archive
from pyro_bbb.training import _distributed as distributed
from pyro_bbb.training._step import EagerRunner, mean_parts, sums
from tests._support import ddp_worker as killed

SIZE, N = 2, 7
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def rank():
    return int(os.environ["RANK"])


def all_of(value):
    """Every process's value."""
    gathered = [None] * SIZE
    group.all_gather_object(gathered, value)
    return gathered


def assert_same(value):
    values = all_of(value)
    assert values[0] == values[1], values


def digest(*tensors):
    data = b"".join(x.detach().contiguous().view(-1).numpy().tobytes() for x in tensors)
    return hashlib.sha256(data).hexdigest()


def state(pair):
    return digest(*(x for m in pair for x in m.state_dict().values()))


def record(history):
    return json.dumps(history.as_dict() | {"seconds": None})


def values():
    x = torch.sin(torch.arange(3.0 * N).view(N, 3) ** 2)
    return x, x.sum(1)


def plain():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make(guide="softplus_normal", *, seed=None, prior=None, layers=None, like=None, where=None):
    """A model and a guide; the processes begin them differently, and `fit` makes them the same."""
    pyro.set_rng_seed(rank() if seed is None else seed)
    prior = prior or dist.Normal(0.0, 1.0)
    network = bbb.bayesianize((layers or plain)(), prior, where=where)
    model = bbb.BayesianModel(network, (like or likelihoods.Gaussian.learned)(), num_data=N)
    return model, bbb.guides.make(guide, model)


def fit(pair, data=None, folder=None, **options):
    options = {"epochs": 2, "batch_size": 4, "lr": 0.01, "progress": False, **options}
    data = values() if data is None else data
    return bbb.fit(*pair, data, checkpoint=folder, **options)


@contextmanager
def raising(kind, *words):
    """Expect the same error in both processes, with these words."""
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert_same(True)
    else:
        raise AssertionError(f"no {kind.__name__}")


class Line(nn.Module):
    """Appends the weights of each call to a list."""

    met: list = []

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        self.met.append((x, self.line.weight.detach().clone()))
        return self.line(x)[:, 0]


@contextmanager
def forced(seed):
    """What a process draws with is a function of the number of the part."""
    real, number = distributed.gradients, [0]

    def gradients(svi, elbo, parts):
        results = []
        for part in parts:
            torch.manual_seed(seed(number[0]))
            number[0] += 1
            results += real(svi, elbo, [part])
        return results

    def step(self, parts, lr):  # alone, the last part is not for `gradients`
        self.optim.set_lr(lr)
        with self.program.scope():
            results = gradients(self.svi, self.program.elbo, parts)
            self.optim(())
        self.program.history.steps.append(mean_parts(sums(results)), lr)

    distributed.gradients = gradients
    EagerRunner.run, alone = step, EagerRunner.run
    try:
        yield
    finally:
        distributed.gradients, EagerRunner.run = real, alone


# --- gradients ---

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SAME_NOISE = [lambda number: number] * 2
TWO_DRAWS = [lambda number: 2 * number + rank(), lambda number: number]
SGD = {"optimizer": torch.optim.SGD, "lr": 1e-3, "lr_schedule": "constant", "epochs": 1}


def grown(together):
    """Learned noise, a learned prior, and a layer that is not random."""
    return make(seed=0, prior=bbb.priors.LearnedScaleMixture(), where=["0"])


def compare(seeds, options, alone, build=grown, **more):
    """Parameters and record of this run in both processes, and of that in one."""
    runs = []
    for context, seed, own in ((nullcontext(), seeds[0], options), (bbb.alone(), seeds[1], alone)):
        with context, forced(seed):
            pair = build(not runs)
            history = fit(pair, seed=3, **{**SGD, **own, **more})
            if not runs:
                assert_same(digest(bbb.predict(*pair, values()[0], num_samples=6, seed=0).mean))
        trained = [x.detach() for m in pair[::-1] for x in m.parameters() if x.requires_grad]
        runs.append((trained, history))
    (ours, history), (theirs, expected) = runs
    torch.testing.assert_close(ours, theirs, **EXACT)
    for record, reference in ((history, expected), (history.steps, expected.steps)):
        for name in ("loss", "kl", "log_prior", "log_guide", "nll", "kl_weight", "lr"):
            a, b = (torch.tensor(getattr(r, name)) for r in (record, reference))
            torch.testing.assert_close(a, b, **EXACT)


@check
def with_one_noise_two_processes_are_one_that_has_the_whole_minibatch():
    """Seven examples in minibatches of 4, 3 (shares 2 + 2, 2 + 1), or of 6, 1 (3 + 3, 1 + 0)."""
    for options in (
        {},
        {"loss": "mean_field", "kl_schedule": "blundell"},
        {"num_particles": 2, "estimator": "stl"},
        {"sample_weight": torch.arange(N) % 3},
    ):
        for batch_size in (6, 4):
            same = {"batch_size": batch_size, **options}
            compare(SAME_NOISE, same, same)


@check
def with_two_draws_two_processes_are_one_that_takes_both_one_after_the_other():
    """Minibatches of 4, 3 as parts of 2, 2 and 2, 1, also with four parts to a step."""
    halves = {"batch_size": 4}, {"batch_size": 2, "accumulate": 2}
    compare(TWO_DRAWS, *halves, epochs=2)
    compare(TWO_DRAWS, {"batch_size": 2, "accumulate": 2}, {"batch_size": 1, "accumulate": 4})
    compare(TWO_DRAWS, *halves, optimizer="ivon")  # estimates of the Hessian are added, too


def adapted(sharded):
    """Adapters on a network whose frozen weights are in one process, or in shards (FSDP2)."""
    pyro.set_rng_seed(0)
    network = bbb.adapt(plain(), 2)
    model = bbb.BayesianModel(network, likelihoods.Gaussian.learned(), num_data=N)
    guide = bbb.AutoSoftplusNormal(model)
    if sharded:
        mesh = init_device_mesh("cpu", (SIZE,))
        trained = {x for x in model.parameters() if x.requires_grad}
        for module in (*network.children(), network):
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh, ignored_params=trained)
        first = next(iter(network.children()))._parameters["weight"]
        assert first.to_local().numel() == 3 * 4 / SIZE
    return model, guide


@check
def adapters_on_a_network_in_shards_are_those_on_a_whole_one():
    halves = {"batch_size": 4}, {"batch_size": 2, "accumulate": 2}
    compare(TWO_DRAWS, *halves, adapted, lr=0.01)
    with raising(ValueError, "frozen weights must be whole to be saved, got shards"):
        bbb.save(Path("none"), *adapted(sharded=True))


# --- runs ---


def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


@check
def parameters_buffers_and_records_are_the_same():
    cases = {
        "ensemble": ({"guide": "ensemble"}, {"accumulate": 2, "batch_size": 2}),
        "laplace": ({"guide": "laplace"}, {}),
        "buffers": ({"layers": batch_norm}, {"optimizer": torch.optim.RAdam, "batch_size": 7}),
    }
    for name, (build, options) in cases.items():
        pair = make(**build)
        assert len(set(all_of(state(pair)))) > 1, name
        history = fit(pair, **options)
        assert_same((name, state(pair), record(history), history.seconds))
        assert len(history) == 2 and all(map(math.isfinite, history.steps.loss)), name


@check
def each_process_has_draws_of_its_own():
    for data in (None, DataLoader(Met(), 4, shuffle=True)):
        Line.met = []
        fit(make(layers=Line, seed=0), data, batch_size=4)
        drawn = [all_of(digest(weights)) for _, weights in Line.met[-4:]]
        assert len({d for pair in drawn for d in pair}) == 8


@check
def outside_of_a_run_random_numbers_stay_the_same_and_go_on():
    torch.manual_seed(5)
    first, second = make(seed=0), make(seed=0)
    torch.manual_seed(5)
    fit(first)
    assert_same(digest(torch.get_rng_state()))
    fit(second)
    assert state(first) != state(second)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    fit(first, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


class Poisoned(likelihoods.Gaussian):
    """Not finite at the third pass, in the second process."""

    passes = 0

    def arguments(self, outputs):
        arguments = super().arguments(outputs)
        Poisoned.passes += self.training  # those before are checks
        if rank() == 1 and Poisoned.passes == 3:
            return arguments | {"loc": arguments["loc"] * math.nan}
        return arguments


@check
def a_step_that_is_not_finite_in_one_process_is_none_in_any():
    Poisoned.passes = 0
    pair = make(like=Poisoned, layers=batch_norm)
    history = fit(pair, nonfinite="skip", batch_size=7, epochs=4)
    assert history.skipped == [3] and len(history.steps) == 3
    assert_same((state(pair), record(history)))
    Poisoned.passes = 0
    pair = make(like=Poisoned, layers=batch_norm)
    with raising(bbb.NonFiniteError, "loss", "step 3", "obs"):
        fit(pair, batch_size=7, epochs=4)
    assert_same(state(pair))


@check
def one_process_may_end_the_training():
    pair = make()
    history = fit(pair, epochs=5, callbacks=[lambda event: rank() == 1 and event.epoch == 2])
    assert len(history) == 3
    assert_same((state(pair), record(history)))

    def interrupt(event):
        if rank() == 1 and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    pair = make()
    history = fit(pair, epochs=5, callbacks=[interrupt])
    assert history.interrupted and len(history.steps) == 5
    assert_same((state(pair), record(history)))


@check
def processes_stop_at_the_same_epoch_with_the_same_parameters():
    pair = make()
    held_out = values()[0], -3 * values()[1]  # which training makes ever less probable
    how = {"validation": held_out, "patience": 1, "epochs": 20, "lr": 0.1}
    history = fit(pair, **how)
    assert len(history.validation_loss) == len(history) == history.best_epoch + 2 < 20
    assert_same((state(pair), record(history)))
    loader = DataLoader(TensorDataset(*values()), sampler=DistributedSampler(values()[0]))
    with raising(ValueError, "validation must be the same in every process"):
        fit(make(), **how | {"validation": loader})


@check
def what_cannot_be_shared_is_refused_by_all():
    with raising(ValueError, "2 processes needs a torch optimiser, got a PyroOptim"):
        fit(make(), optimizer=pyro.optim.Adam({"lr": 0.1}))
    model, guide = make()
    with raising(ValueError, "2 processes needs a guide that is a module"):
        fit((model, lambda *args: guide(*args)))
    with raising(ValueError, "rank 1 differs: lr: 0.1 on rank 0, 0.2 on rank 1"):
        fit(make(), lr=0.1 * (1 + rank()))
    x, y = values()
    with raising(ValueError, "content of data: "):
        fit(make(), (x + rank(), y))


# --- loaders ---


class Met(TensorDataset):
    """Rows with their numbers as targets."""

    def __init__(self):
        super().__init__(values()[0], torch.arange(float(N)))


class Stream(IterableDataset):
    """Every second row, from this process's."""

    def __init__(self, start, step):
        self.rows = list(Met())[start::step]

    def __iter__(self):
        return iter(self.rows)


def rows_of(data, **options):
    """The rows of each step by process, and the run."""
    met, real = [], distributed.gradients

    def gradients(svi, elbo, parts):
        met.append([int(row) for _, y, _ in parts for row in y])
        return real(svi, elbo, parts)

    distributed.gradients = gradients
    pair = make()
    try:
        history = fit(pair, data, **options)
    finally:
        distributed.gradients = real
    assert_same((state(pair), record(history)))
    return list(zip(*all_of(met), strict=True)), history


@check
def a_loader_gives_its_minibatches_to_all_and_each_takes_its_share():
    def noisy(pairs):  # new noise in every batch, the same in both processes
        x, y = (torch.stack(values) for values in zip(*pairs, strict=True))
        return x + 0.1 * torch.randn_like(x), y

    options = {"batch_size": 4, "shuffle": True}
    for extra in ({}, {"collate_fn": noisy}, {"generator": torch.Generator().manual_seed(3)}):
        steps, history = rows_of(DataLoader(Met(), **options, **extra), accumulate=1)
        assert len(steps) == 4 and [len(a) - len(b) for a, b in steps] == [0, 1, 0, 1]
        epochs = [sorted(sum(map(sum, steps[i : i + 2], [[]] * 2), [])) for i in (0, 2)]
        assert epochs == [list(range(N))] * 2 and steps[0] != steps[2]
        assert math.isclose(sum(history.steps.kl_weight), 2.0, rel_tol=1e-15)
    with raising(ValueError, "the same minibatches"):
        fit(make(), DataLoader(Met(), generator=torch.Generator().manual_seed(rank()), **options))


@check
def a_distributed_sampler_or_a_stream_gives_each_its_own():
    sampler = DistributedSampler(Met(), SIZE, rank(), drop_last=False)
    steps, history = rows_of(DataLoader(Met(), 2, sampler=sampler))
    assert [len(a) + len(b) for a, b in steps] == [4, 4, 4, 4]  # seven, and one to fill up
    assert steps[:2] != steps[2:]  # another order in the second epoch
    assert set(sum(map(sum, steps[:2], [[]] * 2), [])) == set(range(N))
    assert history.steps.kl_weight == [4 / N] * 4

    steps, history = rows_of(DataLoader(Stream(rank(), SIZE), 2), epochs=1)
    assert steps == [([0, 2], [1, 3]), ([4, 6], [5])]
    assert history.steps.kl_weight == [4 / N, 3 / N]
    steps, _ = rows_of(DataLoader(Stream(rank(), SIZE), 1), epochs=1)
    assert steps[-1] == ([6], [])  # the second has no more, and takes part
    steps, history = rows_of(DataLoader(Stream(rank(), SIZE), 1), epochs=1, accumulate=3)
    assert steps == [([0, 2, 4], [1, 3, 5]), ([6], [])] and history.steps.kl_weight[1] == 1 / N

    with raising(ValueError, "its own shard of a stream"):
        fit(make(), DataLoader(Stream(0, 1), 2))
    with raising(ValueError, f"rank {rank()} of 2, got one of rank 0 of 1"):
        fit(make(), DataLoader(Met(), 2, sampler=DistributedSampler(Met(), 1, 0)))
    with raising(ValueError, "the same in every process"):
        fit(make("laplace"), DataLoader(Stream(rank(), SIZE), 2))


# --- predictions ---


@check
def draws_are_shared_and_everyone_has_them_all():
    pair = make(seed=0)
    x = values()[0]
    options = ({"num_samples": 4}, {"num_samples": 1}, {"num_samples": 3, "batch_size": 2})
    for extra in (*options, {"estimator": "local_reparam", "num_samples": 5}):
        for seed in (None, 4):
            locs = bbb.predict(*pair, x, seed=seed, **extra).components.loc
            assert locs.shape[:2] == (extra["num_samples"], N)
            assert len(locs.unique(dim=0)) == len(locs)
            assert_same(digest(locs))
        assert torch.equal(locs, bbb.predict(*pair, x, seed=4, **extra).components.loc)
    with bbb.alone():
        alone = bbb.predict(*pair, x, num_samples=1, seed=rank()).components.loc
    assert len(set(all_of(digest(alone)))) == 2


@check
def given_draws_are_used_as_by_one_process_and_members_as_often():
    model, guide = make(seed=0)
    draws, x = guide.sample_posterior(5), values()[0]
    draws = {name: all_of(values)[0] for name, values in draws.items()}
    for number in (1, 4, 5):
        ours = bbb.predict(model, draws, x, num_samples=number).components.loc
        with bbb.alone():
            theirs = bbb.predict(model, draws, x, num_samples=number).components.loc
        assert torch.equal(ours, theirs)
    model, ensemble = make("ensemble", seed=0, layers=Line)
    for number, member in enumerate(ensemble.members):
        for name, parameter in member.named_parameters():
            nn.init.constant_(parameter, -40.0 if "rho" in name else number)
    draws = 2 * ensemble.size - 1
    loc = bbb.predict(model, ensemble, torch.ones(1, 3), num_samples=draws).components.loc
    counts = (loc.flatten() / 3).round().int().bincount(minlength=ensemble.size)
    assert counts.tolist() == [2] * (ensemble.size - 1) + [1]


# --- checkpoints ---

EPOCHS = 4


class Stop(Exception):
    """As if the process ended."""


def begin(folder, data=None, **options):
    """Ends after two epochs, two steps after a checkpoint in the middle of the second."""

    def stop(event):
        if event.epoch == 1:
            raise Stop

    pair = make(seed=0)
    torch.manual_seed(8)
    try:
        fit(pair, data, folder, epochs=EPOCHS, callbacks=[stop], **options)
    except Stop:
        return
    raise AssertionError("did not stop")


def at(folder):
    return _archive.read(folder, "fit")[0]["progress"]


@check
def a_run_resumes_to_the_bit(folder):
    own = {"sampler": DistributedSampler(Met(), SIZE, rank()), "batch_size": 2}
    forms = {
        "memory": (lambda: None, 3),
        "shared": (lambda: DataLoader(Met(), batch_size=4, shuffle=True), 3),
        "own": (lambda: DataLoader(Met(), **own), None),
    }
    for name, (form, every) in forms.items():
        pair = make(seed=0)
        torch.manual_seed(8)
        expected = fit(pair, form(), epochs=EPOCHS)
        following = torch.rand(()).item()
        begin(folder / name, form(), checkpoint_every=every)
        assert_same(at(folder / name)["batch"] == (1 if every else 0))
        again = make(seed=1)
        torch.manual_seed(8)
        history = fit(again, form(), folder / name, epochs=EPOCHS, checkpoint_every=every)
        assert record(history) == record(expected) and state(again) == state(pair), name
        assert torch.rand(()).item() == following
        assert_same((record(history), state(again)))


@check
def a_checkpoint_of_two_goes_on_in_one_and_the_other_way_round(folder):
    options = {"epochs": EPOCHS, "checkpoint_every": 3, "seed": 1}
    of_two, of_one = folder / "two", folder / "one"
    begin(of_two, checkpoint_every=3, seed=1)
    if rank() == 0:
        with bbb.alone():
            history = fit(make(seed=0), folder=of_two, **options)
            assert len(history) == EPOCHS and at(of_two)["finished"]
            begin(of_one, checkpoint_every=3, seed=1)
    group.barrier()
    pair, streams = make(seed=0), []
    callbacks = [lambda event: streams.append(digest(torch.get_rng_state()))]
    history = fit(pair, folder=of_one, callbacks=callbacks, **options)
    assert len(history) == EPOCHS and len(history.steps) == 2 * EPOCHS
    assert len(set(all_of(streams[0]))) == 2
    assert_same((state(pair), record(history)))
    again = make(seed=0)  # a finished one of one process comes back in both
    finished = fit(again, folder=of_two, **options)
    assert len(finished) == EPOCHS
    assert_same((state(again), record(finished)))


@check
def a_disk_that_is_full_is_an_error_in_all(folder):
    real = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    os.fsync = full
    try:
        with raising(bbb.CheckpointError, "cannot be written", "No space left"):
            fit(make(), folder=folder / "full")
    finally:
        os.fsync = real
    (folder / "file").touch()
    with raising(bbb.CheckpointError, "cannot be read"):
        fit(make(), folder=folder / "file")
    begin(folder / "damaged")
    if rank() == 0:
        (folder / "damaged" / "spec.json").write_text("{}")
    group.barrier()
    with raising(bbb.LoadError, "spec.json"):
        fit(make(), folder=folder / "damaged")


# --- processes ---


@check
def parameters_are_the_same_after_three_epochs_of_digits(folder):
    torch.set_default_dtype(torch.float32)
    calm = killed.run(folder if rank() == 0 else Path("/nowhere"))  # no folder but the first's
    torch.set_default_dtype(torch.float64)
    assert_same(killed.ended(calm))
    model, guide, history = calm
    assert len(history.steps) == 18 and history.loss[-1] < history.loss[0]
    (folder / f"{rank()}.json").write_text(killed.ended(calm))


def make_all(folder):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fit(make(), epochs=1)
    assert group.is_initialized() and group.get_world_size() == SIZE
    errors = {}
    for name, function in CHECKS.items():
        if len(sys.argv) > 2 and not any(word in name for word in sys.argv[2:]):
            continue
        own = folder / name
        own.mkdir(exist_ok=True)
        try:
            function(*[own] * function.__code__.co_argcount)
            errors[name] = ""
        except BaseException:
            errors[name] = traceback.format_exc()
        (folder / f"{rank()}.json").write_text(json.dumps(errors))
        if errors[name]:
            print(rank(), errors[name], file=sys.stderr, flush=True)
            os._exit(1)  # the other one would wait for ever
    shutil.rmtree(folder / "none", ignore_errors=True)
    os._exit(0)


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE)}
    children = []
    for number in range(SIZE):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        child = os.fork()
        if child == 0:
            make_all(Path(sys.argv[1]))
        children.append(child)
    for _ in children:
        child, status = os.wait()
        if status:
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    main()
