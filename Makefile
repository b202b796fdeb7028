# The commands of this project. Each command first installs what it needs. `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-torch test-trackers test-formats test-newest test-oldest packages lint format papers benchmarks catalogue notebooks docs docs-versions links lock clean

# Do not pass on variables that another project may have set in the environment.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup:  ## install everything into .venv (quick when nothing has changed)
	@$(PYTHON) scripts/bootstrap.py

demo: setup  ## train on the embedded handwritten digits
	$(BIN)/fedbilevel run

test: setup  ## run the checks of `make lint`, and the tests at the same time as the check of types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest; tests=$$?; wait $$types && exit $$tests

test-slow: setup  ## run tests that take long, repeat others for more methods, or need downloaded data
	$(BIN)/pytest -m slow

test-torch: setup  ## install PyTorch, packages that need it, and MLflow, then test fedbilevel.torch
	@$(PYTHON) scripts/bootstrap.py torch
	$(BIN)/pytest -m "" tests/pytorch "tests/test_readme.py::test_python_blocks_run[docs/tutorials/pytorch.md]" \
		"tests/test_readme.py::test_python_blocks_run[docs/tutorials/paper.md]"

test-trackers: setup  ## install MLflow, Weights & Biases and TensorBoard, then test fedbilevel.trackers
	@$(PYTHON) scripts/bootstrap.py trackers
	$(BIN)/pytest -m "" tests/trackers

test-formats: setup  ## install ONNX and pyarrow, then test models in ONNX and tables in Parquet
	@$(PYTHON) scripts/bootstrap.py formats
	$(BIN)/pytest -n 0 tests/estimators/test_model_in_use.py tests/estimators/test_predict_command.py

test-newest:  ## run the tests with the newest versions of all packages; the newest JAX needs PYTHON=python3.13
	@$(PYTHON) scripts/bootstrap.py newest
	build/newest/bin/pytest

test-oldest:  ## run the tests with the oldest versions that pyproject.toml allows
	@$(PYTHON) scripts/bootstrap.py oldest
	build/oldest/bin/pytest

packages:  ## build wheel and sdist into dist/, check their files, and try the wheel without extras
	@$(PYTHON) scripts/packages.py

lint: setup  ## check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup  ## correct the format, and what lint can correct
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

papers: setup  ## list the figures of the papers with their outcomes (.venv/bin/python -m papers runs them)
	$(BIN)/python -m papers --list

benchmarks: setup  ## list the benchmarks (.venv/bin/python -m benchmarks NAME runs one)
	$(BIN)/python -m benchmarks

catalogue: setup  ## write lists and tables of methods and tasks from their classes, docstrings and fields
	$(BIN)/python scripts/catalogue.py

notebooks: setup  ## make Jupyter notebooks of the tutorials, in build/notebooks
	@$(PYTHON) scripts/bootstrap.py notebooks
	$(BIN)/python scripts/notebooks.py build/notebooks

docs: setup  ## build the documentation as a website, in build/site; a link that leads nowhere is an error
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py

docs-versions: setup  ## build the website for every tag and for this working tree; every page has a choice of the version
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py --versions

links: setup  ## open every link of the documentation to another website
	@$(PYTHON) scripts/bootstrap.py docs
	$(BIN)/python scripts/website.py --links

lock:  ## rewrite uv.lock after a change of dependencies, and install it
	@$(PYTHON) scripts/bootstrap.py --lock

clean:  ## remove what the commands above made here; caches of tests and types stay in ~/.cache/fedbilevel
	rm -rf .venv .uv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
