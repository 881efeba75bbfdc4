# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb play``: a page on which to draw digits, to place points and to rotate digits."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyro_bbb._utils.extras import extra
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Play

if TYPE_CHECKING:
    from pyro_bbb.play.loading import Loading


def run(options: Play, console: Console) -> dict[str, Any]:
    """Loads the networks, or trains them behind the page; answers until Ctrl-C."""
    with extra("play"):
        from pyro_bbb.play.app import serve
    _require_free(options.host, options.port)
    loading = _loading(options, console)
    console.print(f"http://{options.host}:{options.port}/ (Ctrl-C ends)")
    with suppress(KeyboardInterrupt):
        serve(loading, host=options.host, port=options.port, show=not options.no_browser)
    if loading.error is not None:
        raise BadInput(loading.error)
    return {}


def _loading(options: Play, console: Console) -> Loading:
    """The networks, opened, or in training while the page is shown."""
    from pyro_bbb.data.cache import cache_folder
    from pyro_bbb.play.loading import ERRORS, Loading

    name = "play-digits" if options.data_root is None else "play-mnist"
    loading = Loading(options.model or cache_folder() / name, options.data_root)
    try:
        if loading.is_saved(both=options.model is None):
            loading.open()
            return loading
        loading.require_data()
    except ERRORS as error:
        raise BadInput(str(error)) from error
    threading.Thread(target=_train, args=(loading, console), daemon=True).start()
    return loading


def _train(loading: Loading, console: Console) -> None:
    size = "1,797 digits of 8x8" if loading.data_root is None else "60,000 digits of 28x28"
    console.print(f"training on {size} pixels; the page shows the progress")
    loading.train()
    if loading.networks is not None:
        console.print(f"saved in {loading.folder}")
    elif loading.error is not None:
        console.print(loading.error)


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot answer at {host}:{port}: {error}; try another --port") from error
