# SPDX-License-Identifier: Apache-2.0
"""Helpers that need torch alone: argument checks, seeds, locks, processes, colours.

Imports no other package. A helper that two packages share and that needs neither distributions nor
Pyro goes here, in a module named after what it does.
"""
