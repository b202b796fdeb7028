"""Make .venv with the locked dependencies and this project. Only Python 3.11, git and make are needed.

This script uses only the standard library, and not pip, since Debian's python3 has neither pip nor ensurepip. It
downloads the version of uv that uv.lock names (with its checksum), and uv builds .venv from uv.lock. If it is run
again, it does nothing unless pyproject.toml, uv.lock, the Python or the path of the project has changed. Arguments are
names of groups of dependencies that are installed in addition. With `newest` or `oldest` it makes another environment,
with the newest or the oldest versions that pyproject.toml allows.

The package mirror, certificates and the proxy are read from the settings of pip (PIP_INDEX_URL, PIP_CERT,
REQUESTS_CA_BUNDLE, PIP_PROXY, pip.conf) and of uv (UV_DEFAULT_INDEX, SSL_CERT_FILE, HTTPS_PROXY).
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

OLDEST = (3, 11)
PYPI = "https://pypi.org/simple"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".bootstrapped"
STARTED_OFTEN = (  # packages that runs and the processes of a federation import
    "fedbilevel.experiments.tables",
    "fedbilevel.experiments.names",
    "fedbilevel.experiments.series",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "flwr.cli.app",
    "flwr.supernode.cli",
    "flwr.superlink.cli",
)
HEAVY = ("torch", "mlflow", "wandb")  # extras installed on request: `torch` needs the first two, `trackers` the others
RESOLUTIONS = {"newest": "highest", "oldest": "lowest-direct"}  # arguments that make an environment other than .venv
EXTRAS = ("--all-extras", *(f"--no-extra={name}" for name in HEAVY))
NO_BYTECODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


class SetupError(Exception):
    """A problem that the user has to solve; the text says how."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


# --- which Python, and is there anything to do -------------------------------------------------------


def require_python() -> None:
    """If this Python is too old, continue with a newer Python on PATH. If there is none, raise SetupError."""
    if sys.version_info[:2] >= OLDEST:
        return
    newer = [shutil.which(f"python3.{minor}") for minor in (13, 12, 11, 14)]
    for found in filter(None, newer):  # pyenv may have a command for a version that is not active
        if subprocess.run([found, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python 3.11 or newer is needed; {sys.executable} is {platform.python_version()}. "
        "Install one (Debian: apt install python3), or name one: make PYTHON=/path/to/python3.11 …"
    )


def interpreter() -> str:
    """Return the Python from which .venv is made.

    It is never the Python of a virtual environment, which may be .venv.
    """
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def fingerprint() -> str:
    digest = hashlib.sha256(f"{interpreter()} {sys.version} {ROOT}".encode())
    for name in ("pyproject.toml", "uv.lock", "scripts/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def up_to_date() -> bool:
    runs = (VENV / "bin" / "python").exists()  # also false for a link to a Python that was removed
    return runs and STAMP.exists() and STAMP.read_text() == fingerprint()


# --- the network settings of this machine ------------------------------------------------------------


def pip_setting(name: str) -> str | None:
    """Return a setting of pip: from the variable PIP_NAME, else from pip.conf, else None."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    home = Path.home()
    places = [home / ".config/pip/pip.conf", home / ".pip/pip.conf", Path("/etc/pip.conf")]
    if os.environ.get("PIP_CONFIG_FILE"):
        places.insert(0, Path(os.environ["PIP_CONFIG_FILE"]))
    for place in places:
        parser = configparser.RawConfigParser()
        try:
            parser.read(place)
        except (configparser.Error, OSError):
            continue
        for section in ("install", "global"):
            value = parser.get(section, name, fallback=None)
            if value:
                return value.strip()
    return None


def uv_environment() -> dict[str, str]:
    """Return this process's environment with the variables that uv needs, set from pip's settings."""
    env = dict(os.environ)
    for unwanted in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PYTHON"):
        env.pop(unwanted, None)
    certificates = pip_setting("cert") or env.get("REQUESTS_CA_BUNDLE")
    if certificates:
        env.setdefault("SSL_CERT_FILE", certificates)
    proxy = pip_setting("proxy")
    if proxy:
        env.setdefault("HTTPS_PROXY", proxy)
        env.setdefault("HTTP_PROXY", proxy)
    env.setdefault("UV_SYSTEM_CERTS", "true")  # as pip and git do: these certificates include a company's own authority
    env.setdefault("UV_HTTP_TIMEOUT", "180")
    env["UV_PYTHON_DOWNLOADS"] = "never"
    env["UV_PROJECT_ENVIRONMENT"] = str(VENV)
    return env


def mirror() -> str | None:
    """Return the package index that is set in place of PyPI; None if none is set."""
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or pip_setting("index-url")
    return None if index is None or index.rstrip("/") == PYPI else index.rstrip("/")


def fetch(url: str) -> bytes:
    """Return the bytes at a URL, in at most three attempts. A URL may contain user:password@."""
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    if login:
        token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    for wait in (1, 4, None):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return bytes(response.read())
        except OSError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise SetupError(
                    f"the certificate of {host} is not trusted here. Install ca-certificates, "
                    "or set SSL_CERT_FILE to your authority's certificates."
                ) from error
            if wait is None:
                raise SetupError(
                    f"cannot fetch {parts._replace(netloc=host).geturl()}: {error}. "
                    "Behind a proxy set HTTPS_PROXY; for a package mirror set PIP_INDEX_URL."
                ) from error
            time.sleep(wait)
    raise AssertionError


# --- uv ----------------------------------------------------------------------------------------------


def platform_pattern() -> str:
    """Return a regular expression for names of the wheels of uv that run on this machine."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    if sys.platform == "darwin":
        return r"macosx_\w+_" + {"aarch64": "arm64"}.get(machine, machine)
    if sys.platform == "linux":
        libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
        return rf"{libc}_?\w+_{machine}"
    raise SetupError(f"set-up knows Linux and macOS, not {sys.platform}; on Windows use WSL.")


def pinned_uv() -> tuple[str, str, str]:
    """Return (version, URL, sha256) of the wheel of uv for this machine, from uv.lock."""
    import tomllib  # not at the top, since an older Python must reach `require_python`

    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    package = next(package for package in lock["package"] if package["name"] == "uv")
    for wheel in package["wheels"]:
        if re.search(platform_pattern(), wheel["url"].rpartition("/")[2]):
            return package["version"], wheel["url"], wheel["hash"].removeprefix("sha256:")
    raise SetupError(f"uv {package['version']} has no wheel for {sys.platform} on {platform.machine()}.")


def url_on_mirror(index: str, url: str) -> str:
    """Return the URL at which a mirror has the file that uv.lock names by `url`."""
    name = url.rpartition("/")[2]
    page = f"{index}/uv/"
    for link in re.findall(r'href\s*=\s*["\']([^"\']+)', fetch(page).decode()):
        target = urllib.parse.urldefrag(urllib.parse.urljoin(page, html.unescape(link))).url
        if urllib.parse.urlsplit(target).path.rpartition("/")[2] == name:
            return target
    raise SetupError(f"the package index at {urllib.parse.urlsplit(index).hostname} does not have {name}.")


def install_uv() -> Path:
    """Return the path of the pinned uv. It is downloaded into .uv/ unless it is there."""
    version, url, sha256 = pinned_uv()
    target = ROOT / ".uv" / f"uv-{version}-{sha256[:8]}"
    if target.exists():
        return target
    say(f"fetching uv {version}")
    index = mirror()
    wheel = fetch(url_on_mirror(index, url) if index else url)
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise SetupError(
            f"the checksum of the downloaded uv {version} differs from the checksum in uv.lock; nothing was installed."
        )
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        archive = Path(scratch, "uv.whl")
        archive.write_bytes(wheel)
        with zipfile.ZipFile(archive) as opened:
            program = Path(opened.extract(f"uv-{version}.data/scripts/uv", scratch))
        program.chmod(0o755)
        program.replace(target)  # in one step: an interrupted set-up leaves no incomplete program
    return target


def call(uv: Path, env: dict[str, str], *arguments: str) -> None:
    status = subprocess.run([str(uv), *arguments], cwd=ROOT, env=env, check=False).returncode
    if status:
        raise SetupError(f"`uv {' '.join(arguments)}` failed (status {status}); see above.")


def install_project(uv: Path, env: dict[str, str], groups: Sequence[str]) -> None:
    """Install in .venv what uv.lock lists: all extras except HEAVY, the tools, and the project itself (editable).

    The groups of dependencies in `groups` are added to what is installed.
    """

    if VENV.exists() and not (VENV / "pyvenv.cfg").exists():  # left incomplete by an interruption
        shutil.rmtree(VENV)
    python = interpreter()
    index = mirror()
    named = [f"--group={group}" for group in groups]
    if index is None:
        kept = ["--inexact"] if groups else []
        call(uv, env, "sync", "--quiet", "--locked", *EXTRAS, "--python", python, *named, *kept)
        return
    # uv.lock contains PyPI's own addresses. For a mirror, the same versions and checksums are passed as a list of
    # requirements.
    env = {**env, "UV_DEFAULT_INDEX": index, "VIRTUAL_ENV": str(VENV)}
    with tempfile.TemporaryDirectory() as scratch:
        pins = str(Path(scratch, "requirements.txt"))
        export = ("--frozen", *EXTRAS, "--no-emit-project", "--output-file", pins)
        call(uv, env, "export", "--quiet", *export, "--python", python, *named)
        call(uv, env, "venv", "--quiet", "--allow-existing", "--python", python, str(VENV))
        bring = ("install", "--requirements") if groups else ("sync",)
        call(uv, env, "pip", *bring, pins, "--quiet", "--require-hashes")
        call(uv, env, "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT))


def install_pytorch(uv: Path, env: dict[str, str]) -> None:
    """Add the extra and the dependency group `torch` to .venv, and MLflow, which a tutorial uses with PyTorch.

    They are installed from pip's index and its find-links, which may have builds for CPUs. uv.lock is not used, since
    it names the builds on PyPI, which on Linux include gigabytes for GPUs.
    """
    env = {**env, "VIRTUAL_ENV": str(VENV)}
    if index := mirror():
        env["UV_DEFAULT_INDEX"] = index
    links = [option for link in (pip_setting("find-links") or "").split() for option in ("--find-links", link)]
    call(uv, env, "pip", "install", "--quiet", *links, "--editable", ".[mlflow,torch]", "--group", "torch")


def install_other(uv: Path, env: dict[str, str], which: str) -> None:
    """Make build/newest or build/oldest, with the newest or the oldest versions that pyproject.toml allows.

    In both cases, the dependencies of dependencies have their newest versions.
    """
    import tomllib

    place = ROOT / "build" / which
    env = {**env, "VIRTUAL_ENV": str(place)}
    if index := mirror():
        env["UV_DEFAULT_INDEX"] = index
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    project = f".[{','.join(name for name in extras if name not in HEAVY)}]"
    say(f"installing the {which} versions into build/{which}")
    call(uv, env, "venv", "--quiet", "--clear", "--python", interpreter(), str(place))
    how = ("--quiet", "--resolution", RESOLUTIONS[which])
    call(uv, env, "pip", "install", *how, "--editable", project, "--group", "dev")


def keep_bytecode() -> None:
    """Import the packages that are often started, so that Python writes their bytecode, which uv does not write.

    If PYTHONDONTWRITEBYTECODE is set, as in many containers, each start would otherwise compile all sources of JAX.
    """
    env = {name: value for name, value in os.environ.items() if name not in NO_BYTECODE}
    program = [str(VENV / "bin" / "python"), "-c", f"import {', '.join(STARTED_OFTEN)}"]
    if status := subprocess.run(program, cwd=ROOT, env=env, check=False).returncode:
        raise SetupError(f"what was installed cannot be imported (status {status}); see above.")


def main(lock: bool, groups: Sequence[str]) -> None:
    require_python()
    if "torch" in groups:
        install_pytorch(install_uv(), uv_environment())
        return
    if groups and groups[0] in RESOLUTIONS:
        install_other(install_uv(), uv_environment(), groups[0])
        return
    if up_to_date() and not lock and not groups:
        return
    started = time.monotonic()
    say(f"Python {platform.python_version()} at {interpreter()}")
    env = uv_environment()
    os.environ.update({name: env[name] for name in env if name.upper().endswith(("_PROXY", "CERT_FILE"))})
    STAMP.unlink(missing_ok=True)
    uv = install_uv()
    if lock:
        say("solving the dependencies into uv.lock")
        call(uv, env, "lock", "--python", interpreter())
        uv = install_uv()  # uv itself may have another version now
    say("installing the locked packages into .venv (the first time, some 200 MB)")
    install_project(uv, env, groups)
    keep_bytecode()
    STAMP.write_text(fingerprint())
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main(lock="--lock" in sys.argv, groups=[name for name in sys.argv[1:] if name != "--lock"])
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run the same command again to go on")
