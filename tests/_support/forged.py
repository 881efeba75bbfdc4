# SPDX-License-Identifier: Apache-2.0
"""Descriptions that were altered, with a hash that fits."""

import copy
import json
from hashlib import sha256

OTHERS = (None, True, 7, 2.5, "x", [], [2.5], {}, {"a": 1})  # one of each of JSON's types at least


def rewrite(path, **changes):
    """Change the fields of a description, and its hash."""
    content = {**json.loads(path.read_text()), **changes}
    content["sha256"] = "0" * 64
    text = json.dumps(content)
    path.write_text(text.replace("0" * 64, sha256(text.encode()).hexdigest(), 1))


def leaves(x, path=()):
    """Paths of everything in nested JSON but its format, version and hash."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in items:
        if path or key not in ("format", "version", "sha256", "tensors"):
            yield (*path, key)
            yield from leaves(value, (*path, key))


def forgeries(path):
    """Write a description with every value in turn replaced by one of every other type.

    Yields:
        The replaced value's path, and the new value.
    """
    original = path.read_bytes()
    content = json.loads(original)
    for where in leaves(content):
        *outer, last = where
        for other in OTHERS:
            altered = copy.deepcopy(content)
            parent = altered
            for key in outer:
                parent = parent[key]
            if type(parent[last]) is type(other):
                continue
            parent[last] = other
            rewrite(path, **altered)
            yield where, other
    path.write_bytes(original)
