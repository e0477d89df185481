"""pFedHN, Proposition 1: the linear case is PCA of the local solutions."""

import pytest
import torch
from torch import Tensor, nn

from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from toys import (
    PLAIN,
    Federation,
)


class Linear(nn.Module):
    """The linear hypernetwork theta_i = W v_i."""

    def __init__(self, descriptor: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(descriptor, outputs, bias=False)

    def forward(self, descriptor: Tensor, size: str = "base") -> dict[str, Tensor]:
        return {"weight": self.matrix(descriptor).unsqueeze(1)}


@pytest.mark.slow
def test_proposition_1_the_linear_case_is_pca_of_the_local_solutions() -> None:
    """X_i'X_i = I: W spans the top k principal components, W v_i is the projection."""
    clients, samples, dimension, k = 8, 10, 6, 2
    draw = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.linalg.qr(torch.randn(samples, dimension, dtype=torch.float64, generator=draw))[0]
            for _ in range(clients)
        ]
    )
    truth = torch.randn(clients, dimension, dtype=torch.float64, generator=draw)
    noise = torch.randn(clients * samples, dtype=torch.float64, generator=draw)
    y = (x * truth.repeat_interleave(samples, 0)).sum(1) + 0.1 * noise
    rows = list(torch.arange(clients * samples).split(samples))
    task = Task(
        name="proposition 1",
        x=x,
        y=y,
        train=rows,
        val=rows,
        test=rows,
        models={"base": nn.Linear(dimension, 1, bias=False).double()},
        classes=0,
        loss=lambda output, target: (output[:, 0] - target).square().sum(),
    )
    # The loss is |theta - theta_i|^2 up to a constant: one local step of rate 1/2 lands on theta_i.
    federation = Federation(
        "pfedhn", task, **PLAIN, local_steps=1, batch_size=samples, local_lr=0.5, embedding_size=k
    )
    server = federation.server
    with seeded(3, "linear"):
        server.hyper_net = Linear(k, dimension).double()
    everything = [*server.embeddings.parameters(), *server.hyper_net.parameters()]
    server.optimizer = torch.optim.SGD(everything, lr=0.5 / clients, momentum=0.9)
    for number in range(600):
        federation.round(range(clients), number)

    local = torch.stack([x[r].T @ y[r] for r in rows])  # theta_i, rows
    _, _, right = torch.linalg.svd(local)  # PCA without centring, as in the proof
    projection = right[:k].T @ right[:k]
    matrix = server.hyper_net.matrix.weight.detach()
    ours = matrix @ torch.linalg.pinv(matrix)
    torch.testing.assert_close(ours, projection, rtol=0, atol=1e-6)
    for client in range(clients):
        model = federation.personal(client)["weight"][0]
        torch.testing.assert_close(model, projection @ local[client], rtol=0, atol=1e-6)
