"""Which secrets are hidden in texts that are shown, logged or recorded?"""

from __future__ import annotations

import re
from time import process_time

import pytest

from fedbilevel import wording

SECRET = "hunter2-Ab_9"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:SECRET@host/x", "https://***@host/x"),
        ("https://SECRET@host/x", "https://***@host/x"),
        ("https://SECRET:x-oauth-basic@host", "https://***@host"),
        ("https://SECRET:@host", "https://***@host"),
        ("https://:SECRET@host", "https://***@host"),
        ("postgresql+psycopg://me:a/b:c@SECRET@host/db", "postgresql+psycopg://***@host/db"),
        ("x://me:se:SECRET@host/db is not there: me@host", "x://***@host/db is not there: me@host"),
        ("https://host/?api_key=SECRET", "https://host/?api_key=***"),
        ("https://host/a?x=1&token=SECRET&y=2#z", "https://host/a?x=1&token=***&y=2#z"),
        ("https://host/#access_token=SECRET", "https://host/#access_token=***"),
        ("https://host/?X-Amz-Signature=SECRET&Expires=3", "https://host/?X-Amz-Signature=***&Expires=3"),
        ("(url: /api/runs?PASSWORD=SECRET)", "(url: /api/runs?PASSWORD=***)"),
        ("'/a?client_secret=SECRET', '/b?apikey=SECRET'", "'/a?client_secret=***', '/b?apikey=***'"),
        ("https://me:SECRET@host/?auth=SECRET", "https://***@host/?auth=***"),
        ("mysql://me:2024/SECRET@host:3306/db", "mysql://***@host:3306/db"),
        ("https://me:2024?SECRET@host", "https://***@host"),
        ("https://10.0.0.1:123456/SECRET@host", "https://***@host"),
        ("https://host/?pass=SECRET&pwd=SECRET&sig=123", "https://host/?pass=***&pwd=***&sig=***"),
        ("https://host/?api%5Fkey=SECRET", "https://host/?api%5Fkey=***"),
        ("/a?next=https%3A%2F%2Fme%3ASECRET%40host%2Fb", "/a?next=https%3A%2F%2F***%40host%2Fb"),
        ("/a?next=%2Fb%3Ftoken%3DSECRET%26c%3D1", "/a?next=%2Fb%3Ftoken%3D***"),
        ("host=db password=SECRET dbname=runs", "host=db password=*** dbname=runs"),
        ("host=db password = 'my SECRET' port=1", "host=db password = *** port=1"),
        ("UID=me;PWD={my;SECRET};Database=runs", "UID=me;PWD=***;Database=runs"),
        ("DB_PASSWORD=SECRET, HF_TOKEN=SECRET", "DB_PASSWORD=***, HF_TOKEN=***"),
        ("Authorization: Bearer SECRET", "Authorization: ***"),
        ("(b'authorization', b'Bearer SECRET')", "(b'authorization', b'Bearer ***')"),
        ("Proxy-Authorization: Negotiate SECRET", "Proxy-Authorization: ***"),
        ("X-Api-Key: SECRET, Cookie: id=SECRET", "X-Api-Key: ***, Cookie: ***"),
        ("{b'authorization': b'Basic SECRET', 'Cookie': ['a SECRET', 'b']}", "{b'authorization': ***, 'Cookie': ***}"),
        ("get(auth=('me', 'SECRET'), token='123')", "get(auth=***, token=***)"),
        ("{'token': 'my SECRET', 'accessToken': \"SECRET\"}", "{'token': ***, 'accessToken': ***}"),
        ("/a?token1=SECRET&api_key_2=SECRET&pw[]=SECRET", "/a?token1=***&api_key_2=***&pw[]=***"),
        ("/a?auth%5B%5D=SECRET&key2=SECRET&x=1", "/a?auth%5B%5D=***&key2=***&x=1"),
        ("/a?oauth_verifier=SECRET&auth_code=SECRET&oauth=SECRET", "/a?oauth_verifier=***&auth_code=***&oauth=***"),
        ("private_key=SECRET, private-key: SECRET, secrets=SECRET", "private_key=***, private-key: ***, secrets=***"),
        ("passwords=['a', 'SECRET'], cookies={'a': 'SECRET'}", "passwords=***, cookies=***"),
        ("(Cookie: theme=dark; id=SECRET, a)", "(Cookie: ***"),
        ('Authorization: Digest username="me", response="SECRET"', "Authorization: ***"),
        ("send('Set-Cookie: theme=dark; id=SECRET', 'a: b')", "send('Set-Cookie: ***', 'a: b')"),
        ('curl -H "Authorization: Digest a=\\"b\\", c=\\"SECRET\\"" host', 'curl -H "Authorization: ***" host'),
        ("Authorization: AWS4 Credential=a/b, Signature=SECRET", "Authorization: ***"),
        ("password  =  SECRET port=1", "password  =  *** port=1"),
        ("'token'  :   'SECRET', passphrase:   SECRET", "'token'  :   ***, passphrase:   ***"),
        ('{"password": "a\\"SECRET", "b": 1}', '{"password": ***, "b": 1}'),
        ("password='it\\'s SECRET' port=1", "password=*** port=1"),
        ('"{\\"token\\": \\"my SECRET\\"}"', '"{\\"token\\": ***}"'),
        ("password => SECRET, token => 'my SECRET'", "password => ***, token => ***"),
        ("https://me:my SECRET@host/x", "https://***@host/x"),
        ("https://host/?signature=f(SECRET)", "https://host/?signature=***)"),
        ("signature=x(y)SECRET port", "signature=*** port"),
        ("https://me:a 1 SECRET@host: me@host", "https://***@host: me@host"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(text, shown) -> None:
    text = text.replace("SECRET", SECRET)
    assert wording.without_secrets(text) == shown
    assert wording.in_a_line(OSError(text)) == " ".join(shown.split())
    assert SECRET[:4] not in wording.in_a_line(OSError("x" * (198 - len(text)) + " " + text))


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:5000/path@2", "https://host/a@b?x=1", "sqlite:////tmp/me@home/mlflow.db", "me@host: a:b@c",
        "https://host/?x=token&page=2", "token = 3", "privacy.clip=1", "file:///a?b=1", "http://10.0.0.1:5000/a@2?b",
        "http://[::1]:5000/a@2", "loss?tokens=12&passes=3&monkey=1", "tokens=12, passes=3, pass=3, pad_token=<s>",
        "sort_key=name", "{'pass': 3, 'token': 2}", "/etc/passwd: not found",
        "auth=none", "?auth=none&sig=null", "password=None, token = None", "author=Bob", "bypass=yes", "?monkey=banana",
        "password_file=/etc/x", "oauthlib==3.2.0", "/var/cookie: not found", "tokenizer=bert", "loss=3, monkey=1",
        "Bearer authentication is needed", "Unexpected token: x", "?next=https%3A%2F%2Fhost%2Fa%40b",
        "signature=f(x)", "signature=f(x, y=2)", "tcp://host:5000 is refused by me@host", "see https://a.b: me@host",
    ],
)  # fmt: skip
def test_other_texts_stay_as_they_are(text) -> None:
    assert wording.without_secrets(text) == text


@pytest.mark.parametrize("piece", ["x", "x ", "https://host/a ", "://a:"])
def test_the_start_of_a_long_text_is_searched_alone(piece) -> None:
    assert len(wording.without_secrets(piece * 100_000)) <= wording.READ + len("***")
    assert wording.in_a_line(OSError(piece * 100_000))[: len(piece)].strip() in ("x", "https://host/a", "://**")


def seconds(text: str) -> float:
    start = process_time()
    wording.without_secrets(text)
    return process_time() - start


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        ("", "%26"), ("", "%3Fto"), ("token=a", "%26"), ("password=", "%26a"), ("?", "oauth"), ("", "oauth"),
        ("", "token1"), ("", "password  "), ("password=", " "), ("'", "cookie"), ("cookie: ", '="'), ('pwd="', "\\"),
        ("", "://a:b c "), ("://a:", "b "), ("", "signature=f("), ("password", " =>"),
    ],
)  # fmt: skip
def test_no_text_takes_long(start, piece) -> None:
    text = start + piece * (wording.READ // len(piece))
    assert min(seconds(text) for _ in range(3)) < 0.3


@pytest.mark.parametrize("name", wording.NAMED)
def test_each_form_hides_its_example(name) -> None:
    """Each form alone hides its example: without the form, the example stays as it is."""
    form = wording.NAMED[name]
    others = [other.pattern for key, other in wording.NAMED.items() if key != name]
    values = "|".join(value.pattern for value in wording.VALUES.values())

    def hidden(*before: str) -> str:
        pattern = re.compile(rf"({'|'.join(before)})(?:{values})", re.IGNORECASE | re.VERBOSE)
        return pattern.sub(r"\1***", form.example)

    assert hidden(form.pattern) == wording.without_secrets(form.example) != form.example
    assert hidden(*others) == form.example


@pytest.mark.parametrize("name", wording.VALUES)
def test_each_form_of_a_value_is_hidden_as_a_whole(name) -> None:
    value = wording.VALUES[name]
    assert re.fullmatch(value.pattern, value.example, re.IGNORECASE | re.VERBOSE)
    assert wording.without_secrets(f"password={value.example} port=1") == "password=*** port=1"


@pytest.mark.parametrize("name", wording.SECRETS)
def test_each_pattern_hides_its_example(name) -> None:
    assert "secret" not in wording.without_secrets(wording.SECRETS[name].example)


@pytest.mark.parametrize(
    "name",
    [
        "password", "task.db.PASS", "passwords", "token", "api-keys", "hf_token", "db.private_key2", "oauth_verifier",
        "secret.value", "credentials.user", "api.key", "session_id", "jwt",
    ],
)  # fmt: skip
def test_names_of_secrets(name) -> None:
    assert wording.names_secret(name)


@pytest.mark.parametrize(
    "name", ["tokens", "passes", "monkey", "sort_key", "author", "password_file", "bypass", "pwdx.a"]
)
def test_names_that_are_those_of_no_secrets(name) -> None:
    assert not wording.names_secret(name)


@pytest.mark.parametrize("name", ["https://me:", "password=", "password='a "])
def test_secrets_at_the_cut_of_a_long_text_are_hidden(name) -> None:
    before = "x" * (wording.READ - len(name) - 8) + " "
    text = before + name + SECRET + "'@host"
    assert wording.without_secrets(text).startswith(before + name.split("me")[0].split("'")[0] + "***")
    assert SECRET[:4] not in wording.without_secrets(text)


def test_the_seed_of_a_run_is_hidden_in_its_name() -> None:
    assert (
        wording.without_seed("runs/x/seed-3/spec.toml, lr=0.1, seed 17")
        == "runs/x/seed-***/spec.toml, lr=0.1, seed ***"
    )
    assert wording.without_seed("5 seeds, seedling-3") == "5 seeds, seedling-3"
    assert wording.without_seed("run.seed=7, Seed: 3") == "run.seed=***, Seed: ***"
    assert wording.without_seed("task_seed-3, seeds 1, 2") == "task_seed-***, seeds ***, ***"
    assert wording.without_seed("exceeds 3 of 4, seeded 5") == "exceeds 3 of 4, seeded 5"


@pytest.mark.parametrize(
    ("name", "names", "near"),
    [
        ("--seed", ["--key"], ""), ("seed", ["--key"], "--key"), ("seed", ["key"], "key"),
        ("Ridge", ["ridge"], "ridge"), ("abcdxxx", ["abcdyyy"], ""), ("abcdexx", ["abcdeyy"], "abcdeyy"),
    ],
)  # fmt: skip
def test_a_name_is_near_from_a_ratio_of_six_tenths(name, names, near) -> None:
    """A name is near if twice the number of equal letters, over that of all, is at least 0.6: 10/14 is, 8/14 is not."""
    assert wording.nearest(name, names) == near
