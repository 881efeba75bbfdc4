"""Errors in user input: bad files, bad values, options that do not fit."""


class BadInput(ValueError):
    """Input that cannot be worked with; the message says where and what to do."""
