# The commands of this project; every one installs what it needs first. `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-torch test-trackers test-formats test-newest test-oldest packages lint format papers benchmarks catalogue notebooks docs docs-versions links lock clean

# What another project left in the environment must not leak into this one.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup:  ## install everything into .venv (quick when nothing has changed)
	@$(PYTHON) scripts/bootstrap.py

demo: setup  ## train on the embedded handwritten digits
	$(BIN)/fedbilevel run

test: setup  ## the checks of `make lint`, and the tests; types are checked beside them
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest; tests=$$?; wait $$types && exit $$tests

test-slow: setup  ## the tests that take long, repeat others for more methods, or need downloaded data
	$(BIN)/pytest -m slow

test-torch: setup  ## install PyTorch, what is built on it, and MLflow, then the tests of fedbilevel.torch
	@$(PYTHON) scripts/bootstrap.py torch
	$(BIN)/pytest -m "" tests/pytorch "tests/test_readme.py::test_python_blocks_run[docs/tutorials/pytorch.md]" \
		"tests/test_readme.py::test_python_blocks_run[docs/tutorials/paper.md]"

test-trackers: setup  ## install MLflow, Weights & Biases and TensorBoard, then the tests of fedbilevel.trackers
	@$(PYTHON) scripts/bootstrap.py trackers
	$(BIN)/pytest -m "" tests/trackers

test-formats: setup  ## install ONNX and pyarrow, then the tests of models in ONNX and of tables in Parquet
	@$(PYTHON) scripts/bootstrap.py formats
	$(BIN)/pytest -n 0 tests/estimators/test_model_in_use.py tests/estimators/test_predict_command.py

test-newest:  ## the tests with the newest versions of all packages; JAX's newest needs PYTHON=python3.13
	@$(PYTHON) scripts/bootstrap.py newest
	build/newest/bin/pytest

test-oldest:  ## the tests with the oldest versions that pyproject.toml allows
	@$(PYTHON) scripts/bootstrap.py oldest
	build/oldest/bin/pytest

packages:  ## build wheel and sdist into dist/, check their files, and try the wheel without extras
	@$(PYTHON) scripts/packages.py

lint: setup  ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup  ## put the format right, and what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

papers: setup  ## figures of the papers, and what came out (.venv/bin/python -m papers plays them)
	$(BIN)/python -m papers --list

benchmarks: setup  ## a line for each benchmark (.venv/bin/python -m benchmarks NAME runs one)
	$(BIN)/python -m benchmarks

catalogue: setup  ## lists and tables of methods and tasks, from their classes, docstrings and fields
	$(BIN)/python scripts/catalogue.py

notebooks: setup  ## the tutorials as Jupyter notebooks, in build/notebooks
	@$(PYTHON) scripts/bootstrap.py notebooks
	$(BIN)/python scripts/notebooks.py build/notebooks

docs: setup  ## the documentation as a website, in build/site; a link that leads nowhere is an error
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py

docs-versions: setup  ## the same for every tag and for this working tree, with a choice of the version on every page
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py --versions

links: setup  ## open every link of the documentation to another website
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py --links

lock:  ## rewrite uv.lock after a change of dependencies, and install it
	@$(PYTHON) scripts/bootstrap.py --lock

clean:  ## remove everything that the commands above made
	rm -rf .venv .uv .pytest_cache .ruff_cache .hypothesis dist build
