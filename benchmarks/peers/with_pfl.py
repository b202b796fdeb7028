"""FedAvg by pfl, with PyTorch, in one process."""

import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)  # batches of 20 are too small for more threads
clock = work.Clock()
images, labels = map(torch.from_numpy, work.data())


class Net(nn.Sequential):
    def loss(self, x, y, eval=False):
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=False):
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Tick(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        clock.tick(central_iteration + 1)
        return False, Metrics()


net = Net(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
with torch.no_grad():
    for parameter, array in zip(net.parameters(), work.start(), strict=True):
        parameter.copy_(torch.from_numpy(array.T))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))


def dataset(user):
    order = torch.randperm(work.SAMPLES)
    return Dataset(raw_data=[images[user][order], labels[user][order]], user_id=user)


data = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(work.CLIENTS))))
FederatedAveraging().run(
    backend=SimulatedBackend(training_data=data, val_data=None),
    model=model,
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=work.ROUNDS,
        evaluation_frequency=work.ROUNDS,
        train_cohort_size=work.COHORT,
        val_cohort_size=None,
    ),
    model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.LR, local_batch_size=work.BATCH),
    model_eval_params=NNEvalHyperParams(local_batch_size=work.SAMPLES),
    callbacks=[Tick()],
)
some, truth = map(torch.from_numpy, work.few())
clock.report(net.loss(some, truth).item())
