"""FedAvg by FedLab, standalone: its serial trainer."""

import torch
import work
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.models.mlp import MLP
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # batches of 20 are too small for more
clock = work.Clock()
images, labels = map(torch.from_numpy, work.data())


class Images(FedDataset):
    def get_dataloader(self, id, batch_size, type="train"):
        return DataLoader(TensorDataset(images[id], labels[id]), batch_size=batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    def evaluate(self):
        clock.tick(self.handler.round)


model = MLP(784, 10)
with torch.no_grad():
    for parameter, array in zip(model.parameters(), work.start(), strict=True):
        parameter.copy_(torch.from_numpy(array.T))
handler = FedAvgServerHandler(model, work.ROUNDS, work.COHORT / work.CLIENTS)
trainer = FedAvgSerialClientTrainer(model, work.CLIENTS)
trainer.setup_dataset(Images())
trainer.setup_optim(epochs=1, batch_size=work.BATCH, lr=work.LR)
Pipeline(handler, trainer).main()
some, truth = map(torch.from_numpy, work.few())
clock.report(F.cross_entropy(handler.model(some), truth).item())
