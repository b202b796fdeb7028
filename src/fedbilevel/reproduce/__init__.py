"""Reproducing papers: each figure or table is an entry, a file of its own in entries/, played by one protocol.

What an entry says (entry.py), how it is played (protocol.py), what is read off its runs and which claims hold
(claims.py), what is kept of it (outcome.py), its picture (picture.py).
"""
