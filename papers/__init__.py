"""Figures, tables and theorems of papers, computed again: files with their claims, and the outcomes.

Everything here uses only the library's public names. `python -m papers --list` lists the figures.
"""
