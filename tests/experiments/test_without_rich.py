"""If rich is not installed, as without the extra `cli`, does each command say what to install?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from representatives import slow_but

PROGRAM = "import sys; sys.modules['rich'] = None; from fedbilevel.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    "command",
    slow_but(
        ["watch", "."],
        of=[["run", "quadratic"], ["compare", "quadratic"], ["watch", "."], ["report", "."],
            ["sweep", "quadratic", "--grid", "local_steps=1,2"]],
    ),
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_command_says_what_to_install(command, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    said = "fedbilevel: the command line needs rich, which is not installed: in a clone of the repository, "
    assert done.stderr.splitlines()[-1] == f'{said}pip install ".[cli]"'
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
