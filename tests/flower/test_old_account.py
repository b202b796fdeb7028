"""A site whose privacy account was restored from an older copy does not reply to a server that knows of a larger ε."""

import json
import math

import federations
import pytest
from federations import memory
from test_site import request

import fedbilevel as fb
from fedbilevel.core.privacy import PrivacyAccount
from fedbilevel.flower.client.site import ClientRuntime, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.terms import Terms

STEPS = federations.Steps()
TERMS = fb.Privacy(clip=1.0, noise_multiplier=30.0, delta=1e-5)


@pytest.mark.parametrize(("known", "refused"), [(0, False), (2, False), (3, True), (1000, True)])
def test_an_older_account_gets_no_reply(known, refused, tmp_path):
    """A site does not reply if the server knows of more replies than the site's account has.

    The server knows the ε of `known` replies. The account has two, which is ε = 0.3521.
    """
    site = ClientRuntime(federations.site(STEPS, 0, folder=tmp_path, privacy=TERMS))
    (tmp_path / "account.json").write_text(PrivacyAccount({30.0: 2}).to_json())
    response = site.respond(request(site, epsilon=TERMS.epsilon_after(known), delta=1e-5), memory())
    assert (response.code == "account") == refused
    assert bool(response.payload) != refused
    assert json.loads((tmp_path / "account.json").read_text()) == {"30.0": 2 + (not refused)}
    if refused:
        assert "but its account has 0.3521: the account is an older copy" in response.refused


@pytest.mark.parametrize(("epsilon", "delta"), [(math.nan, 1e-5), (5.0, 0.0), (5.0, 1.0)])
def test_what_is_no_privacy_is_not_compared(epsilon, delta, tmp_path):
    """An ε and a δ of which one is impossible are not compared with the account."""
    site = ClientRuntime(federations.site(STEPS, 0, folder=tmp_path, privacy=TERMS))
    assert site.respond(request(site, epsilon=epsilon, delta=delta), memory()).refused == ""


def test_a_server_that_was_started_again_knows_what_clients_have_spent(tmp_path):
    log, folders = tmp_path / "exchanges.jsonl", [tmp_path / str(k) for k in range(6)]

    def site(run, node):
        k = node["partition-id"]
        return federations.site(STEPS, k, folder=folders[k], privacy=TERMS)

    app, more = client_app(site), {"cohort": 6, "log": log, "terms": Terms(norm_factor=None), "rounds": 1}
    federations.solve(STEPS, InProcess(app, clients=6), **more)
    (folders[0] / "account.json").write_text("{}")
    with log.open("a") as file:
        file.write('{"spent": 3}\n{"round": 0, "exch\n')
    before = len(log.read_text().splitlines())
    with pytest.warns(fb.errors.AbsenceWarning, match="account .*older copy"):
        federations.solve(STEPS, InProcess(app, clients=6), **more)
    lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert lines[0]["refused"]["0"]["code"] == "account"  # it is left out until the round ends
    assert (folders[0] / "account.json").read_text() == "{}"
    assert [line["answered"] for line in lines] == [[1, 2, 3, 4, 5]] * len(lines)
