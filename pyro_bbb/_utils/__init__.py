# SPDX-License-Identifier: Apache-2.0
"""Helpers that need torch alone: argument checks, seeds, locks, processes, colours.

Imports no other room. A helper that two rooms share and that knows no distribution and no Pyro
goes here, in a module named after what it does.
"""
