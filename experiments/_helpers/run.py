# SPDX-License-Identifier: Apache-2.0
"""Settings, tables and reports of an experiment, and its folder of results.

A run writes into its folder ``config.json`` at the start, pictures as PNG files, ``metrics.json``
at the end, and ``report.html``, which needs no other file and no network.
"""

import atexit
import base64
import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

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


@dataclass(frozen=True)
class RepeatedSettings(Settings):
    """Settings of experiments that run with several seeds."""

    repeats: int = 1
    """Runs with consecutive seeds; tables show their means, figures the first."""


@dataclass(frozen=True)
class DataSettings(Settings):
    """Settings of experiments on data sets from files."""

    data_root: Path | None = None
    """Folder of the data sets; by default $PYRO_BBB_DATA, else images are downloaded."""


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Ends the program if an option has a name that is not known, which would be passed over."""
    known = list(dict.fromkeys(known))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")


def chosen(names: Iterable[str], wanted: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that are wanted; all if none is."""
    return [name for name in names if not wanted or name in wanted]


@dataclass(frozen=True)
class Table:
    """Rows of text under a row of headings; the first column is the rows' names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """Format as aligned Markdown."""
        lines = [self.columns, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        names, *others = widths
        text = [
            _line([first.ljust(names), *map(str.rjust, rest, others)]) for first, *rest in lines
        ]
        rule = _line(["-" * names, *("-" * (width - 1) + ":" for width in others)])
        return "\n".join([text[0], rule, *text[1:]])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class Picture:
    """PNG file with a caption."""

    path: Path
    caption: str

    @property
    def data(self) -> str:
        """The file as base64 text."""
        return base64.b64encode(self.path.read_bytes()).decode("ascii")


@dataclass
class Run:
    """One run of an experiment with its settings, and the folder ``output`` it writes to.

    Of several processes started by torchrun, the others are silent and write to a temporary
    folder.
    """

    config: Any
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Limit the threads, make the folder and record the configuration."""
        torch.set_num_threads(self.config.threads)
        self.folder = self.config.output
        if os.environ.get("RANK", "0") != "0":
            self.folder = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, self.folder)
            sys.stdout = open(os.devnull, "w")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("config.json", dataclasses.asdict(self.config))

    def seeds(self, *others: str) -> Path:
        """Folder for the figures of single seeds, of runs that differ in nothing but these.

        Args:
            *others: settings that do not decide the figures, either.
        """
        settings = dataclasses.asdict(self.config)
        for name in ("seed", "repeats", "output", "data_root", "threads", "tensorboard", *others):
            settings.pop(name, None)
        return self.folder / "seeds" / fingerprint(settings)

    def picture(self, figure: Figure, name: str, caption: str) -> Picture:
        """Save a figure as ``name.png`` and close it."""
        path = self.folder / f"{name}.png"
        figure.savefig(path, dpi=40 if self.config.smoke else 200)
        plt.close(figure)
        return Picture(path, caption)

    def finish(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write ``metrics.json``: the figures, and where, when and with what they were made."""
        record = metrics | {
            "seed": self.config.seed,
            "seconds": round(time.perf_counter() - self.started, 1),
            "commit": commit(),
            "python": platform.python_version(),
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }
        self._write("metrics.json", record)
        return record

    def curves(
        self,
        name: str,
        caption: str,
        panels: Mapping[str, Mapping[str, Sequence[Any]]],
        **axes: Any,
    ) -> Picture:
        """Plot lines by label, a panel for each title, and save the figure.

        Args:
            name: of the file.
            caption: below the picture.
            panels: for each title and label ``(x, y)``, or ``(x, y, low, high)`` with a band.
            **axes: options of `matplotlib.axes.Axes.set`.
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
        title: str,
        text: str,
        record: dict[str, Any],
        tables: Sequence[Table],
        pictures: Sequence[Picture] = (),
    ) -> None:
        """Print the tables and write ``report.html``; ``record`` is the result of `finish`."""
        jinja = Environment(
            loader=FileSystemLoader(HERE),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        html = jinja.get_template("report.html").render(
            title=title,
            text=text,
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

    def _write(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, default=str, allow_nan=False)
        (self.folder / name).write_text(text + "\n", encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def cached(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a JSON file, made and written first where there is none."""
    if not path.exists():
        write_json(path, make())
    return read_json(path)


def digits() -> tuple[Data, Data]:
    """Scikit-learn's 1,797 digits: pixels ``[n, 64]`` in [0, 1] and labels ``[n]``, split for good.

    Returns:
        1,347 for training and choosing, 450 for the test alone; every class in proportion. All
        experiments use this split: no setting was chosen by any test digit.
    """
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32) / 16
    return stratified(torch.from_numpy(x), torch.from_numpy(y), 0.25)


def stratified(x: Tensor, y: Tensor, fraction: float, seed: int = 0) -> tuple[Data, Data]:
    """Random split that puts ``fraction`` of every class into the second part."""
    rows = np.arange(len(y))
    parts = train_test_split(rows, test_size=fraction, stratify=y, random_state=seed)
    first, second = ((x[part], y[part]) for part in parts)
    return first, second


def fingerprint(settings: dict[str, Any]) -> str:
    """A name for what settings decide, with this commit and these versions of the packages."""
    text = json.dumps([settings, versions(), commit()], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that decide the figures, those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The source's git commit, ending in ``+`` if files were changed since; None outside git."""
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
