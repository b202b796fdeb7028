"""Fixtures of the tests of this folder."""

from study_nodes import files as files
