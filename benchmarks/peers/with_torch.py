"""FedAvg as a serial PyTorch loop, one client after the other."""

import numpy as np
import torch
import work
from torch import nn
from torch.nn import functional as F

images, labels = map(torch.from_numpy, work.data())
model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=work.LR)
torch.set_num_threads(1)  # batches of 20 are too small for more threads
rng, clock = np.random.default_rng(0), work.Clock()


@torch.no_grad()
def load(arrays):
    for parameter, array in zip(model.parameters(), arrays, strict=True):
        parameter.copy_(array)


x = [torch.from_numpy(array.T) for array in work.start()]
for r in range(work.ROUNDS):
    total = [torch.zeros_like(array) for array in x]
    for i in rng.choice(work.CLIENTS, work.COHORT, replace=False):
        load(x)
        for batch in torch.randperm(work.SAMPLES).split(work.BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[i, batch]), labels[i, batch]).backward()
            optimizer.step()
        for array, parameter in zip(total, model.parameters(), strict=True):
            array += parameter.detach() / work.COHORT
    x = total
    clock.tick(r + 1)
load(x)
some, truth = map(torch.from_numpy, work.few())
clock.report(F.cross_entropy(model(some), truth).item())
