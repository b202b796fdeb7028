"""What to install where a package that the core does without is missing. The one place that says so."""


def missing(package: str, extra: str) -> str:
    """Words for a package that is not installed: the extra that brings it, and the command that works.

    The library is on no package index: anything there under its name would be somebody else's.
    """
    return f'{package}, which is not installed: in a clone of the repository, pip install ".[{extra}]"'
