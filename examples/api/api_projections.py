"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import numpy as np

from fedbilevel import projections

x = np.array([3.0, -4.0])

# %% ball
assert np.allclose(projections.ball(1.0)(x), [0.6, -0.8])

# %% box
assert np.allclose(projections.box(-1.0, np.inf)(x), [3.0, -1.0])

# %% half_space
assert np.allclose(projections.half_space(np.array([1.0, 0.0]), 2.0)(x), [2.0, -4.0])

# %% intersection
both = projections.intersection(projections.box(0.0, np.inf), projections.ball(1.0))
assert np.allclose(both(x), [1.0, 0.0], atol=1e-5)

# %% simplex
assert np.allclose(projections.simplex(1.0)(x), [1.0, 0.0])
