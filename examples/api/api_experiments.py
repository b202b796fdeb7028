"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import pathlib
import tempfile

from fedbilevel import experiments

folder = pathlib.Path(tempfile.mkdtemp())

# %% configure
spec = experiments.configure(task="quadratic", algorithm="fednest", settings=["run.rounds=50"])

# %% run
result = experiments.run(spec, folder / "first")

# %% load_run
print(experiments.load_run(folder / "first").history["relative_error"])
