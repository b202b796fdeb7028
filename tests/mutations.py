"""Damage the bytes of files and the values of JSON at random, by a seed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

DEEP, DIGITS = "a place for deep nesting", "a place for 4,400 digits"
RAW = {DEEP: "[" * 100_000 + "]" * 100_000, DIGITS: "1" * 4400}
FOREIGN: tuple[Any, ...] = (None, True, 0, -1, 3, 2.5, math.nan, math.inf, 1e308, "", "text", "[/b]", "\0", "é")
FOREIGN += ([], [[]], [None], {}, {"a": 1}, 10**30, 10**400, [3] * 50, DEEP, DIGITS)


def of_bytes(whole: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` damaged copies of the bytes.

    In a copy bits are flipped, bytes are set, the end is cut off, or a piece is removed, repeated, copied to the end or
    replaced by random bytes.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            start, stop = sorted(rng.integers(0, len(content) + 1, 2).tolist())
            stop = min(stop, start + int(rng.choice([1, 4, 30, len(whole)])))
            piece = content[start:stop]
            match rng.integers(0, 8):
                case 0 | 1 if start < len(content):
                    content[start] ^= 1 << int(rng.integers(0, 8))
                case 2 if start < len(content):
                    content[start] = int(rng.choice([0, 1, 127, 128, 255]))
                case 3:
                    del content[start:]
                case 4:
                    del content[start:stop]
                case 5:
                    content[start:start] = piece
                case 6:
                    content[start:stop] = rng.bytes(len(piece))
                case 7:
                    content += piece
        yield bytes(content)


def of_json(value: Any, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield `count` copies of a JSON value in which parts are removed, repeated, renamed or replaced by another value.

    The whole value may be replaced, too. The texts DEEP and DIGITS are placeholders for what no JSON library would
    write. `text` replaces them.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        changed = copy.deepcopy(value)
        for _ in range(rng.integers(1, 3)):
            changed = _changed(changed, rng)
        # copies are made one at a time, so that a long campaign needs little memory
        yield changed


def text(value: Any) -> str:
    """Return the value as JSON, with the placeholders DEEP and DIGITS replaced."""
    return with_raw(json.dumps(value))


def with_raw(notation: str) -> str:
    """Return the text with the placeholders DEEP and DIGITS replaced."""
    for name, raw in RAW.items():
        notation = notation.replace(json.dumps(name), raw)
    return notation


def _changed(value: Any, rng: np.random.Generator) -> Any:
    other = copy.deepcopy(FOREIGN[rng.integers(0, len(FOREIGN))])
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inside or rng.random() < 0.15:
        return other
    place = inside[rng.integers(0, len(inside))]
    match rng.integers(0, 10):
        case 0:
            del value[place]
        case 1 if isinstance(value, dict):
            value[str(other)[:50]] = value.pop(place)
        case 1:
            value.insert(place, copy.deepcopy(value[place]))
        case 2:
            value[place] = other
        case _:
            value[place] = _changed(value[place], rng)
    return value
