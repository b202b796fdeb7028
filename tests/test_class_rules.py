"""Classes of methods and parts are abstract or final, and override nothing of their bases.

`help()` of a public class explains each field, and classes are small.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel import algorithms, authoring, parts
from fedbilevel.algorithms.parts.hypergradients import Hypergradient
from fedbilevel.algorithms.parts.layers import Around, Layer
from fedbilevel.algorithms.parts.local_steps import LocalOptimizer
from fedbilevel.algorithms.parts.wrappers import Wrapper
from fedbilevel.core.algorithm import Algorithm, Listed, Part
from fedbilevel.core.config import positive

CONTRACTS = (Part, Listed, Algorithm, Around, Hypergradient, Layer, LocalOptimizer, Wrapper)
"""Classes whose hooks have defaults; on the way down to any class, a hook may be overridden once."""

PUBLIC = {
    name: value
    for module in (fb, parts, authoring)
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name)) and not issubclass(value, BaseException)
}


def below(cls: type) -> Iterator[type]:
    """Yield all subclasses that a module of the package defines at its top level, and none that a function made."""
    for sub in cls.__subclasses__():
        ours = sub.__module__.startswith("fedbilevel.")  # modules of tests may have been removed from sys.modules
        if ours and vars(sys.modules[sub.__module__]).get(sub.__qualname__) is sub:
            yield sub
        yield from below(sub)


def classes() -> list[type]:
    """Return every class of a method or part of the package, abstract classes included."""
    for module in pkgutil.walk_packages(algorithms.__path__, "fedbilevel.algorithms."):
        importlib.import_module(module.name)
    return sorted(set(below(Part)) - set(CONTRACTS), key=lambda cls: cls.__name__)


def gives(cls: type) -> set[str]:
    """Return the names of the public methods, properties, class attributes and fields that a class itself defines.

    Abstract ones do not count. `validate` does not count either, because core/config.py calls the `validate` of every
    class, each for the fields that the class declares.
    """
    made = {name for name, value in vars(cls).items() if not getattr(value, "__isabstractmethod__", False)}
    return {name for name in made if not name.startswith("_")} - {"validate"}


def overridden(cls: type) -> set[str]:
    """Return what a class defines although a base that is not in CONTRACTS has defined it."""
    bases = (base for base in cls.__mro__[1:] if issubclass(base, Part) and base not in CONTRACTS)
    return {f"{cls.__name__}.{name} of {base.__name__}" for base in bases for name in gives(cls) & gives(base)}


def test_no_class_overrides_what_a_base_gives() -> None:
    found = [entry for cls in classes() for entry in sorted(overridden(cls))]
    assert found == []


def test_classes_are_abstract_or_final() -> None:
    """A class that has a name on the command line has no subclasses, and a class without subclasses is not abstract."""
    bases = [cls for cls in classes() if any(below(cls))]
    assert [cls.__name__ for cls in bases if hasattr(cls, "name") or hasattr(cls, "kind")] == []
    assert [cls.__name__ for cls in set(classes()) - set(bases) if inspect.isabstract(cls)] == []


def test_the_check_finds_methods_and_fields() -> None:
    class Base(Part):
        lr: float = positive(default=0.1)

        def step(self) -> None: ...

    class Below(Base):
        lr: float = positive(default=0.2)

        def step(self) -> None: ...

    assert overridden(Below) == {"Below.lr of Base", "Below.step of Base"}


def fields_of(cls: Any) -> list[str]:
    """Return the names of the arguments that make an instance of a dataclass or of a named tuple."""
    made = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
    return list(inspect.signature(cls).parameters) if made else []


@pytest.mark.parametrize("name", [name for name, cls in PUBLIC.items() if fields_of(cls)])
def test_help_says_what_each_field_means(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    told = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?)+)", doc, re.MULTILINE)
    named = re.findall(r"^    (\w+): \S", told[1] if told else "", re.MULTILINE)
    assert sorted(named) == sorted(fields_of(PUBLIC[name]))
    assert not re.search(r"those of `|[Ff]ields: see|see `", doc)


@pytest.mark.parametrize("name", PUBLIC)
def test_help_says_what_each_method_and_property_does(name: str) -> None:
    cls = PUBLIC[name]
    made = {attribute: inspect.getattr_static(cls, attribute) for attribute in dir(cls) if attribute[0] != "_"}
    kinds = (property, classmethod, staticmethod)
    ours = [attribute for attribute, value in made.items() if inspect.isfunction(value) or isinstance(value, kinds)]
    docs = {attribute: inspect.getdoc(getattr(cls, attribute)) or "" for attribute in ours}
    assert [attribute for attribute, doc in docs.items() if not doc or "attrgetter" in doc] == []


def test_a_field_is_explained_where_it_is_declared_or_nearer() -> None:
    """`help()` of a class explains an inherited field in the words of the base, unless the class has its own words."""

    class Base(Part):
        """A base.

        Args:
            lr: a step,
                of any size.
            decay: a factor.
        """

        lr: float = positive(default=0.1)
        decay: float = positive(default=0.1)

    class Near(Base):
        """A part.

        Args:
            decay: nearer.

        Needs: nothing.
        """

    assert inspect.getdoc(Near) == (
        "A part.\n\nArgs:\n    lr: a step,\n        of any size.\n    decay: nearer.\n\nNeeds: nothing."
    )


MOST_METHODS = 15


def wide_classes(source: str) -> list[str]:
    """Return the classes of a file that define more than MOST_METHODS methods, counting properties and private ones."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [cls.name for cls in found if len({one.name for one in cls.body if isinstance(one, kinds)}) > MOST_METHODS]


def test_a_class_can_be_taken_in_at_once() -> None:
    """No class defines more than MOST_METHODS methods."""
    package = Path(fb.__file__).parent
    assert [name for file in package.rglob("*.py") for name in wide_classes(file.read_text())] == []


def test_the_check_counts_methods() -> None:
    methods = [f"    def m{i}(self): ..." for i in range(MOST_METHODS + 1)]
    assert wide_classes("\n".join(["class Wide:", *methods])) == ["Wide"]
    assert wide_classes("\n".join(["class Narrow:", *methods[1:]])) == []


def test_a_run_is_objects_of_at_most_ten_fields() -> None:
    from fedbilevel.engines import execution, loop, measurements, rescue, saver

    parts = loop.Loop, execution.Execution, measurements.RunMeasurements, rescue.Rescue, saver.Saver
    assert {cls.__name__: len(dataclasses.fields(cls)) for cls in parts if len(dataclasses.fields(cls)) > 10} == {}
