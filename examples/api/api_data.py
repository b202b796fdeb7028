"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import pathlib
import tempfile

import numpy as np

from fedbilevel import data

folder = pathlib.Path(tempfile.mkdtemp())
labels = np.random.default_rng(0).integers(0, 10, size=200)

# %% load
digits = data.load("digits")
print(digits.train_images.shape, digits.classes)

# %% partition
parts = data.partition("dirichlet", labels, 5, seed=0, alpha=0.5)

# %% pack
packed = data.pack(digits.train_images, digits.train_labels, data.iid(digits.train_labels, 20, seed=0))

# %% write_clients
samples = [{"u": np.ones((n, 4))} for n in (3, 2)]
data.write_clients(folder / "first", [3, 2], iter(samples))

# %% open_clients
data.write_clients(folder / "second", [3, 2], ({"u": np.ones((n, 4))} for n in (3, 2)))
population = data.open_clients(folder / "second")
print(population.arrays["u"].shape, population.start)
