# SPDX-License-Identifier: Apache-2.0
"""The library's version."""

__version__ = "0.1.0"
