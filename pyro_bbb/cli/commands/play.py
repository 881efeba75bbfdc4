"""``pyro-bbb play``: a page on which to draw digits and to place points."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyro_bbb.cli.base import Command
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput

if TYPE_CHECKING:
    from pyro_bbb.play.classifier import Classifier


@dataclass(frozen=True, kw_only=True)
class Play(Command):
    """Opens a page: draw a digit and see 100 networks vote, place points and see a band follow.

    The first start trains on the handwritten digits that scikit-learn brings, less than a minute,
    and keeps the network; later ones load it. Nothing is asked of the network outside.
    """

    model: Path | None = None
    """Folder of a saved classifier of 8x8 or 28x28 pixels and ten classes; where there is none yet,
    the trained one is kept there. By default a folder in the user's cache."""
    data_root: Path | None = None
    """Folder with MNIST/raw/*.gz: train on these instead, in a minute or two."""
    host: str = "127.0.0.1"
    """Address to answer at; 0.0.0.0 lets others in."""
    port: int = 8321
    """Port to answer at."""
    no_browser: bool = False
    """Print the address of the page, and open no browser."""

    def run(self, console: Console) -> dict[str, Any]:
        """Trains or loads, then answers until Ctrl-C."""
        try:
            from pyro_bbb.play.app import serve
        except ModuleNotFoundError as error:
            missing = f"play needs {error.name}"
            raise BadInput(f'{missing}: pip install "pyro-bbb[play]"') from error
        _require_free(self.host, self.port)
        classifier = self._classifier(console)
        console.print(f"http://{self.host}:{self.port}/ (Ctrl-C ends)")
        with suppress(KeyboardInterrupt):
            serve(classifier, host=self.host, port=self.port, show=not self.no_browser)
        return {}

    def _classifier(self, console: Console) -> Classifier:
        from pyro_bbb.data.cache import cache_folder
        from pyro_bbb.play import classifier as digits

        name = "play-digits" if self.data_root is None else "play-mnist"
        folder = self.model or cache_folder() / name
        try:
            if (folder / "spec.json").exists():
                return digits.open_saved(folder)
            if self.data_root is None:
                console.print("training on 1,797 digits of 8x8 pixels")
                found = digits.train_small(progress=console.shows_progress)
            else:
                console.print("training on 60,000 digits of 28x28 pixels")
                found = digits.train_mnist(self.data_root, progress=console.shows_progress)
            found.save(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(str(error)) from error
        console.print(f"kept in {folder}")
        return found


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot answer at {host}:{port}: {error}; try another --port") from error
