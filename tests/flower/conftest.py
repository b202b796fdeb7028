"""Fixtures of the tests of this folder."""

from study_nodes import files as files
from study_nodes import posed_once as posed_once
