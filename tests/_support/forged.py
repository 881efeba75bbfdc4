# SPDX-License-Identifier: Apache-2.0
"""Descriptions that were altered, with a hash that fits."""

import copy
import json
from hashlib import sha256

OTHERS = (None, True, 7, 2.5, "x", [], [2.5], {}, {"a": 1})  # one of each of JSON's types at least


_LEFT_OUT, _UNKNOWN = object(), object()


def rewrite(path, **changes):
    """Change the fields of a description, and its hash."""
    path.write_text(sealed({**json.loads(path.read_text()), **changes}))


def sealed(content):
    """Return the text of a description with the hash that it states."""
    text = json.dumps({**content, "sha256": "0" * 64})
    return text.replace("0" * 64, sha256(text.encode()).hexdigest(), 1)


def leaves(x, path=()):
    """Paths of everything in nested JSON but its format, version and hash."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        if path or key not in ("format", "version", "sha256", "tensors"):
            yield (*path, key)
            yield from leaves(value, (*path, key))


def forgeries(path):
    """Write a description with each value in turn of every other type, without it, or with another.

    Yields:
        The path of the value that is replaced, left out or accompanied by an unknown one.
    """
    original = path.read_bytes()
    content = json.loads(original)
    for where in leaves(content):
        *outer, last = where
        for substitute in (*OTHERS, _LEFT_OUT, _UNKNOWN):
            altered = copy.deepcopy(content)
            parent = altered
            for key in outer:
                parent = parent[key]
            if type(parent[last]) is type(substitute):
                continue
            if substitute is _UNKNOWN:
                if not isinstance(parent, dict):
                    continue
                parent["unknown"] = 1
            elif substitute is _LEFT_OUT:
                del parent[last]
            else:
                parent[last] = substitute
            path.write_text(sealed(altered))
            yield where
    path.write_bytes(original)
