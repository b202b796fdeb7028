"""The papers' figures and tables, computed again: what they claim, as files, and what came out.

Everything here is written on the library's public names. `python -m papers --list` shows what there is.
"""
