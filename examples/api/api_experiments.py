"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import pathlib
import tempfile

from fedbilevel import experiments

folder = pathlib.Path(tempfile.mkdtemp())

# %% configure
spec = experiments.configure(task="quadratic", algorithm="fednest", settings=["run.rounds=50"])

# %% load_run
experiments.run(spec, folder / "first")
print(experiments.load_run(folder / "first").history["relative_error"])

# %% run
result = experiments.run(spec, folder / "second")
