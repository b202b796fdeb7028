"""Functions for a package of your own: checks whose errors are like this library's, and safe access to files.

    from fedbilevel.extending import require

    require(0 < share < 1, "share", share, "between 0 and 1")  # share = 2 is not allowed: it must be between 0 and 1

Importing this module does not import JAX.
"""

from fedbilevel.core.errors import (
    errors_in,
    explain_call,
    explain_misspelt,
    is_count,
    require,
    require_count,
    unknown,
    warn,
    warnings_in,
)
from fedbilevel.core.writing import write_text
from fedbilevel.reading import parse_json, read_bytes
from fedbilevel.wording import in_a_line, missing, printable

__all__ = [
    "errors_in",
    "explain_call",
    "explain_misspelt",
    "in_a_line",
    "is_count",
    "missing",
    "parse_json",
    "printable",
    "read_bytes",
    "require",
    "require_count",
    "unknown",
    "warn",
    "warnings_in",
    "write_text",
]
