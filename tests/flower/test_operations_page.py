"""The files with which a federation is operated: units of systemd, a container file and one for compose."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "operations"
UNITS = sorted([*FOLDER.glob("*.service"), *FOLDER.glob("*.timer")])
SCRIPTS = Path(sys.executable).parent


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_units(tmp_path):
    """systemd accepts the units, and reports a misspelt entry.

    The programs of this environment take the place of those in /opt/fedbilevel.
    """
    assert len(UNITS) == 5
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/fedbilevel/bin", str(SCRIPTS)))
    done = verified(tmp_path / unit.name for unit in UNITS)
    assert (done.returncode, done.stderr) == (0, "")
    wrong = tmp_path / "fedbilevel-site.service"
    wrong.write_text(wrong.read_text().replace("RestartSec", "RestartSecs"))
    assert "RestartSecs" in verified([wrong]).stderr


def verified(units):
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, units)],
        capture_output=True, text=True, check=False, env={"SYSTEMD_LOG_LEVEL": "warning", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def options_of_flower():
    import flwr

    folder = Path(flwr.__file__).parent
    texts = [file.read_text() for place in ("superlink", "supernode", "supercore", "common")
             for file in (folder / place).rglob("*.py")]  # fmt: skip
    return set(re.findall(r'"(--[a-z-]+)"', "".join(texts)))


def test_options_of_flower_are_those_that_it_has():
    """The options in the units and in the file for compose are options of Flower, except `--app`, which is ours."""
    known = options_of_flower() | {"--app"}
    assert {"--isolation", "--database", "--host"} <= known
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    commands = [one["command"] if isinstance(one["command"], list) else shlex.split(one["command"])
                for one in compose.values()]  # fmt: skip
    starts = [re.sub(r"\\\n", " ", unit.read_text()) for unit in UNITS if "metrics" not in unit.name]
    commands += [shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1]) for text in starts]
    used = {word.split("=")[0] for command in commands for word in command if word.startswith("--")}
    assert len(used) >= 10
    assert used - known == set()


def test_services_run_without_rights():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(compose) == {"superlink", "superexec", "site"}
    for service in compose.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")
    assert compose["superlink"]["ports"] == ["127.0.0.1:8000:8000"]
    words = dict(
        line.split(" ", 1) for line in (FOLDER / "Containerfile").read_text().splitlines() if line[:1].isupper()
    )
    assert words["USER"].isdecimal()
    assert int(words["USER"]) > 0
    assert "HEALTHCHECK" in words
    copied = re.findall(r"^COPY (.+) /src/", (FOLDER / "Containerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    for unit in UNITS:
        if unit.suffix == ".service":
            assert "User=fedbilevel" in unit.read_text()


def test_the_health_check_sees_whether_the_port_answers():
    text = (FOLDER / "Containerfile").read_text()
    command = json.loads(re.search(r"CMD (\[.*\])", text)[1])
    assert command[0] == "python"

    def status(port):
        words = [sys.executable, "-S", *command[1:]]
        return subprocess.run(words, env={"PORT": port}, check=False, stderr=subprocess.DEVNULL).returncode

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert status(port) == 0
    assert status(port) != 0
