# SPDX-License-Identifier: Apache-2.0
"""Errors in user input: bad files, bad values, options that do not fit.

Every function of `cli` that reads tables, options or saved models may raise `BadInput`.
"""


class BadInput(ValueError):
    """Input that cannot be worked with; the message says where and what to do."""
