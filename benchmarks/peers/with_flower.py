"""FedAvg by Flower's simulation, with PyTorch; its workers are Ray's, one for each core."""

import torch
import work
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

clock = work.Clock()
client, server = ClientApp(), ServerApp()


def network():
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


@client.train()
def train(message, context):
    images, labels = (torch.from_numpy(each[context.node_config["partition-id"]]) for each in work.data())
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LR)
    for image, label in DataLoader(TensorDataset(images, labels), batch_size=work.BATCH, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(image), label).backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(reply), reply_to=message)


def evaluate(r, arrays):
    if r:
        clock.tick(r)


@server.main()
def main(grid, context):
    model = network()
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), work.start(), strict=True):
            parameter.copy_(torch.from_numpy(array.T))
    strategy = FedAvg(
        fraction_train=work.COHORT / work.CLIENTS, fraction_evaluate=0.0, min_available_nodes=work.CLIENTS
    )
    result = strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=work.ROUNDS,
        evaluate_fn=evaluate,
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    some, truth = map(torch.from_numpy, work.few())
    clock.report(F.cross_entropy(model(some), truth).item())


run_simulation(server, client, num_supernodes=work.CLIENTS)
