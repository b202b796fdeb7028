"""Quoting what others wrote, libraries and strangers: in one line that is not long and commands no terminal."""


def in_a_line(error: Exception, longest: int = 200) -> str:
    """What another library's error says, in one line without a full stop; its type where it says nothing."""
    said = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return printable(said, longest).rstrip(".") or type(error).__name__


def printable(text: str, longest: int = 200) -> str:
    """The beginning of a stranger's text, such that it commands no terminal."""
    return "".join(character if character.isprintable() else "�" for character in text[:longest])
