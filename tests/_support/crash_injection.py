# SPDX-License-Identifier: Apache-2.0
"""Crashes amid the calls that change files, for tests of what is then left."""

import os
from pathlib import Path


class Crash(BaseException):
    """As if the process ended here."""


def crash_at(patch, number, *, of_paths=("unlink", "open")):
    """The given one of all calls that change files does not happen, nor does any after it."""
    left = [number]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*args, **kwargs)

        return call

    for owner, names in ((os, ("replace", "fsync")), (Path, of_paths)):
        for name in names:
            patch.setattr(owner, name, counted(getattr(owner, name)))
    return left
