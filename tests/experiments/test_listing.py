"""Do `fedbilevel algorithms` and `fedbilevel tasks` show the docstrings, and are names found without JAX?"""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.cli import main, parser
from fedbilevel.cli.shared import check_names
from fedbilevel.core.facts import No
from fedbilevel.core.submodel import Policy
from fedbilevel.experiments import configure, loader, names, resolve, toml
from fedbilevel.experiments.series import comparison_specs
from fedbilevel.tasks import TASKS
from refusals import refuses

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_say_what_the_code_says() -> None:
    """Generated files agree with the code. After a change of a docstring or field, `make catalogue` writes them."""
    found = list(runpy.run_path(str(ROOT / "scripts" / "catalogue.py"))["written"]())
    files = {file.name for file, _ in found}
    assert {"__init__.py", "choosing.md", "costs.md", "README.md", "simfbo.md", "own-method.md", "tasks.md"} <= files
    assert [str(file) for file, text in found if file.read_text("utf-8") != text] == []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_field_that_is_shown_can_be_set_by_the_names_that_are_shown(name) -> None:
    """Each field that is shown for a method can be set by its name alone, and with the method's name before it.

    The first form is in the section that is shown. The second, such as simfbo.local_steps, is in errors that list
    fields.
    """
    task = {"Bilevel": "quadratic", "SingleLevel": "classification", "Minimax": "saddle", "SimpleBilevel": "location"}
    chosen = {"task": task[ALGORITHMS[name].solves[0].__name__], "algorithm": name}
    section = loader.shown("algorithm", name).partition("[algorithm]")[2].partition("\n\n")[0]
    fields = [(field, toml.value(value)) for field, value in tomllib.loads(section).items() if field != "name"]
    expected = configure(**chosen, settings=[f"algorithm.{field}={value}" for field, value in fields])
    for before in ("", f"{name}."):
        assert configure(**chosen, settings=[f"{before}{field}={value}" for field, value in fields]) == expected


HEAVY = {"jax", "jaxlib", "optax", "numpy", "matplotlib", "sklearn", "flwr"}


@pytest.mark.parametrize(
    ("arguments", "code", "unneeded"),
    [
        (["--help"], 0, HEAVY | {"rich"}),
        (["run", "--roundz", "3"], 2, HEAVY | {"rich"}),
        (["algorithms"], 0, HEAVY),
        (["tasks"], 0, HEAVY),
        (["algorithms", "dual", "pruning"], 0, HEAVY),
        (["algorithms", "fiarse"], 0, HEAVY),
        (["tasks", "protonet"], 0, HEAVY),
        (["algorithms", "simfob"], 2, HEAVY - {"numpy"}),
        (["run", "quadratik"], 2, HEAVY - {"numpy"}),
        (["compare", "quadratic", "--algorithms", "simfbo,simfob"], 2, HEAVY - {"numpy"}),
        (["diagnose", "--algorithm", "simfob"], 2, HEAVY - {"numpy"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_text_and_misspelt_names_do_not_wait_for_jax(arguments: list[str], code: int, unneeded: set[str]) -> None:
    program = (
        "import sys\nfrom fedbilevel.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "print('\\nloaded', code, *{name.partition('.')[0] for name in sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    _, got, *loaded = shown.stdout.splitlines()[-1].split()
    assert int(got) == code
    assert unneeded & set(loaded) == set()
    assert code == 0 or "simfbo" in shown.stderr or "quadratic" in shown.stderr or "--roundz" in shown.stderr


@pytest.mark.parametrize(("kind", "known"), [("algorithm", ALGORITHMS), ("task", TASKS)])
def test_a_list_has_every_name_and_its_first_line(kind: str, known: dict) -> None:
    found = {name: entry.title for name, entry in names.library(kind).items()}
    assert found.keys() == {name for name, one in known.items() if one.__module__.startswith("fedbilevel.")}
    assert all(found.values())
    lines = names.listed(kind).splitlines()
    assert [line.split()[0] for line in lines[: len(found)]] == sorted(found)
    if kind == "algorithm":
        for name, text in found.items():
            assert ALGORITHMS[name].__doc__.startswith(text)


@pytest.mark.parametrize(
    ("words", "first", "rest"),
    [
        ("anarchic", "afbo", 0),
        ("APHE", "afbo", 0),
        ("dual pruning", "rabo", 1),  # and rafbo, of the same file
        ("pruning Dual", "rabo", 1),
        ("FedIHGP", "fednest", 2),  # and its two relatives; the word is in FedNest's costs
        ("fiarse", "submodels.policy=weights", 0),
        ("heterofl", "submodels.policy=static", 0),
        ("fedrolex", "submodels.policy=rolling", 0),
        ("hypergradient", "aggitd", None),  # in its first line; it comes before fedmbo and fednest in the alphabet
        ("minimax", "fedavg-s", 3),
        ("straggler", "adbo", 1),
        ("accelerated", "bi-fista", None),  # the word is in its first line
        ("arXiv:2302.04969", "aggitd", 0),
        ("SimFBO: Towards Simple, Flexible", "simfbo", 1),
        ("meta-learning", "few_shot", 0),  # the word is in the text of a task only
    ],
)
def test_words_find_methods_best_first(words: str, first: str, rest: int | None, capsys) -> None:
    """`fedbilevel algorithms WORDS` lists the methods whose texts have the words, the best match first.

    `rest` is the number of other methods, and None where this number does not matter.
    """
    assert main(["algorithms", *words.split()]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert lines[0].split()[0] == first
    assert rest is None or len(lines) == 1 + rest


@pytest.mark.parametrize("words", ["protonet", "meta-learning"])
def test_words_find_tasks(words: str, capsys) -> None:
    assert main(["tasks", *words.split()]) == 0
    line, _, more = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"few_shot +Few-shot learning: .*", line)
    assert more == "more about each: fedbilevel tasks NAME"


@pytest.mark.parametrize("words", ["simfob", "hypergradient simfob", "∇"])
def test_words_that_nothing_has_are_refused_with_the_nearest_name(words: str, capsys) -> None:
    assert main(["algorithms", words]) == 2
    error = capsys.readouterr().err
    assert f"unknown algorithm {words!r}" in error
    assert "did you mean 'simfbo'?" in error or words != "simfob"


def test_what_is_said_of_policies_holds_for_every_method(capsys) -> None:
    """The printed list of methods without submodels is complete, and the printed policies are all that exist."""
    assert main(["algorithms", "fedrolex"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    without = re.search("All methods except (.*?) support these policies", said)[1]
    unable = {name for name in names.library("algorithm") if isinstance(ALGORITHMS[name]().allows.submodels, No)}
    assert {names.known("algorithm", word) for word in re.split(", | and ", without)} == unable
    found = re.findall(r"^submodels\.policy=(\w+) ", names.found("algorithm", "policy"), re.MULTILINE)
    assert set(found) == set(get_args(Policy))


@pytest.mark.parametrize(
    ("kind", "written", "name"),
    [
        ("algorithm", "SimFBO", "simfbo"),
        ("algorithm", "RABO", "rabo"),
        ("algorithm", "IR-IG", "irig"),
        ("algorithm", "FBO-AggITD", "aggitd"),
        ("algorithm", "FedNestSGD", "fednest-sgd"),
        ("algorithm", "FEDNEST", "fednest"),
        ("algorithm", "lfednest", "lfednest"),
        ("algorithm", "BiFISTA", "bi-fista"),
        ("algorithm", "mine.py:RABO", "mine.py:RABO"),
        ("task", "Hyper-Cleaning", "hyper_cleaning"),
        ("task", "few-shot", "few_shot"),
        ("task", "Location", "location"),  # FISM is its method by default
    ],
)
def test_names_are_taken_in_any_spelling(kind: str, written: str, name: str) -> None:
    assert names.known(kind, written) == name
    if not names.is_own(name):
        spec = resolve({kind: written})
        assert getattr(spec, kind).name == name
        assert spec == resolve({kind: name})  # with the same presets


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ("run Quadratic --algorithm FBO-AggITD", {"task": "quadratic", "algorithm": "aggitd"}),
        ("check Quadratic --algorithm FedNest", {"task": "quadratic", "algorithm": ["fednest"]}),
        ("sweep Quadratic --algorithm FedNest", {"algorithm": "fednest"}),  # the task may be the file of a spec
        ("flower demo --task Quadratic --algorithm FedNest", {"task": "quadratic", "algorithm": "fednest"}),
        ("compare Quadratic --algorithms SimFBO,IR-IG", {"what": ["quadratic"], "algorithms": ["simfbo", "irig"]}),
        ("compare FedNest", {"what": ["FedNest"]}),  # the folder of a run
    ],
)
def test_commands_take_any_spelling(arguments: str, taken: dict) -> None:
    """Commands correct the spelling of tasks and methods, and change no argument that may be a file or folder."""
    options = parser().parse_args(arguments.split())
    check_names(options)
    assert {place: getattr(options, place) for place in taken} == taken


def test_a_comparison_takes_any_spelling_in_its_settings() -> None:
    with_spelling = ["FBO-AggITD.outer_lr=0.5"]
    specs = comparison_specs("Quadratic", ["SimFBO", "FBO-AggITD"], settings=with_spelling)
    assert list(specs) == ["simfbo", "aggitd"]
    assert specs["aggitd"].algorithm.value.outer_lr == 0.5


@pytest.mark.parametrize(("kind", "known"), [("algorithm", ALGORITHMS), ("task", TASKS)])
def test_what_is_shown_of_one_can_be_copied_into_a_spec(kind: str, known: dict) -> None:
    """The section that is shown for a method or a task can be copied into a spec."""
    for name in names.library(kind):
        text = loader.shown(kind, name)
        assert known[name].__doc__.split("\n")[0] in text
        section = f"[{kind}]" + text.partition(f"\n[{kind}]")[2].partition("\n\nparts:")[0]
        table = tomllib.loads(section)[kind]
        assert tomllib.loads(resolve({kind: table}).to_toml())[kind] == table


@pytest.mark.parametrize("name", names.library("algorithm"))
def test_help_ends_with_the_facts_and_the_paper_is_quoted(name: str) -> None:
    """The docstring of a method ends with its facts, and the text of its module or class names their paper."""
    cls = ALGORITHMS[name]
    doc = inspect.getdoc(cls)
    quoted = f"{inspect.getdoc(inspect.getmodule(cls))} {doc.partition(str(cls.facts))[0]}"
    assert doc.endswith(f"\n\n{cls.facts}")
    assert str(cls.facts).startswith(f"Paper: {cls.facts.paper}.\n")
    authors, year, *number = re.split(r" et al\.,? | |, ", cls.facts.paper)
    assert [words for words in (authors, year, *number) if words not in quoted] == []


def test_the_kinds_of_parts_are_shown_by_their_paths() -> None:
    lines = loader.shown("algorithm", "fednest").splitlines()
    assert "hypergradient.solver: neumann, cg" in lines[lines.index("parts:") :]


def test_ones_own_algorithm_is_shown_from_its_code(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from fedbilevel import FedAvg\nfrom fedbilevel.authoring import Facts\n\n\n"
        'class Mine(FedAvg):\n    """A method of mine."""\n\n    local_steps: int = 17\n'
        '    facts = Facts(paper="", good_for="me", exchanges="3", up="1", bias="", cost="2", needs="patience")\n'
    )
    text = loader.shown("algorithm", f"{tmp_path}/own.py:Mine")
    assert text.startswith("A method of mine.\n\nArgs:\n")
    assert "\nNeeds: patience.\n" in text
    assert "\nProblems: SingleLevel.\n" in text
    assert f'[algorithm]\nname = "{tmp_path}/own.py:Mine"' in text
    assert "\nlocal_steps = 17\n" in text
    with refuses(f"algorithm in {tmp_path}/own.py", "Yours", "['Mine']"):
        loader.shown("algorithm", f"{tmp_path}/own.py:Yours")


def test_several_names_are_shown_and_a_name_may_have_spaces(run) -> None:
    shown = [run("algorithms", name)[1] for name in ("simfbo", "afbo")]
    assert run("algorithms", "simfbo", "AFBO")[:2] == (0, "\n".join(shown))
    assert run("algorithms", "Fed", "Nest") == run("algorithms", "fednest")
