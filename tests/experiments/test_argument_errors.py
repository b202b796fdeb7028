"""Do errors of functions that a spec calls name the field that the user has written?"""

import pytest

from fedbilevel.core.errors import ConfigurationError, refuse_together, require
from fedbilevel.data import DataError
from fedbilevel.data.files import require as require_data
from fedbilevel.data.files import unknown_name
from fedbilevel.experiments import configure
from fedbilevel.experiments.argument_errors import clients_by_spec, data_errors_in, paths_in
from fedbilevel.experiments.runner import task_of
from refusals import raises_with, refuses


@pytest.mark.parametrize(("name", "value"), [("clients", -3), ("noise", -0.5)])
def test_a_value_that_a_task_refuses_has_the_path_of_its_field(name, value):
    spec = configure(task="quadratic", algorithm="simfbo", settings=[f"task.{name}={value}"])
    with refuses(f"task.{name}", value):
        task_of(spec)


def test_clients_numbers_that_are_refused_have_the_path_of_their_field():
    """`Clients.own['local_steps']` is `clients.local_steps` in a spec, and a part of a field keeps its own name.

    Two numbers do not fit the ten clients of the task.
    """
    settings = ["clients.local_steps=[1, 2]"]
    with refuses("clients.local_steps", [1, 2], "its shape is (2,)"):
        task_of(configure(task="quadratic", algorithm="simfbo", settings=settings))
    paths = ["Clients.own['client_lr.x'] in round 0", "Clients.capacity", "task.clients"]
    with pytest.raises(ConfigurationError) as error, clients_by_spec():
        refuse_together(ConfigurationError(path=path, got=0, allowed="1") for path in paths)
    moved = ["clients.client_lr.x in round 0", "clients.capacity", "task.clients"]
    assert [one.path for one in error.value.wrong] == moved


def test_only_paths_that_begin_with_an_argument_get_the_table():
    """The argument `rows` has entries and a place; the word "rows" in another path does not mean the argument."""
    paths = ["rows", "rows[2]", "rows, line 3", "rows of the file", "columns"]
    with pytest.raises(ConfigurationError) as error, paths_in("task", ["rows"]):
        refuse_together(ConfigurationError(path=path, got=0, allowed="1", message=f"{path} is 0") for path in paths)
    moved = ["task.rows", "task.rows[2]", "task.rows, line 3", "rows of the file", "columns"]
    assert [one.path for one in error.value.wrong] == moved
    assert [one.message for one in error.value.wrong] == [f"{path} is 0" for path in moved]


def test_an_error_about_data_keeps_its_class_and_its_fields():
    with raises_with(DataError, "task.rows is 0", path="task.rows", got=0), paths_in("task", ["rows"]):
        require_data(False, "rows", 0, "1")


def test_an_error_about_data_becomes_one_about_the_argument_that_names_them():
    with refuses("kind", "csvv", "csv", near="csv", where="table") as error, data_errors_in("table"):
        raise unknown_name("kind", "csvv", ["csv", "tsv"])
    assert str(error.value).count("'csv'") == 1
    with raises_with(ConfigurationError, path="a", got=1), data_errors_in():
        require(False, "a", 1, "2")
