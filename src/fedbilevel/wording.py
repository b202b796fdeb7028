"""Functions for error messages: nearest names, names of missing packages, and untrusted texts made printable."""

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

JSON = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}

READ = 10_000
"""The largest number of characters in which secrets are searched; a longer text is cut off there."""
HOST = r"(?:localhost|\[[^\]/]*\]|[^:/?#@.]*\.[^:/?#@]*):\d{1,5}[/?#]"
USER = re.compile(rf"://(?:(?!{HOST})[^:/?#@]*:.*|[^/?#]+(?=@|$))", re.IGNORECASE)
"""A pattern of user name and password in a URL that is cut off at its last "@". The password may contain any character.

Digits before a path are a port only if the name before them is clearly the name of a host: "me:123/a@host" contains a
password.
"""
BLANKS = re.compile(r"://[^\s/?#:@]*:(?!\d{1,5} )[^\s/?#@]+(?: [^\s/?#@]+){1,3}(?=@)")
"""A pattern of user name and password in a URL, where the password has blanks: "https://me:my secret@host"."""
STRONG = (
    "passw(?:or)?d|passphrase|passcode|pwd|secret|authorization|cookie|"
    r"(?:api|access|account|auth|pass|private|refresh|secret|security)(?:[-_.]|\ |%2D|%5F)?(?:key|token)"
)
"""The ends of names that always are names of secrets."""
LIKELY = (
    r"token|jwt|credentials?|signature|session[-_]?(?:id)?|oauth\w{0,30}|"
    "(?<![a-z])(?:pass|pw|auth(?:[-_]code)?|sig)"
)
"""The ends of names that are names of secrets in queries.

Elsewhere, the value must also not be a number, as in "token = 3".
"""
FUNCTION = r"""signature=\w+\([^()"']*\)(?:[\s,;.)]|$)"""
"""The signature of a function, as in "signature=f(x)", which is not a secret.

In a query, such a text is hidden nevertheless.
"""
TAIL = r"[\d_]*(?:\[\]|%5B%5D)?"
"""The texts that may follow the name of a secret if there are several secrets, as in "token2" or "token[]"."""
NAME = re.compile(rf"(?:(?:{STRONG})s?|{LIKELY}){TAIL}(?:\.|$)", re.IGNORECASE | re.VERBOSE)


class SecretForm(NamedTuple):
    """A form in which a secret, such as a password, appears in a text."""

    pattern: str  # the pattern of the text before the secret, or of the secret
    example: str


NAMED = {
    "assigned": SecretForm(rf"""(?:{STRONG})s?{TAIL}\\?["']?\s*(?:=>?|%3D)\s*+""", "password => 'my secret'"),
    "in JSON or a header": SecretForm(rf"""(?<!/)(?:{STRONG})s?{TAIL}\\?["']?\s*:\s*+""", '"api_key": "a secret"'),
    "likely, and no number": SecretForm(
        rf"""(?!{FUNCTION})(?:{LIKELY}){TAIL}(?:\\?["']\s*:|\s*(?:=>?|%3D))\s*+(?=\\?["'(]|\w[^\s;&,]*[a-z])""",
        "token = 3secret",
    ),
    "in a query": SecretForm(
        rf"""(?:[?&;\#]|%3F|%26)(?:(?!%3F|%26)[^\s=&;\#?])*?
        (?:{LIKELY}|(?<![a-z])(?:key|pin|otp)){TAIL}(?:=|%3D)""",
        "?x-pin=1234",
    ),
    "after bearer": SecretForm(r"\bbearer\ (?=\S*\d|\S{20})", "Bearer secret1"),
}
"""The patterns of the text before a secret, such as its name."""
VALUES = {
    "in quotes": SecretForm(r"""b?"(?:(?s:\\.)|[^"\\])*"?|b?'(?:(?s:\\.)|[^'\\])*'?""", '"my \\"secret\\""'),
    "in quotes with backslashes": SecretForm(r"""\\"[^"]*"?|\\'[^']*'?""", '\\"my secret\\"'),
    "in brackets": SecretForm(r"\{[^}]*\}?|\([^)]*\)?|\[[^\]]*\]?", "{my;secret}"),
    "a word, after its scheme": SecretForm(
        r"""(?:(?:bearer|basic|token|digest|negotiate|apikey)\ )?
        (?:(?!(?:[;&,]|%26)(?:(?!%26)[\w.%-])*(?:\[\])?=)\S)*(?<![)'"\]>},.;])""",
        "Basic secret",
    ),
}
"""The patterns of a secret after its name. A word ends where the next name of a query begins."""
NOTHING = r"""(?!(?:none|null|true|false)(?:[\s;&,)}\]"']|$))"""
HEADER = r"""((?:(["'])[\w-]{0,30})?(?<!/)(?:authorization|cookie)[ \t]*:[ \t]*+)
    (?(2)(?:\\.|="[^"]*"|(?!\2)[^\r\n])*|(?!b?["'{(\[])[^\r\n]+)"""
"""A header whose value may have spaces and several parts.

It ends with the line, or with the quote that began before it.
"""


def _one_of(forms: Mapping[str, SecretForm]) -> str:
    return "|".join(form.pattern for form in forms.values())


SECRETS = {
    "a user in a coded URL": SecretForm(
        r"(%3A%2F%2F)(?:(?!%2F|%3F|\%23)[^\s/?\#&])+(?=%40)", "?next=https%3A%2F%2Fme%3Asecret%40host"
    ),
    "a header": SecretForm(HEADER, "Cookie: theme=dark; id=secret"),
    "a name and its secret": SecretForm(rf"({_one_of(NAMED)}){NOTHING}(?:{_one_of(VALUES)})", "password=secret"),
}
"""The patterns of secrets, which are replaced in this order.

The first group of a pattern is the text before the secret.
"""
HIDDEN = [re.compile(form.pattern, re.IGNORECASE | re.VERBOSE) for form in SECRETS.values()]
SEED = re.compile(r"((?<![a-z])seeds?(?:[-_]| ?[=:] ?| ))(\d+(?:, ?\d+)*)", re.IGNORECASE)


def missing(package: str, extra: str) -> str:
    """Return the name of a missing package with the command that installs it.

    The command installs from a clone, since the library is on no package index. A package of this name on an index
    would be another one.

    Args:
        package: the package that is not installed.
        extra: the extra of this library that includes the package.
    """
    return f'{package}, which is not installed: in a clone of the repository, pip install ".[{extra}]"'


SAME = {"seed": "key", "x_bounds": "project_x", "higher_is_better": "larger_is_better"}
"""Names in other libraries -> the names of this library for the same things."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the nearest of some names; "" if none is near.

    Case, and dashes at the start, are ignored.
    """
    bare = {valid.lower().lstrip("-"): valid for valid in names}
    if SAME.get(name) in bare:
        return bare[SAME[name]]
    near = get_close_matches(name.lower().lstrip("-"), bare, n=1)
    return bare[near[0]] if near else ""


def in_a_line(error: Exception, longest: int = 200) -> str:
    """Return the message of another library's error in one line, without a full stop; if it is empty, the error's type.

    Secrets in URLs are hidden before the message is cut, since a URL that is cut would not be recognized.
    """
    message = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return printable(without_secrets(message), longest).rstrip(".") or type(error).__name__


def shown(value: object, text: Callable[[object], str] = repr) -> str:
    """Return the text of a value for a message, or words for a value with an integer too long for Python to print.

    Args:
        value: the value.
        text: the function that returns the text, `repr` or `str`.
    """
    try:
        return text(value)
    except ValueError:
        if isinstance(value, int):
            return f"an integer with {value.bit_length():,} bits"
        return f"a {type(value).__name__} with an integer that is too long to print"


def printable(text: str, longest: int | None = 200, kept: str = "") -> str:
    """Return an untrusted text without control characters, cut to `longest` characters. None: it is not cut.

    White space becomes a space, and other characters that cannot be printed become "�". The characters in `kept` do not
    change.
    """
    plain = (" " if char.isspace() and char not in kept else char for char in text[:longest])
    return "".join(char if char.isprintable() or char in kept else "�" for char in plain)


def without_secrets(text: str) -> str:
    """Hide what may be a password or a token in a text, and cut it to `READ` characters.

    "https://user:password@host" and "https://token@host" become "https://***@host", since the user name may be a token.
    If a name is usual for secrets, the value after it is hidden, as in "?api_key=***", "password=*** dbname=runs",
    "'token': ***" and "Authorization: ***".
    """
    end = "@" if len(text) > READ else ""  # the rest may contain the "@" by which a password is recognized
    text = BLANKS.sub("://***", text[:READ] + end)
    text = re.sub(r"\S+", _without_user, text).removesuffix(end)
    for secret in HIDDEN:
        text = secret.sub(r"\1***", text)
    return text


def names_secret(name: str) -> bool:
    """Return whether a dotted name, such as "task.password" or "credentials.user", has a part that names a secret."""
    return NAME.search(name) is not None


def _without_user(word: re.Match[str]) -> str:
    url, at, host = word[0].rpartition("@")
    return USER.sub("://***", url) + at + host


def without_seed(text: str) -> str:
    """Hide seeds in a text, such as "seed-3", "run.seed=3" or "seeds 1, 2" in the name of a run or in an error."""
    return SEED.sub(lambda found: found[1] + re.sub(r"\d+", "***", found[2]), text)


def of_others(value: Any) -> Any:
    """Return a value of untrusted JSON with all texts in it made printable, including the names in objects."""
    if isinstance(value, str):
        return printable(value, None)
    if isinstance(value, dict):
        return {of_others(name): of_others(content) for name, content in value.items()}
    return [of_others(content) for content in value] if isinstance(value, list) else value


def require_object(value: Any, holds: str) -> None:
    """Raise ValueError if a JSON value is not an object; `holds` lists the expected names for the message."""
    if not isinstance(value, dict):
        raise ValueError(f"{JSON.get(type(value), 'null')} was found where a JSON object with {holds} is expected")
