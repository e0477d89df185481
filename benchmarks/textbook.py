"""What a script without hyperfed does, as tutorials and the authors' code have it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hyperfed.task import Task
from random_images import CLASSES, MEAN, STD

_MEAN, _STD = (torch.tensor(channel).view(3, 1, 1) for channel in (MEAN, STD))


class Textbook(nn.Module):
    """The LeNet in its usual order: convolution, ReLU, pooling."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 5)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        self.fc1 = nn.Linear(2 * width * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


def normalize(x: Tensor) -> Tensor:
    """Returns pixels (..., 3, H, W) as floats of mean 0 and deviation 1."""
    return (x.float() / 255 - _MEAN) / _STD


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float = 5e-3,
    momentum: float = 0.9,
    weight_decay: float = 5e-5,
    clip: float | None = None,
    transform: Callable[[Tensor], Tensor] = normalize,
) -> None:
    """Trains as a script would: an optimiser, a loop, and tensors in memory."""
    optimizer = torch.optim.SGD(
        net.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    net.train()
    for _ in range(steps):
        index = torch.randperm(len(x))[:batch]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(transform(x[index])), y[index])
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


class Images(Dataset[tuple[Tensor, Tensor]]):
    """One image at a time, normalised when asked for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return normalize(self.x[index]), self.y[index]


def evaluate(hyper_net: nn.Module, embeddings: Tensor, task: Task, *, batch: int = 64) -> float:
    """Returns the mean accuracy: a model is generated for every batch of every client."""
    net = Textbook()
    net.eval()
    correct = count = 0
    with torch.no_grad():
        for client in range(task.clients):
            for index in (task.val[client], task.test[client]):
                for x, y in DataLoader(Images(task.x[index], task.y[index]), batch_size=batch):
                    weights = hyper_net(embeddings[client : client + 1])
                    net.load_state_dict({name: value[0] for name, value in weights.items()})
                    correct += int((net(x).argmax(1) == y).sum())
                    count += len(y)
    return correct / count
