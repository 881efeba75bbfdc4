# SPDX-License-Identifier: Apache-2.0
"""Settings, repeats and report of an experiment, and its folder of results.

A run writes into its folder ``config.json`` at the start, pictures as PNG files, ``metrics.json``
at the end, and ``report.html``, which needs no other file and no network.
"""

import atexit
import base64
import dataclasses
import hashlib
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import joblib
import matplotlib.pyplot as plt
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from _helpers.tables import Table, over_seeds
from pyro_bbb import plots

HERE = Path(__file__).parent
PACKAGES = ("pyro-bbb", "pyro-ppl", "torch", "torchvision", "numpy", "scikit-learn", "matplotlib")
Data: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings of every experiment."""

    seed: int = 0
    """Seed of initial values, minibatches and posterior samples. Splits of real data are fixed."""
    threads: int = 1
    """Processor threads of each process. Small networks gain nothing from more."""
    smoke: bool = False
    """Run everything on tiny sizes and without downloads, to test that it works."""
    output: Path = Path("results/NAME")
    """Folder for results, from which an interrupted run goes on; NAME is the experiment's."""

    def __post_init__(self) -> None:
        """Insert the name of the experiment's file into the folder's."""
        name = Path(inspect.getfile(type(self))).stem
        object.__setattr__(self, "output", Path(str(self.output).replace("NAME", name)))

    @property
    def all_seeds(self) -> range:
        """The consecutive seeds that a run repeats with."""
        number = getattr(self, "repeats", getattr(self, "seeds", 1))
        return range(self.seed, self.seed + number)


@dataclass(frozen=True)
class RepeatedSettings(Settings):
    """Settings of experiments that run once unless told otherwise."""

    repeats: int = 1
    """Runs with consecutive seeds; tables show their means, figures the first."""


@dataclass(frozen=True)
class SeveralSeeds(Settings):
    """Settings of experiments that run with several seeds."""

    seeds: int = 3
    """Runs with consecutive seeds; tables show their means and standard deviations."""


@dataclass(frozen=True)
class DataSettings(Settings):
    """Settings of experiments on data sets from files."""

    data_root: Path | None = None
    """Folder of the data sets; by default $PYRO_BBB_DATA, else images are downloaded."""


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """End the program if an option has a name that is not known, which would be passed over."""
    known = list(dict.fromkeys(known))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")


def chosen(names: Iterable[str], wanted: tuple[str, ...]) -> list[str]:
    """Return those of ``names`` that are wanted; all if none is."""
    return [name for name in names if not wanted or name in wanted]


@dataclass(frozen=True)
class Picture:
    """PNG file with a caption."""

    path: Path
    caption: str

    @property
    def data(self) -> str:
        """The file as base64 text."""
        return base64.b64encode(self.path.read_bytes()).decode("ascii")


ALWAYS_FREE = ("seed", "seeds", "repeats", "output", "data_root", "threads")


@dataclass
class Run:
    """One run of an experiment with its settings, and the folder ``output`` it writes to.

    Of several processes started by torchrun, the others are silent and write to a temporary
    folder.
    """

    config: Any
    free: tuple[str, ...] = ()
    """Settings that do not decide the figures of a seed, beyond those of every experiment."""

    def __post_init__(self) -> None:
        """Limit the threads, make the folder and record the configuration."""
        self.started = time.perf_counter()
        torch.set_num_threads(self.config.threads)
        self.folder = self.config.output
        if os.environ.get("RANK", "0") != "0":
            self.folder = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, self.folder)
            sys.stdout = open(os.devnull, "w")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("config.json", dataclasses.asdict(self.config))

    @property
    def cells(self) -> Path:
        """Folder for figures of single seeds, shared by runs that differ in nothing but `free`."""
        settings = dataclasses.asdict(self.config)
        for name in (*ALWAYS_FREE, *self.free):
            settings.pop(name, None)
        return self.folder / "seeds" / fingerprint(settings)

    def repeat(
        self, one: Callable[[int], dict[str, Any]], *where: str, cache: bool = True
    ) -> dict[str, Any]:
        """Run ``one(seed)``, which makes figures for JSON, for all seeds; the first one here.

        The others run wherever `joblib.parallel_config` says: on more cores, or by the backends
        "ray" and "dask" on a cluster. Finished seeds are in files below `cells`, in the folders
        ``where``, from which a run goes on, unless ``cache`` is False.

        Returns:
            ``seeds``: the figures by seed; ``mean`` and, of two or more, ``sd``: of every number,
            in the same nested dicts.
        """
        launched = os.environ.get("WORLD_SIZE", "1") != "1"  # processes must do the same
        parallel = joblib.Parallel()
        if launched and parallel.n_jobs != 1:
            raise ValueError("seeds can be spread by joblib, or each over processes, but not both")
        folder = self.cells.joinpath(*where) if cache and not launched else None
        saved = partial(_figures, one, folder, ", ".join(where))
        first, *further_seeds = self.config.all_seeds
        if parallel.n_jobs == 1:
            records = [saved(first), *map(saved, further_seeds)]
        else:  # elsewhere first: what is sent there must not hold what the first leaves here
            further_records = parallel(joblib.delayed(saved)(seed) for seed in further_seeds)
            records = [saved(first), *further_records]
        seeds = map(str, self.config.all_seeds)
        return {"seeds": dict(zip(seeds, records, strict=True))} | over_seeds(records)

    def compare(
        self,
        one: Callable[[str, int], dict[str, Any]],
        names: Iterable[str],
        wanted: tuple[str, ...],
        *where: str,
    ) -> dict[str, dict[str, Any]]:
        """Run ``one(name, seed)`` by `repeat` for the names that are wanted, all if none is."""
        return {
            name: self.repeat(partial(one, name), *where, name) for name in chosen(names, wanted)
        }

    def spread(
        self,
        jobs: Mapping[str, Callable[[], dict[str, Any]]],
        workers: int = 1,
        folder: Path | None = None,
    ) -> list[dict[str, Any]]:
        """Run jobs by the names of their files in a folder, by default `cells`, by processes.

        A job that has its file is not run again.
        """
        parallel = joblib.Parallel(n_jobs=workers, return_as="generator")
        threads, folder = self.config.threads, folder or self.cells
        calls = (joblib.delayed(_job)(threads, folder / f"{k}.json", f) for k, f in jobs.items())
        return list(tqdm(parallel(calls), total=len(jobs), dynamic_ncols=True))

    def picture(self, figure: Figure, name: str, caption: str) -> Picture:
        """Save a figure as ``name.png`` and close it."""
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=40 if self.config.smoke else 200)
        plt.close(figure)
        return Picture(path, caption)

    def curves(
        self,
        name: str,
        caption: str,
        panels: Mapping[str, Mapping[str, Sequence[Any]]],
        **axes: Any,
    ) -> Picture:
        """Plot lines ``(x, y)`` or ``(x, y, low, high)`` by label, a panel for each title.

        Further options are those of `matplotlib.axes.Axes.set`.
        """
        with plots.style():
            size = (4.4 * len(panels) + 1, 3.6)
            figure, row = plt.subplots(1, len(panels), figsize=size, squeeze=False)
            for ax, (title, lines) in zip(row[0], panels.items(), strict=True):
                for (label, (x, y, *band)), style in zip(lines.items(), cycle(("-", "--", "-."))):
                    (line,) = ax.plot(x, y, style, label=label)
                    if band:
                        ax.fill_between(x, *band, color=line.get_color(), alpha=0.2, lw=0)
                ax.set(title=title, **axes)
                ax.label_outer()
            handles, labels = row[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        return self.picture(figure, name, caption)

    def report(
        self,
        doc: str | None,
        metrics: dict[str, Any],
        tables: Sequence[Table],
        pictures: Sequence[Picture] = (),
        remark: str = "",
    ) -> dict[str, Any]:
        """Print the tables; write ``report.html`` and ``metrics.json``, whose content is returned.

        That is the metrics, and where, when and with what they were made. The report begins with
        the experiment's docstring and a remark.
        """
        record = metrics | {
            "seed": self.config.seed,
            "seconds": round(time.perf_counter() - self.started, 1),
            "commit": commit(),
            "python": platform.python_version(),
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }
        self._write("metrics.json", record)
        loader, undefined = FileSystemLoader(HERE), StrictUndefined
        jinja = Environment(loader=loader, autoescape=True, undefined=undefined, trim_blocks=True)
        html = jinja.get_template("report.html").render(
            doc=(doc or "").strip().split("\n", 1),
            remark=remark,
            tables=tables,
            pictures=pictures,
            record=record,
            config=dataclasses.asdict(self.config),
        )
        path = self.folder / "report.html"
        path.write_text(html, encoding="utf-8")
        for table in tables:
            print(f"\n{table}")
        print(f"\n{record['seconds']} s; report: {path}")
        return record

    def _write(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, default=str, allow_nan=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")


def _figures(
    one: Callable[[int], dict[str, Any]], folder: Path | None, what: str, seed: int
) -> dict[str, Any]:
    """Return the figures of a seed, from its file if it has one, and print the numbers."""
    make = partial(one, seed)
    record = make() if folder is None else cached(folder / f"{seed}.json", make)
    numbers = [f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float)]
    print(f"{what}{', ' * bool(what)}seed {seed}: {', '.join(numbers)}", flush=True)
    return record


def _job(threads: int, path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return cached(path, make)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(f".{os.getpid()}")
    partial_path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    partial_path.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def cached(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a JSON file, made and written first if it is missing."""
    if not path.exists():
        write_json(path, make())
    return read_json(path)


def fingerprint(settings: dict[str, Any]) -> str:
    """Return a name of the settings, this commit and these versions of the packages."""
    text = json.dumps([settings, versions(), commit()], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that decide the figures, those that are installed."""
    results = {}
    for name in packages:
        try:
            results[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return results


def commit() -> str | None:
    """Return the source's git commit, with ``+`` if files have changed; None outside git."""
    try:
        head, changes = (
            subprocess.run(
                ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
            ).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changes.strip() else "")
