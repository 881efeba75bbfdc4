"""Helpers: code of several experiments, and tables and figures of long ones."""
