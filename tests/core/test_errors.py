"""Do errors have fields that say what is wrong, and a text that is made only when it is shown?"""

import copy

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.errors import errors_in, refuse_together, require, unknown
from fedbilevel.data import DataError
from fedbilevel.data.files import require as data_require
from fedbilevel.data.files import unknown_name
from fedbilevel.errors import ConfigurationError
from refusals import raises_with


def of(make) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as error:
        make()
    return error.value


def test_a_value_that_is_not_allowed_stands_in_fields() -> None:
    error = of(lambda: fb.SimFBO(radius=-1.0))
    assert (error.path, error.got, error.allowed) == ("SimFBO.radius", -1.0, "a positive number or a schedule")
    assert error.near == ""
    assert error.wrong == (error,)
    assert str(error) == "SimFBO.radius = -1.0 is not allowed: it must be a positive number or a schedule"
    long = of(lambda: require(False, "a.b", fb.Clients([np.ones(2)] * 3), "2"))
    assert str(long) == "a.b = 3 clients … is not allowed: it must be 2"


def test_a_misspelt_name_has_the_nearest_and_all() -> None:
    error = unknown("section", "rnu", ["task", "run"])
    assert (error.path, error.got, error.allowed, error.near) == ("section", "rnu", ["run", "task"], "run")
    assert str(error) == "unknown section 'rnu'; did you mean 'run'? (allowed: run, task)"
    assert str(unknown("section", "q" * 300, ["run"])) == f"unknown section '{'q' * 200}' (allowed: run)"


def test_an_unknown_name_comes_before_the_place_where_it_was_given() -> None:
    error = unknown("class in the column 'ill' of north.csv", "maybe", ["no", "yes"])
    assert str(error) == "unknown class 'maybe' in the column 'ill' of north.csv (allowed: no, yes)"


def test_several_mistakes_are_one_error_and_stay_apart() -> None:
    first, second = of(lambda: require(False, "a.b", 1, "2")), of(lambda: fb.FedNest(iner=1, outr_lr=2))
    together = of(lambda: refuse_together([first, second]))
    assert together.wrong == (first, *second.wrong)
    assert [one.near for one in together.wrong] == ["", "inner", "outer_lr"]
    assert str(together).splitlines() == [str(one) for one in together.wrong]
    assert of(lambda: refuse_together([first])) is first
    refuse_together([])


def test_a_place_begins_each_message_and_leaves_the_fields() -> None:
    """Errors of a block that names their place have the same fields and class as without it, also if blocks are nested.

    The place that is named first, by the outer block, begins the message.
    """

    class OfKind(ConfigurationError):
        pass

    def refused() -> None:
        with errors_in("a.toml"), errors_in("panel"):
            raise ConfigurationError(wrong=[OfKind("no", path="x", got=1, allowed="2"), unknown("name", "yz", ["y"])])

    first, second = of(refused).wrong
    assert (type(first), first.where, first.path, first.got, first.allowed) == (OfKind, "a.toml: panel", "x", 1, "2")
    assert str(first) == "a.toml: panel: x = 1 is not allowed: it must be 2; no"
    assert (second.where, second.path, second.got, second.near) == ("a.toml: panel", "name", "yz", "y")
    assert str(copy.copy(second)) == "a.toml: panel: unknown name 'yz'; did you mean 'y'? (allowed: y)"
    with pytest.raises(KeyError), errors_in("a.toml"):
        raise KeyError("no error of ours")


def test_a_copy_says_the_same() -> None:
    error = of(lambda: fb.FedNest(iner=1, outr_lr=2))
    other = copy.deepcopy(error)
    assert str(other) == str(error)
    assert [one.got for one in other.wrong] == ["iner", "outr_lr"]


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (-(2**20_000), "an integer with 20,001 bits"),
        ([2**20_000], "a list with an integer that is too long to print"),
    ],
    ids=["integer", "list"],
)
def test_an_error_about_an_integer_that_python_does_not_print_has_a_message(got, text):
    """Python refuses to print integers with more than 4,300 digits; 2^20,000 has 6,021."""
    with raises_with(ConfigurationError, path="count", got=got) as found:
        require(False, "count", got, "positive")
    assert f"count = {text} is not" in str(found.value)
    assert text in str(unknown("layout", got, ["rows"]))
    with raises_with(DataError, path="count", got=got) as found:
        data_require(False, "count", got, "positive")
    assert text in str(found.value)
    assert text in str(unknown_name("layout", got, ["rows"]))
