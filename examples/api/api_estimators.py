"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import numpy as np
import pandas as pd

import fedbilevel as fb

rng = np.random.default_rng(0)
X = rng.normal(size=(90, 3))
score = X[:, 0] + rng.normal(size=90)
site = np.repeat(["north", "south", "west"], 30)  # the site of each row

# %% CoxRegression
times = np.column_stack([np.exp(-score), np.ones(90)])  # time, and 1 for an event or 0
cox = fb.estimators.CoxRegression(rounds=100).fit(X, times, groups=site)

# %% LogisticRegression
classes = fb.estimators.LogisticRegression(rounds=100).fit(X, score > 0, groups=site)
print(classes.predict_proba(X[:2]))

# %% Preparer
frame = pd.DataFrame({"age": X[:, 0], "sex": np.where(X[:, 1] > 0, "f", "m")})
print(fb.estimators.Preparer().fit_transform(frame)[:2])

# %% Ridge
ridge = fb.estimators.Ridge(rounds=100).fit(X, score, groups=site)
print(ridge.coef_, ridge.penalties_)
