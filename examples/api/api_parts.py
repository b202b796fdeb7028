"""Examples of the API reference: `make catalogue` copies each cell under the name that heads it."""

# %% setup
import fedbilevel as fb

method = fb.SimFBO(local_steps=5, client_lr=0.05, server_lr=0.05)

# %% CG
fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=20)))

# %% SVRG
fb.FedNest(inner=fb.parts.SVRG(rounds=3, lr=0.1))

# %% CentredClipping
fb.layered(method, fb.parts.CentredClipping(radius=1.0))

# %% Differences
fb.FedNest(hypergradient=fb.parts.Implicit(second_order=fb.parts.Differences()))

# %% Krum
fb.layered(method, fb.parts.Krum(bad=1))

# %% LocalSGD
fb.FedMBO(inner=fb.parts.LocalSGD(rounds=2, lr=0.1))

# %% MeanGradient
fb.AFBO(inner=fb.parts.MeanGradient(rounds=3))

# %% Median
fb.layered(method, fb.parts.Median())

# %% Mixed
fb.SimFBO(local_optimizer=fb.parts.Mixed())

# %% Momentum
fb.SimFBO(local_optimizer=fb.parts.Momentum(decay=0.9))

# %% Neumann
fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=10)))

# %% Proximal
fb.SimFBO(local_optimizer=fb.parts.Proximal(pull=0.1))

# %% SystemSteps
fb.AFBO(hypergradient=fb.parts.SystemSteps())

# %% TopK
fb.layered(method, fb.parts.TopK(share=0.1))

# %% TrimmedMean
fb.layered(method, fb.parts.TrimmedMean(trim=1))
