"""Does a wrong command end with exit code 2 and a sentence that names the mistake, and does it write nothing?"""

from __future__ import annotations

import pytest

RUN = {
    "--data minst": "Did you mean 'mnist'",
    "hyper_cleaning --data covtype": '"covtype" is a table and not a set of images. The task regular',
    "--set algorithm.wait_for=3": "simfbo has no field 'wait_for'; adbo has one. Fields of simfbo: batch_size, ",
    "quadratic --set momentum=0.5": "unknown field 'momentum'; bi-fista has one (allowed: simfbo: batch_size, ",
    "quadratic --set radus=3": "unknown field 'radus'; did you mean 'radius'? (allowed: simfbo: ",
    "quadratic --set dim_x=-1": "dim_x = -1 is not allowed",
    "quadratic --set devices=64": "devices = 64",
    "quadratic --cohort 11": "cohort = 11",
    "quadratic --rounds 3 --set run.rounds=5": "run.rounds gets two values, by --set run.rounds=5 and by --rounds: lea",
    "quadratic --rounds 3 --rounds 5": "argument --rounds: gets two values, 3 and 5: leave one out",
    "quadratic --algorithm simfbo --algorithm fedbio": "argument --algorithm: gets two values, simfbo and fedbio",
    "quadratic --out a --out b": "argument --out: gets two values, a and b",
    "quadratic --cohort 3 --set cohort=5": "cohort gets two values",
    "quadratic --seeds 3 --set task.seed=5": "task.seed gets two values, by --set task.seed=5 and by --seeds",
    "quadratic --set task.name=saddle": "by --set task.name=saddle and by TASK",
    "--algorithm simfbo --set algorithm.name=fedbio": "and by --algorithm",
    "--data digits --set data=mnist": "data gets two values",
    "quadratic --set run.seed=1 --set run.seed=4": "run.seed gets two values, by --set run.seed=4 and by --set run.se",
    "quadratic --set local_steps=2 --set algorithm.local_steps=4": "algorithm.local_steps gets two values",
    "quadratic --roundz 3": "unknown argument --roundz; did you mean --rounds? (fedbilevel run --help lists",
    "--task quadratic": "unknown argument --task (fedbilevel run --help lists all options)",
    "quadratic --rounds 0": "'0' is not a whole number of at least 1",
    "quadratic --time -1": "'-1' is not a positive number of seconds",
    "quadratic --seeds 1,1": "the same seed twice",
    "quadratic --spec nowhere.toml": "no file nowhere.toml",
    "--spec binary.toml": "binary.toml is not TOML",
    "--spec full": "cannot read full",
    "quadratic --out full": "full: the folder is not empty",
    "quadratic --seeds 0,1 --out full": "full contains full/precious, which is not one of these runs",
    "quadratic --seeds 0,1 --out binary.toml": "binary.toml: it is a file",
    "quadratic --out binary.toml": "binary.toml: it is a file",
    "--resume nowhere": "there is no folder nowhere to resume a run from",
    "--resume full": "full is not the folder of a run: it has no spec.toml",
    "quadratic --resume full": "task cannot be given with it",
    "quadratic --force": "--force is only allowed with --resume",
    "quadratic --coordinator 127.0.0.1:1 --process 0": "--processes and --process must be given together",
    "quadratic --coordinator here --processes 2 --process 0": "it must be HOST:PORT",
    "quadratic --coordinator 127.0.0.1:1 --processes 2 --process 2": "it must be 0 to 1",
    "quadratic --coordinator 127.0.0.1:1 --processes 2 --process 0 --seeds 1,2": "which makes one run",
}
SWEEP = {
    "--grd cohort=1,2": "unknown argument --grd; did you mean --grid?",
    "--grid sever_lr.x=0.1": "unknown field 'sever_lr'; did you mean 'server_lr'",
    "--grid server_lr.x=0.1,abc": "server_lr.x = 'abc' is not allowed: it must be a positive number",
    "--grid server_lr.x=0.1,nan --grid local_steps=1,-5": "algorithm.local_steps = -5 is not allowed: it must be a "
    "positive integer\nalgorithm.server_lr.x = nan is",
    "--grid server_lr.x=": "--grid = 'server_lr.x=' is not allowed: it must be of the form FIELD=VALUE,VALUE",
    "--grid server_lr.x=0.1,,0.2": "'' is not a TOML value",
    "--grid server_lr.x=0.1,0.10": "grid of server_lr.x has 0.1 twice",
    "--grid cohort=1 --grid cohort=2": "cohort gets two values, by --grid cohort=2",
    "--grid server_lr.x=0.1 --grid server_lr=0.2": "server_lr.x is a field of server_lr",
    "--rounds 4 --grid rounds=4,8": "rounds gets two values, by --grid rounds=4,8 and by --rounds",
    "--set algorithm.server_lr.x=1 --grid server_lr.x=1,2": "algorithm.server_lr.x=1 is given, but the field is swept",
    "--grid run.seed=0,1": "run.seed cannot be swept: no seed is better than another",
    "": "a sweep needs a field and its values: --grid FIELD=VALUE",
    "--grid cohort=1,2 --select relativ_error": "'relativ_error' to select on; did you mean 'relative_error'",
    "--grid cohort=1,2 --bytes -4": "'-4' is not a positive number of bytes",
    "--grid cohort=9,10 --set clients=3 --quiet": "cohort = 9 is not allowed",
}
SEARCH = {
    "--search server_lr.x=0.1:1": "--trials = None is not allowed: it must be given with --search",
    "--grid server_lr.x=0.1 --trials 3": "--trials = 3 is not allowed: it must be left out without",
    "--search sever_lr.x=0.1:1 --trials 3": "unknown field 'sever_lr'; did you mean 'server_lr'",
    "--search server_lr.x=-1:1 --trials 3": "algorithm.server_lr.x = -1 is not allowed",
    "--search server_lr.x=0.1:1 --grid server_lr.x=1": "--grid server_lr.x is given twice",
    "--grid algorithm.local_steps=1,2 --grid local_steps=3,4": "local_steps gets two values",
    "--search cohort=1:2 --trials 3 --storage nonsense://x": "nonsense://x cannot be used",
    "--search cohort=1:2 --trials 3 --storage /dev/null": "/dev/null cannot be used: it is a pipe or a device",
    "--search cohort=1:2 --trials 3 --select nothing": "unknown metric 'nothing' to select on",
}
COMPARE = {
    "quadratic --out c.jpg": "cannot draw c.jpg: the name of a picture must end in .png, .pdf, .svg",
    "quadratic --panel exchange": "unknown panel 'exchange'; did you mean 'exchanges'",
    "quadratic --size 3x2 --size 3x3": "argument --size: gets two values",
    "quadratic --size 3": "is not of the form 3.3x2.6",
    "quadratic --size 0x3": "a width and a height in inches",
    "quadratic --algorithms simfbo --panel exchange": "unknown panel",
    "quadratic --algorithms simfbo --exchanges 3 --set run.exchanges=4": "run.exchanges gets two values",
    "quadratic --algorithms simfbo --out c.pdf": "must be the folder of the runs with --algorithms",
    "quadratic hyper_representation --algorithms simfbo": "a single task",
    "quadratic": "quadratic is a task: name the algorithms to run on it with --algorithms",
    "runs --seeds 0 --centralised": "--seeds, --centralised: only allowed with --algorithms",
    "": "one or more run folders",
}
OTHERS = {
    "report empty": "it must be the folder of a run",
    "report empty --out x.png": "must end in .html",
    "check quadratic --algorithm simfbo": "simfbo makes no estimate of the hypergradient; these do: ",
    "check quadratic --algorithm irg": "`fedbilevel check quadratic` checks only the task's hypergradient",
    "diagnose quadratic --algorithm lfednest": "no fields are suggested for lfednest: clients' own hypergradients",
    "diagnose quadratic --set clinets=3": "did you mean 'clients'",
    "diagnose quadratic --cohort 3 --set run.cohort=5": "and by --cohort",
    "diagnose quadratic --set clients=0": "clients = 0 is not allowed",
    "run spec.json": "unknown task 'spec.json': `fedbilevel run` takes a spec as --spec FILE.toml, and a task",
    "sweep nowhere.toml": "there is no file nowhere.toml",
    "sweep quadradic": "unknown task 'quadradic'; did you mean 'quadratic'",
    "flower new /dev/null/app": "cannot make the folder /dev/null/app: Not a directory",
    "flower": "new, keys, check, approve, audit, status or demo",
    "rn task.yaml": "unknown command rn; did you mean run? (fedbilevel --help lists all commands)",
    "flower --debug demmo": "unknown command demmo; did you mean demo? (fedbilevel flower --help lists all commands)",
    "--degub run quadratic": "unknown argument --degub; did you mean --debug after the command? (fedbilevel --help",
    "--rounds 3 run quadratic": "unknown argument --rounds; did you mean --rounds after the command?",
    "--version=2": "argument --version: ignored explicit argument '2'",
    "flower --pert=2 demo": "unknown argument --pert (fedbilevel flower --help lists all options)",
}
CASES = OTHERS | {
    f"{command} {arguments}": words
    for command, cases in {"run": RUN, "sweep quadratic": SWEEP | SEARCH, "compare": COMPARE}.items()
    for arguments, words in cases.items()
}


@pytest.mark.parametrize("command", CASES)
def test_it_is_told_what_is_wrong(command, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "4")  # commands for several processes set it
    if "--search" in command:
        pytest.importorskip("optuna")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    before, words = sorted(tmp_path.rglob("*")), CASES[command]
    code, shown, error = run(*command.split())
    assert (code, shown) == (2, "")
    assert words in error
    assert error.startswith("usage: ") or (error[:12], error.count("\n")) == ("fedbilevel: ", 1 + words.count("\n"))
    assert sorted(tmp_path.rglob("*")) == before
