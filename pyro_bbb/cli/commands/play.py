"""``pyro-bbb play``: a page on which to draw digits and to place points."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyro_bbb._utils.extras import extra
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Play

if TYPE_CHECKING:
    from pyro_bbb.play.classifier import Classifier


def run(options: Play, console: Console) -> dict[str, Any]:
    """Trains or loads, then answers until Ctrl-C."""
    with extra("play"):
        from pyro_bbb.play.app import serve
    _require_free(options.host, options.port)
    classifier = _classifier(options, console)
    console.print(f"http://{options.host}:{options.port}/ (Ctrl-C ends)")
    with suppress(KeyboardInterrupt):
        serve(classifier, host=options.host, port=options.port, show=not options.no_browser)
    return {}


def _classifier(options: Play, console: Console) -> Classifier:
    from pyro_bbb.data.cache import cache_folder
    from pyro_bbb.play import classifier as digits

    name = "play-digits" if options.data_root is None else "play-mnist"
    folder = options.model or cache_folder() / name
    try:
        if (folder / "spec.json").exists():
            return digits.open_saved(folder)
        if options.data_root is None:
            console.print("training on 1,797 digits of 8x8 pixels")
            found = digits.train_small(progress=console.shows_progress)
        else:
            console.print("training on 60,000 digits of 28x28 pixels")
            found = digits.train_mnist(options.data_root, progress=console.shows_progress)
        found.save(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(str(error)) from error
    console.print(f"saved in {folder}")
    return found


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot answer at {host}:{port}: {error}; try another --port") from error
