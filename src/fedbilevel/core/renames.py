"""Names of earlier versions and what stands in their place; for error messages, and for reading what they saved."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

PUBLIC = {
    "algorithm": "a method is a subclass of fedbilevel.authoring.Algorithm, without a decorator",
    "load_result": "fedbilevel.Result.load",
    "steps": "fedbilevel.authoring.step_sizes",
    "Named": "fedbilevel.experiments.Component",
    "Parts": "fedbilevel.experiments.Experiment",
}
"""Names that public modules once handed out, and that none has now."""

MODULES = {
    "algorithms.hypergradient": "fedbilevel.parts, with Implicit and LocalImplicit",
    "algorithms.submodels": "fedbilevel.Submodels",
    "engines.clock": "fedbilevel.Clock",
    "engines.cpu": "fedbilevel.tune_cpu",
    "engines.hosts": "fedbilevel.engines.multihost",
    "engines.ledger": "fedbilevel.authoring.Ledger",
    "engines.per_client": "fedbilevel.PerClient",
    "experiments.methods": "fedbilevel.experiments.compare_algorithms",
    "experiments.parts": "fedbilevel.experiments.build",
    "flower.accounting": "fedbilevel.flower.privacy, with PrivacyAccount for Spent",
    "flower.supernode": "fedbilevel.flower.launch.supernode",
    "flower.worker": "fedbilevel.flower.launch.worker",
    **dict.fromkeys(
        ("flower.apps", "flower.engine", "flower.in_process", "flower.limits", "flower.site", "flower.terms"),
        "fedbilevel.flower, which has its public names",
    ),
}
"""Modules of `fedbilevel` that users imported, and where what they had is now."""


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module does not have; one of an earlier version is answered with what it is
    now."""
    now = MODULES.get(f"{module.partition('.')[2]}.{name}") or PUBLIC.get(name)
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f": it is now {now}" if now else ""))


REPLY = {"products": "hvps"}
LEDGER = {**REPLY, "products_per_client": "hvps_per_client"}
COLUMNS_OF_DELAYS = {
    "inner_delay": "delay.inner_gradients",
    "outer_delay": "delay.outer_hypergradient or delay.outer_directions",
}
TASK = {"split_x": "local of the problem, Bilevel(outer, inner, local='x')"}
NESTED_STATE = {"quality": "info"}
LATE_STATE = {"iterate": "inside.iterate"}
RUN = {"parts": "experiment"}
HOOKS = {"fresh": "the hook extra_cohorts", "everyone": "the hook needs_everyone", "own_x_lr": "the hook local_x_lr"}
"""Arguments and attributes of classes, arguments of functions, and hooks of methods."""


def renamed(now: Mapping[str, str]) -> Callable[[F], F]:
    """Let a class or a function refuse what it was called with in earlier versions; a class its attributes, too."""

    def mark(made: F) -> F:
        def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def checked(*given: Any, **fields: Any) -> Any:
                for name in fields.keys() & now.keys():
                    raise TypeError(f"{made.__name__}({name}=…): {name} is now {now[name]}")
                return call(*given, **fields)

            return checked

        def refused(self: object, name: str) -> Any:
            said = f": it is now {now[name]}" if name in now else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{said}")

        cls: Any = made
        if not isinstance(made, type):
            return cast(F, refusing(made))
        if issubclass(made, tuple):
            cls.__new__ = staticmethod(refusing(cls.__new__))
        else:
            cls.__init__ = refusing(cls.__init__)
        cls.__getattr__ = refused
        return made

    return mark


_INNER = "a field of the part inner"
_SOLVER = "a field of the part hypergradient.solver"
_ESTIMATE = "a field of the part estimate = LinearizedADMM(…) (in a spec [algorithm.estimate])"
_LAGRANGIAN = "a field of the part lagrangian = Lagrangian(…) (in a spec [algorithm.lagrangian])"
FIELDS = {
    "coefficients": "local_optimizer",
    "inner_rounds": f"rounds, {_INNER}",
    "inner_server_lr": f"server_lr, {_INNER}",
    "system_lr": "lr, a field of the part hypergradient = SystemSteps(…)",
    "inverse": "the part hypergradient.solver, Neumann(…) or CG(…)",
    "neumann_terms": f"terms, {_SOLVER}",
    "neumann_step": f"step, {_SOLVER}",
    "cg_iterations": f"max_steps, {_SOLVER} = CG(…)",
    "cg_tolerance": f"tolerance, {_SOLVER} = CG(…)",
    "fresh_cohorts": "a field of the part hypergradient = Implicit(…)",
    "paired": "a field of the part hypergradient = LocalImplicit(…)",
    "estimator": "the part hypergradient: Coordinates(…) or PrintedSlopes(…)",
    "coordinates": "count, a field of the part hypergradient = Coordinates(…)",
    "first": "wait_for, of the wrapper Asynchronous (in a spec asynchronous.wait_for)",
    "max_staleness": "a field of the wrapper Asynchronous (in a spec asynchronous.max_staleness)",
    "delay_penalty": "a field of the wrapper Asynchronous (in a spec asynchronous.delay_penalty)",
    **dict.fromkeys(
        ("policy", "pruned", "fixed", "min_coverage"),
        "a field of the wrapper Submodels (in a spec a field of [submodels])",
    ),
    "consensus_steps": f"steps, {_ESTIMATE}",
    "consensus_lr": f"lr, {_ESTIMATE}",
    "consensus_penalty": f"penalty, {_ESTIMATE}",
    **dict.fromkeys(("plane_damping", "consensus_damping"), _LAGRANGIAN),
    "own_x": "local of the problem, Bilevel(outer, inner, local='x'), and of the task hyper_cleaning (task.local=x)",
}
"""Fields of methods that have another name or place now."""

FIELDS_BESIDE = {
    "inner": {
        "inner_lr": f"lr, {_INNER}",
        "local_steps": _INNER,
        "client_lr": f"{_INNER} = MeanGradient(…)",
        "perturbation": "a field of the part hypergradient (RAFBO), or of its second_order = Differences(…)",
    },
    "hypergradient": {"merged": "a field of FedNest, FedNestSGD and FedMBO alone; here it saves nothing: leave it out"},
    "wait_for": {"first": "wait_for"},
    "sampling": {"inverse": "sampling, 'random' or, for 'series', None"},
    "regularization": {
        "refresh": "a field of FISM alone; IRIG takes 𝓗 anew at every step in any case: leave it out",
        "lr_decay": "a field of methods with decreasing steps alone; those of BiFISTA are constant: leave it out",
    },
    "lagrangian": dict.fromkeys(("planes", "tolerance"), _LAGRANGIAN),
    "perturbation": {"second_order": "perturbation, of the differences of gradients that this part always takes"},
}
"""The same for classes with the field that is the key, before what `FIELDS` says of all."""


KINDS = {
    "global": "implicit, and of AFBO steps",
    "series": "neumann",
    "random": "neumann, with sampling = 'random'",
    "parallel": "neumann, with sampling = 'random_per_client'",
    "coordinate": "coordinates",
}
"""Values of fields that are parts now."""


def name_of_today(field: str, allowed: Iterable[str]) -> str:
    """What a field of earlier versions is now, for a class that has the fields `allowed`; empty if there was none."""
    beside = (FIELDS_BESIDE[name].get(field, "") for name in allowed if name in FIELDS_BESIDE)
    return next(filter(None, beside), "") or FIELDS.get(field, "")


COLUMNS = REPLY
"""Columns of histories and totals of ledgers that earlier versions saved under another name; they are read as ever."""


STORED = {"own_x": "local_x", "answers": "replies"}
"""Attributes of what checkpoints hold, by the names of earlier versions; they are read as ever."""


def with_stored_names(path: str) -> str:
    """The path of a checkpoint's array, ".queues.lanes['walk'].replies.weight", with the names of today."""
    return re.sub(rf"\.({'|'.join(STORED)})\b", lambda found: f".{STORED[found[1]]}", path)


def with_names_of_today(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved row or ledger with the columns' names of today; what has a name of today keeps it."""
    return {name if COLUMNS.get(name, name) in saved else COLUMNS[name]: value for name, value in saved.items()}
