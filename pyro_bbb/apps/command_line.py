# SPDX-License-Identifier: Apache-2.0
"""The commands of ``pyro-bbb`` and their options, checked before torch is imported.

Exit codes: 0 success; 1 an error that is no fault of the input; 2 a wrong option or bad data;
130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, TypeAlias

import tyro

from pyro_bbb._utils.extras import MissingExtra, extra
from pyro_bbb._utils.version import __version__

Argument: TypeAlias = tyro.conf.Positional[Path]
Missing: TypeAlias = Literal["refuse", "fill"]
Task: TypeAlias = Literal["regression", "classification"]
Guide: TypeAlias = Literal[
    "softplus_normal",
    "normal",
    "low_rank",
    "full_rank",
    "flow",
    "delta",
    "laplace",
    "swag",
    "rank1_ensemble",
]
PARQUET = (".parquet", ".pq")
BAD_INPUT, INTERRUPTED = 2, 130
DESCRIPTION = """Bayesian neural networks for tables: predictions that say how certain they are.

pyro-bbb --version prints the version.

Shell completion: pyro-bbb --tyro-write-completion bash FILE (or zsh, tcsh), then source FILE."""
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of options
    "held_out": ("between 0 and 1", lambda x: 0 < x < 1),
    "answered": ("between 0 and 1", lambda x: 0 < x < 1),
    "level": ("between 0 and 1", lambda x: 0 < x < 1),
    "fraction": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "hidden": ("at least 1", lambda x: all(units >= 1 for units in x)),
    "epochs": ("at least 1", lambda x: x is None or x >= 1),
    "seconds": ("positive", lambda x: x > 0),
    "temperature": ("positive and finite", lambda x: x is None or 0 < x < float("inf")),
    "ensemble": ("at least 1", lambda x: x is None or x >= 1),
    "seed": ("in [0, 2**32)", lambda x: 0 <= x < 2**32),
    "separator": ("one character", lambda x: x is None or len(x.encode()) == 1),
}


class BadInput(ValueError):
    """Unusable input; the message names the place and the remedy."""


class BadRow(BadInput):
    """An unusable value in a row of a table, the first row being 0."""

    def __init__(self, value: str, row: int, remedy: str) -> None:
        super().__init__(f"{value} in row {row + 1}{remedy}")
        self.value: str = value
        self.row: int = row
        self.remedy: str = remedy


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of the commands, with the options that all of them take."""

    json: bool = False
    """Print the result as one JSON object; messages and progress go to standard error."""
    quiet: bool = False
    """Print no messages and no progress."""

    module: ClassVar[str] = "table_commands"  # of the function, of the command's name
    extra: ClassVar[str] = "cli"  # installs what the module imports

    @property
    def shows_progress(self) -> bool:
        """Return whether a progress bar is shown."""
        return not self.quiet and sys.stderr.isatty()

    def say(self, words: str) -> None:
        """Print a line for a person."""
        if not self.quiet:
            print(words, file=sys.stderr if self.json else sys.stdout)

    def run(self) -> dict[str, Any]:
        """Do the work, and return the result as JSON has it."""
        try:
            self.check()
        except (OSError, ValueError) as error:  # also of a path that no file can have
            raise BadInput(str(error)) from error
        with extra(self.extra):
            self.read()
            # this module imports torch
            command = resolve_name(f"pyro_bbb.apps.{self.module}:{type(self).__name__.lower()}")
        result: dict[str, Any] = command(self)
        return result

    def read(self) -> None:
        """Read the table and raise `BadInput` for what is wrong with it, before slow imports."""

    def check(self) -> None:
        """Raise `BadInput` for bad options."""
        for option, (expected, holds) in _RANGES.items():
            if hasattr(self, option) and not holds(value := getattr(self, option)):
                shown = " ".join(map(str, value)) if option == "hidden" else value
                raise BadInput(f"--{option.replace('_', '-')} must be {expected}, got {shown}")
        model, data = getattr(self, "model", None), getattr(self, "data", None)
        if model is not None and not (model / "spec.json").is_file():
            reason = "it has no spec.json" if model.is_dir() else "there is no such folder"
            raise BadInput(f"{model} holds no model: {reason}")
        if data is not None and not data.is_file():
            raise BadInput(f"{data}: there is no such file")


@dataclass(frozen=True, kw_only=True)
class Reading(Command):
    """Base of the commands that read a table."""

    separator: str | None = None
    """Character between the values of a CSV file; by default recognised."""
    decimal: Literal[".", ","] | None = None
    """Decimal sign of a CSV file; by default recognised, and refused where it cannot be."""

    @cached_property
    def file(self) -> Any:
        """Return the `TableFile` at ``data``."""
        return resolve_name("pyro_bbb.apps.csv_format:read_file")(
            vars(self)["data"], self.separator
        )

    def read(self) -> None:
        """Read the file, if there is one."""
        if vars(self)["data"] is not None:
            _ = self.file

    def run(self) -> dict[str, Any]:
        """Do the work; an error about a row names the line of the file."""
        try:
            return super().run()
        except BadRow as error:
            raise BadInput(f"{error.value} in {self.place(error.row)}{error.remedy}") from error

    def place(self, row: int) -> str:
        """Return the line of a CSV file where a row begins, or the row of another file."""
        lines = self.file.lines
        return f"line {lines[row]}" if lines else f"row {row + 1}"


@dataclass(frozen=True, kw_only=True)
class Writing(Reading):
    """Base of those that also write a file or a folder at ``out``."""

    out: Path
    force: bool = False
    """Replace what is at --out already."""

    folder: ClassVar[bool] = False  # whether it is a folder

    def check(self) -> None:
        """Check that ``--out`` can be written and that no file is lost."""
        super().check()
        _check_writable("--out", self.out, folder=self.folder)
        if not self.folder and (not self.out.parent.is_dir() or self.out.is_dir()):
            raise BadInput(f"--out must be a file in a folder that exists, got {self.out}")
        out, inputs = self.out.resolve(), [getattr(self, x, None) for x in ("data", "model")]
        if out in [path.resolve() for path in inputs if path is not None]:
            raise BadInput(f"--out must not be the input {self.out}, choose another name")
        occupied = any(out.iterdir()) if out.is_dir() else out.exists()
        if occupied and not self.force:
            raise BadInput(
                f"--out {self.out} exists; choose another name, or --force to replace it"
            )


@dataclass(frozen=True, kw_only=True)
class Train(Writing):
    """Train a network on a table and save it as a folder.

    Text columns are encoded. A part of the rows is held out: they score the model, and choose the
    uncertainty (total or epistemic) and its limit above which a prediction is refused.

    Example: pyro-bbb train patients.csv --target outcome --out model
    """

    data: Argument
    """CSV (with a header) or Parquet file."""
    target: str
    """Name of the column to predict."""
    out: Path
    """Folder for the model."""
    task: Task | None = None
    """Kind of the target; by default recognised, and printed."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    keep: tuple[str, ...] = ()
    """Columns to take although they look like an index, identifier or date, or like numbers with
    slips; the latter become text."""
    dates: bool = False
    """Take dates: as days since 1970, month and weekday. By default they are left out."""
    missing: Missing = "refuse"
    """Whether missing values are an error, or filled (numbers by the median) and marked."""
    missing_values: tuple[str, ...] = ()
    """Texts that mean a missing value, besides empty ones, NA, null and the like."""
    hidden: tuple[int, ...] = (50,)
    """Units of each hidden layer."""
    prior: str | None = None
    """Name of the weights' prior; by default that of the estimators."""
    noise: str | None = None
    """Noise of a regression: learned, latent, heteroscedastic, student_t, poisson or
    negative_binomial."""
    inference: Literal["auto", "wide", "chains", "variational"] | None = None
    """By default auto: a regression without options of network and training integrates an
    infinitely wide network in closed form (wide); other tables are sampled by chains up to 5,000
    rows and weights, without options of training; what is left is variational."""
    seconds: float = 30.0
    """The most seconds that chains may take."""
    guide: Guide | None = None
    """Family of the posterior that variational inference trains, by default softplus_normal; with
    --ensemble that of each member, by default delta."""
    ensemble: int | None = None
    """Number of networks to train, each from its own start, whose predictions are averaged."""
    temperature: float | None = None
    """Weight of the prior against the data; 1, the default, is Bayes' rule, and below it the
    posterior is narrower."""
    epochs: int | None = None
    """Passes over the rows; by default as many as suit the table."""
    held_out: float = 0.1
    """Fraction of the rows that are held out."""
    answered: float = 0.95
    """Fraction of the rows held out that are not refused, the most certain ones."""
    level: float = 0.9
    """Probability inside the intervals (or sets of classes) that it predicts."""
    seed: int = 0
    """Seed of the split, the training and the predictions."""

    folder: ClassVar[bool] = True

    @cached_property
    def table(self) -> Any:
        """Return the `TrainingTable` that the file and the options make."""
        return resolve_name("pyro_bbb.apps.column_encoding:training_table")(self)

    def read(self) -> None:
        """Read the file, and choose the task and the columns."""
        _ = self.table


@dataclass(frozen=True, kw_only=True)
class Predict(Writing):
    """Write a table of predictions, a row for each row of the file.

    Of numbers: prediction, lower and upper end of the interval, aleatoric and epistemic standard
    deviation. Of classes: prediction, its probability, the set of classes that together reach the
    level, aleatoric and epistemic entropy (nats), and each class's probability. And whether the
    prediction is refused, as less certain than almost all on rows held out from training.

    Example: pyro-bbb predict model new.csv --out predictions.csv
    """

    model: Argument
    """Folder of a trained model."""
    data: Argument
    """CSV (with a header) or Parquet file."""
    out: Path
    """File for the predictions, .csv or .parquet; numbers have six digits."""
    keep: tuple[str, ...] | None = None
    """Columns of the table to copy; by default those that the model does not take, such as an
    identifier."""

    def check(self) -> None:
        """Check that a table can be written there, too."""
        if self.out.suffix not in (".csv", *PARQUET):
            raise BadInput(f"--out must end in {', '.join(('.csv', *PARQUET))}, got {self.out}")
        super().check()


@dataclass(frozen=True, kw_only=True)
class Evaluate(Reading):
    """Score a model on a table that has the target, too.

    Example: pyro-bbb evaluate model new.csv
    """

    model: Argument
    """Folder of a trained model."""
    data: Argument
    """CSV (with a header) or Parquet file."""


@dataclass(frozen=True, kw_only=True)
class Prune(Writing):
    """Remove the weights with the smallest ratio of mean to standard deviation, and save the rest.

    Example: pyro-bbb prune model --fraction 0.75 --data new.csv --out small
    """

    model: Argument
    """Folder of a trained model; it stays as it is."""
    out: Path
    """Folder for the pruned model."""
    fraction: float = 0.75
    """Fraction of the weights to remove."""
    data: Path
    """Table with the target, best of rows that were not in training: the model is scored on it
    before and after, and it sets the uncertainty above which the pruned model refuses."""

    folder: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Report(Writing):
    """Write an HTML page about a model: a verdict, scores, pictures, the least certain rows.

    The page needs no other file and no network.

    Example: pyro-bbb report model new.csv --out report.html
    """

    model: Argument
    """Folder of a trained model."""
    data: tyro.conf.Positional[Path | None] = None
    """Table with the target; without it the page has the scores of training only."""
    out: Path = Path("report.html")
    """File for the page."""

    module: ClassVar[str] = "report"


@dataclass(frozen=True, kw_only=True)
class Play(Command):
    """Open a page: draw digits, place points of a regression, rotate digits; 100 networks vote.

    The first start trains on the handwritten digits that scikit-learn brings, for about half a
    minute, while the page shows the progress, and saves the networks. Later starts load them. The
    page loads nothing from the internet.

    Example: pyro-bbb play --port 8400
    """

    model: Path | None = None
    """Folder where the networks are saved; by default in the user's cache."""
    host: str = "127.0.0.1"
    """Address of the page; 0.0.0.0 lets others in."""
    port: int = 8321
    """Port of the page."""
    no_browser: bool = False
    """Print the address of the page, and open no browser."""

    module: ClassVar[str] = "play"
    extra: ClassVar[str] = "play"

    def check(self) -> None:
        """Check that the networks can be saved, where they are to be trained."""
        if self.model is not None and not os.path.exists(self.model / "spec.json"):
            _check_writable("--model", self.model, folder=True)


COMMANDS: dict[str, Callable[..., Command]] = {
    command.__name__.lower(): command for command in (Train, Predict, Evaluate, Prune, Report, Play)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code.

    Args:
        arguments: words after the program's name; by default those of this process.

    Raises:
        SystemExit: the arguments do not parse (code 2), or ask for help (code 0).
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        print(f"pyro-bbb {__version__}")
        return 0
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="pyro-bbb",
        description=DESCRIPTION,
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        result = command.run()
    except (BadInput, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        if command.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if command.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    return INTERRUPTED if result.get("interrupted") else 0


def _check_writable(option: str, path: Path, *, folder: bool) -> None:
    """Raise `BadInput` unless a file or folder can be written, outside the folders of models."""
    try:
        out = path.resolve()
        temporary = f".{out.name}.{'x' * 8}{out.suffix}"
        with suppress(FileNotFoundError):
            (out / ("x" * 80) if folder else out.with_name(temporary)).lstat()
        nearest = next(x for x in ((out,) if folder else ()) + tuple(out.parents) if x.is_dir())
    except (OSError, ValueError) as error:
        raise BadInput(f"{option} cannot be written: {error}") from error
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(f"{option} {path} cannot be written: no permission for {nearest}")
    for parent in out.parents:
        if (parent / "spec.json").exists() and any(parent.glob("tensors-*.safetensors")):
            raise BadInput(
                f"{option} {path} is inside the model {parent}, whose files it might replace: "
                "choose another folder"
            )
