"""Run a study of several sites' tables over Flower: the server's part, the sites' part, and the app that has both.

A run has two contracts, or three with more than 300 features. The only term of the first contract is the study. Under
it, the server asks the sites for statistics, and sends them the sum. The second contract follows from this sum, and is
for the exchanges. With more than 300 features, the second contract is for the search for penalties, and the third for
the training of the last model. The same rules hold under each contract: a node must agree to it and have its client's
key, replies have deadlines, and `exchanges.jsonl` has a line for every attempt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module, resources
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel import __version__
from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.card import counted
from fedbilevel.core.config import static
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    errors_in,
    require,
    unknown,
)
from fedbilevel.core.fed import Fed
from fedbilevel.core.problem import Problem, SingleLevel
from fedbilevel.core.tree import XY, PyTree
from fedbilevel.core.writing import write_text
from fedbilevel.data.table_files import read_table
from fedbilevel.engines import lock
from fedbilevel.engines.checkpoint import exist
from fedbilevel.engines.saver import advise_another_folder
from fedbilevel.estimators.agreement import Agreement, DifferentColumnsError
from fedbilevel.estimators.evaluation import evaluated
from fedbilevel.estimators.model_card import StudyCosts
from fedbilevel.estimators.site_table import SiteTable
from fedbilevel.estimators.study import Study, StudyModel
from fedbilevel.experiments import toml
from fedbilevel.experiments.argument_errors import data_errors_in
from fedbilevel.experiments.federation import (
    NODE,
    PRIVACY,
    SERVER,
    begin_app,
    fields_of_kinds,
    reached,
    rule_of,
    site_name,
    terms,
    write_parties,
)
from fedbilevel.experiments.federation_status import ENDS, Status, note_end
from fedbilevel.experiments.folder import Folder, default_path
from fedbilevel.flower.client.limits import Limits
from fedbilevel.flower.refusal import Refusal
from fedbilevel.reading import parse_json
from fedbilevel.wording import in_a_line

log = logging.getLogger("fedbilevel.client")
FILE = "study.toml"
SEARCH = "search-{}"  # the form of the names of a search's files, without the suffix
SEARCHES = re.compile(r"search-[0-9a-f]{16}\.(npz|previous\.npz|json)")
STATISTICS = "statistics"  # the first question to sites
SPEC_ONLY = ("settable", "tell-metrics")  # names in the node configuration that a study refuses
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Asking(Algorithm):
    """A method without rounds. Under its contract, sites answer questions.

    Args:
        study: the study as JSON, which server and sites compare.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = (SingleLevel,)

    study: str = static()

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        return state


def _nothing(x: Array, rows: Any) -> Array:
    """Return 0, the loss for a method without rounds, which is never minimised."""
    return jnp.sum(x**2) + 0.0 * jnp.sum(rows["digest"])


def read_study(file: Path) -> Study:
    """Read the table [study] of a TOML file."""
    tables = toml.read(file)
    require("study" in tables, str(file), "without [study]", "the study.toml of an app")
    return Study.read(tables["study"])


def server_app(study: Study) -> Any:
    """Make a Flower ServerApp that runs the study."""
    from fedbilevel import flower

    return flower.server_app(partial(serve, study))


def client_app(study: Study) -> Any:
    """Make the Flower ClientApp of a site, with the site's own table."""
    from fedbilevel import flower

    return flower.client_app(partial(site, study), agrees=True)


def serve(study: Study, grid: Any, config: Mapping[str, Any]) -> None:
    """Run the study with the sites that Flower's Grid reaches.

    Write model.json and the other results to the folder `out`.

    Raises:
        InUse: another process runs a study in this folder.
    """
    from fedbilevel.flower import Flower

    known = {"out", "client-keys", *SERVER} - {"quorum"}
    for name in config:
        if name not in known:
            raise unknown("name in the run configuration", name, known)
    place = Folder(Path(config["out"]) if config.get("out") else default_path("study"))
    require(not place.model.exists(), "out", str(place.path), "another folder, since this one has a model")
    engine = Flower(
        grid=grid,
        terms=terms({**config, "quorum": 1.0}),
        name=secrets.token_hex(16),
        log=place.exchanges,
        keys=config.get("client-keys") or None,
        sites=study.sites,
    )
    search = SavedSearch(place)
    with lock.exclusive(place.lock, place.path):
        _serve(study, engine, place, search)


def _serve(study: Study, engine: Any, place: Folder, search: SavedSearch) -> None:
    """Run the study in a folder that no other process uses; see `serve`."""
    names = ", ".join(f"{number} {name}" for number, name in enumerate(study.sites))
    try:
        model = played(study, engine, search)
        model = replace(model, costs=_costs(place))
        write_text(place.card, model.card())
        write_text(place.sheet, model.sheet())
        if model.report is not None:
            model.report.save(place.path)
        model.save(place.model)  # last, since a folder with a model is finished
        for file in search.files():
            file.unlink()
        place.sweep()
    except FedbilevelError as error:
        ended = error if isinstance(error, tuple(ENDS.values())) else ExchangeError(str(error))
        if isinstance(ended, CheckpointError):
            advise_another_folder(ended)  # a study has no option resume="force"
        again = f"again with out='{place.path.resolve()}'"
        if isinstance(ended, CheckpointError) and ended.errno is not None:  # such as a full disk
            ended.append(f"when the server can write there, submit the study {again}: {search.then()}")
        else:
            then = f". If the study is submitted {again}, {search.then()}"
            ended.append(f"sites: {names}{then if isinstance(error, ExchangeError) else ''}")
        note_end(place, ended)
        if ended is error:
            raise
        raise ended from error
    print(f"model {place.model.resolve()}; beside it: {', '.join(_written(place, model))}", flush=True)


def _written(place: Folder, model: StudyModel) -> list[str]:
    """Return the names of the files that a finished study has written for people."""
    return [place.card.name, place.sheet.name, *(["report.txt"] if model.report is not None else [])]


class SavedSearch:
    """The files in which a study's search for penalties is saved, and from which the study continues.

    The names of the files depend on the study and on the sum of the sites' statistics. With at most 300 features, the
    search is saved after each exchange. With more features, the search is saved when it has ended, and then the
    training of the last model is saved after each step. Files of other studies or tables are not used, and remain until
    a study in this folder ends.

    Args:
        place: the folder.
    """

    def __init__(self, place: Folder) -> None:
        self.place = place
        self.checkpoint: Path | None = None  # known only after the agreement

    def files(self) -> list[Path]:
        """Return all saved files in the folder."""
        found = self.place.path.glob(SEARCH.format("*"))
        return [file for file in found if SEARCHES.fullmatch(file.name) and file.is_file()]

    def of(self, agreement: Agreement) -> Path:
        """Choose the checkpoint for this agreement, and return it. Print whether a saved search was found."""
        digest = hashlib.sha256(f"{agreement.study.text}{agreement.text}".encode()).hexdigest()
        self.checkpoint = self.place.path / f"{SEARCH.format(digest[:16])}.npz"
        if self.saved():
            print(f"found a saved search at {self.checkpoint.resolve()}", flush=True)
        elif self.files():
            print("starting a new search: the saved search is of other tables or of another study", flush=True)
        return self.checkpoint

    def saved(self) -> str:
        """Return in words what a study with this agreement continues; "" if no files of it are saved."""
        if self.checkpoint is not None and self.checkpoint.with_suffix(".json").exists():
            return "the training of the last model continues"
        return "the search for penalties continues" if self.checkpoint is not None and exist(self.checkpoint) else ""

    def then(self) -> str:
        """Say in words how the study continues if it is submitted again."""
        if self.checkpoint is None and self.files():
            return "its saved search continues if study and tables are the same"
        return self.saved() or "the study starts from the beginning"


def played(study: Study, engine: Any, search: SavedSearch | None = None) -> StudyModel:
    """Run a study with the sites that a `Flower` reaches. Every site must reply to every exchange.

    After an interruption, the sites send their statistics again. If the study and the sum of the statistics are still
    the same, the study continues from the files of `search`. If `search` is None, nothing is saved.

    Raises:
        ExchangeError: a site is missing or refuses; the message names the site and the reason.
        ConfigurationError: the sites' statistics do not fit together.
    """
    from fedbilevel.flower.server.questions import Questions
    from fedbilevel.flower.wire import draw_up

    example = {"digest": np.zeros((1, 2), np.int32)}
    with jax.enable_x64(True):
        contract = draw_up(Asking(study=study.text), SingleLevel(_nothing), np.zeros(1), None, (example, example))
    questions = Questions(engine, contract, len(study.sites))
    statistics = [parse_json(answer.encode()) for answer in questions.question(STATISTICS)]
    try:
        agreement = Agreement.of(study, statistics)
    except DifferentColumnsError as error:
        questions.tell(json.dumps({"columns": error.columns}))  # a site that lacks a column logs the list
        raise
    questions.agree(agreement.text)
    if study.estimator == "logistic":
        print(f"the model predicts the probability of {study.target} = {agreement.estimator().classes_[1]}", flush=True)
    remote = agreement.remote([one["rows"] for one in statistics])
    counts = f"{agreement.rows} rows of {counted(len(study.fitted_sites), 'site')}"
    counts += f" and {counted(len(agreement.names), 'feature')}"
    print(f"the sites agree on {counts}; the search for penalties takes a few dozen exchanges, or more", flush=True)
    checkpoint, latest = None if search is None else search.of(agreement), agreement

    def under_contract(agreement: Agreement) -> Questions:
        with jax.enable_x64(True):
            algorithm, problem, x, y = agreement.posed()
            algorithm = composed(adaptive(algorithm, problem), problem)  # the method as sites have it
            return Questions(engine, draw_up(algorithm, problem, x, y, remote.examples()), len(study.sites))

    def on_searched(of_last: Agreement) -> None:
        nonlocal latest
        under_contract(latest).agree(of_last.text)
        latest = of_last

    estimator = agreement.train(remote, engine, checkpoint, on_searched)
    questions = under_contract(latest)

    def ask(question: dict[str, Any]) -> list[Any]:
        return [parse_json(answer.encode()) for answer in questions.question(json.dumps(question))]

    return evaluated(StudyModel.of(agreement, estimator, ask), ask)


def _costs(place: Folder) -> StudyCosts:
    """Add up the costs of all attempts at exchanges in the folder's log, including earlier submissions of the study."""
    status = Status.of(place)
    return StudyCosts(
        exchanges=status.exchanges,
        requests=status.requests,
        bytes_down=int(status.totals["bytes_down"]),
        bytes_up=int(status.totals["bytes_up"]),
    )


def _first_answer(table: SiteTable, question: str) -> str:
    """Answer a question that comes before the agreement: return the site's statistics as JSON.

    If the question is a list of all sites' columns, and the table lacks one of them, this is logged at the site. The
    question is answered nevertheless, since the study has ended and this site may be right.

    Raises:
        ConfigurationError: the question cannot be read.
    """
    if question == STATISTICS:
        return json.dumps(table.statistics(), ensure_ascii=False)
    try:
        content = parse_json(question)
    except ValueError as error:
        raise ConfigurationError(f"the question is not JSON: {in_a_line(error)}") from error
    require(isinstance(content, dict), "question", type(content).__name__, "an object with columns")
    try:
        table.require_columns(content.get("columns"))
    except DifferentColumnsError as error:
        log.warning("the study ends: %s", error)
    return ""


def site(study: Study, run_config: Mapping[str, Any], node_config: Mapping[str, Any], agreed: str) -> Any:
    """Make the `Site` of this node.

    Before the agreement it has the site's statistics, and afterwards the site's samples.
    """
    return _site(study, table_of(study, node_config), node_config, agreed)


def _site(study: Study, table: SiteTable, node_config: Mapping[str, Any], agreed: str) -> Any:
    """Make the client of a node whose table has been read; see `site`."""
    from fedbilevel.flower import Site

    client, node = int(node_config["partition-id"]), fields_of_kinds(NODE, node_config)
    own: dict[str, Any] = {
        "id": client,
        "name": table.site,
        "contents": rows_of(table),
        "limits": Limits.of(node_config),
        "approve": rule_of(node),
    }
    own |= {"subject": study.text}  # the same text under all contracts, so that a person approves the study once
    own |= {"source": table.fingerprint()}  # the table is read again for each contract
    if not agreed:
        return Site(
            **own,
            algorithm=Asking(study=study.text),
            problem=SingleLevel(_nothing),
            x0=np.zeros(1),
            outer={"digest": table.digest()},
            answer=partial(_first_answer, table),
            same_data=node.get("same_data", False),
            folder=Path(node["state_folder"]).expanduser() if "state_folder" in node else None,
        )
    agreement = Agreement.read(study, agreed)
    algorithm, problem, x0, y0 = agreement.posed()
    return Site(
        **own,
        algorithm=algorithm,
        problem=problem,
        x0=x0,
        y0=y0,
        outer=table.samples(agreement),
        answer=lambda question: json.dumps(table.answer(agreement, parse_json(question.encode()))),
    )


def rows_of(table: SiteTable) -> str:
    """Describe the rows of a site's table in words."""
    fitted, held = len(table.target), len(table.held_out[1])
    return f"{fitted} rows for the model, {held} held out, and {table.left_out} without a target"


def table_of(study: Study, node_config: Mapping[str, Any]) -> SiteTable:
    """Read the table that a node configuration names.

    Raises:
        ConfigurationError: the configuration or the table are wrong.
    """
    for name in node_config:
        if name not in {*NODE, "table"}:
            raise unknown("name in the node configuration", name, {*NODE, "table"} - {*SPEC_ONLY, *PRIVACY})
    for names, why in (
        (PRIVACY, "a study has no privacy by noise, since its statistics and exchanges are exact"),
        (SPEC_ONLY, "it is for federations that have a spec, and a study has none"),
    ):
        given = [name for name in names if name in node_config]
        require(not given, f"node configuration: {', '.join(given)}", "given", f"left out: {why}")
    client, count = node_config.get("partition-id"), len(study.sites)
    fits = type(client) is int and 0 <= client < count
    *rest, last = [f"{i} ({name})" for i, name in enumerate(study.sites)]
    allowed = f"{', '.join(rest)} or {last}" if rest else last
    require(fits, "node configuration: partition-id", client, allowed)
    name = site_name(study.sites, node_config)
    source = node_config.get("table")
    fits = isinstance(source, str) and bool(source)
    require(fits, "node configuration: table", source, "a .csv, .tsv or .parquet file, or package.module:function")
    table = "node configuration: table"
    try:
        with data_errors_in(table), errors_in(table):
            frame = _frame(study, str(source))
    except ConfigurationError:
        raise
    except (OSError, ValueError, ImportError, AttributeError) as error:
        message = f"{table} {source!r} cannot be read: {in_a_line(error)}"
        raise ConfigurationError(path=table, got=source, allowed="a table that can be read", message=message) from error
    with data_errors_in():
        return SiteTable(study, name, frame)


def _frame(study: Study, source: str) -> Any:
    if FUNCTION.fullmatch(source):
        module, _, function = source.partition(":")
        return getattr(import_module(module), function)()
    return read_table(Path(source).expanduser(), study.gaps)


def check(study: Study, node_config: str, *superlink: Any) -> Iterator[tuple[str, str]]:
    """Inspect a site before its SuperNode is started: yield (name, text) about its data and what it would send.

    The arguments after `node_config` are the same as for `federation.check`.

    Raises:
        ConfigurationError: the configuration or the table are wrong, or the site would not take part.
    """
    from fedbilevel.flower.client.site import ClientRuntime
    from fedbilevel.flower.launch.connection import read_node_config

    node = read_node_config(node_config)
    table = table_of(study, node)
    runtime = ClientRuntime(_site(study, table, node, ""), serving=False)
    yield "client", f"{runtime.site.id}, {table.site}"
    yield from ((name, said) for name, said in runtime.described().items() if name != "samples")  # see the topic "rows"
    try:
        runtime.check_limits()
    except Refusal as refusal:
        raise ConfigurationError(f"{refusal.why} ({refusal.code.how})") from None
    yield "rows", rows_of(table)
    for name, said in table.described().items():
        yield "sends", f"{name}: {said}"
    yield from reached(*superlink)


def write_app(study: Study, folder: Path) -> None:
    """Write the app of a study to a new folder: see `federation.write_app`."""
    package, inside = begin_app(folder)
    text = json.loads(study.text)
    write_text(inside / FILE, toml.dumps({"study": text}, "What all sites agree on; see fedbilevel.estimators.Study."))
    names = {"package": package, "name": package.replace("_", "-"), "title": f"A study of {study.target}"}
    names |= {"version": __version__, "out": "the server's folder for model.json and exchanges.jsonl"}
    write_parties(folder, inside, "study", FILE, names, without=("settings", "log", "quorum"))
    readme = (resources.files("fedbilevel.experiments") / "app_study.txt").read_text(encoding="utf-8")
    nodes = [
        f"    --node-config \"partition-id={number} site='{name}' table='/path/of/{name}/table.csv'\""
        for number, name in enumerate(study.sites)
    ]
    write_text(folder / "README.md", readme.format(**names, nodes="\n".join(nodes)))
