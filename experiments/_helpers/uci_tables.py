# SPDX-License-Identifier: Apache-2.0
"""Files of regression tables, and made-up ones for smoke tests."""

import os
from pathlib import Path

import numpy as np

RESERVED = ("recipe", "files", "part", "seed", "seconds", "commit", "python", "versions", "threads")
"""Keys of a run's record that are no table's name."""


def find_tables(root: Path | None, names: tuple[str, ...]) -> dict[str, Path]:
    """Files of the tables by name.

    Args:
        root: folder that holds ``NAME/data.npz`` or ``uci/NAME/data.npz``, or None for
            ``$PYRO_BBB_DATA``.
        names: which; none for all.

    Raises:
        FileNotFoundError: there is no such folder or table.
        ValueError: a name is one of `RESERVED` or no name of a folder.
    """
    given = root or os.environ.get("PYRO_BBB_DATA")
    if not given or not Path(given).is_dir():
        raise FileNotFoundError(
            f"data_root must be a folder with NAME/data.npz or uci/NAME/data.npz, got {given}"
        )
    bases = (Path(given) / "uci", Path(given))
    there = {path.parent.name: path for base in bases for path in base.glob("*/data.npz")}
    for name in names or sorted(there):
        if name in RESERVED or Path(name).name != name:
            raise ValueError(f"datasets must be names of folders, and none of {RESERVED}: {name!r}")
        if name not in there:
            found = ", ".join(sorted(there)) or "none"
            raise FileNotFoundError(f"datasets: no {name}/data.npz in {given} (there are {found})")
    if not there:
        raise FileNotFoundError(f"data_root must have NAME/data.npz, got {given} without any")
    return {name: there[name] for name in names or sorted(there)}


def made_up_tables(folder: Path) -> dict[str, Path]:
    """Two small tables for a smoke test; one has a column that does not vary."""
    rng, paths = np.random.default_rng(0), {}
    for name, unit in (("made-up-lines", 1.0), ("made-up-waves", 1e-3)):
        x = rng.normal(size=(40, 3))
        x[:, 1] = 5.0 if name == "made-up-waves" else x[:, 1]
        y = unit * (np.sin(x[:, 0]) + 0.1 * rng.normal(size=40) + 3.0)
        rows = np.stack([rng.permutation(40) for _ in range(3)])
        paths[name] = folder / name / "data.npz"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        np.savez(paths[name], X=x, y=y, train_index=rows[:, 4:], test_index=rows[:, :4])
    return paths
