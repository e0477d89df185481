"""Small hypernetworks, one per client, that say how much each layer takes from whom (pFedLA).

Ma et al., CVPR 2022, section 3.2: the hypernetwork of client i maps its embedding v_i to weights
alpha_i[l, j], with which layer l of client i's model is mixed from the models of all clients j
(eq. 3 and 4).
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.nets.shapes import check_size


class LayerWeights(nn.Module):
    """One multi-layer perceptron per client, all of them stacked in one tensor computation.

    For client i: embedding v_i, Linear(e, H), ReLU, then ``hidden_layers`` times (Linear(H, H),
    ReLU), then for each layer of the target a Linear(H, n) and the softmax over its n outputs.
    Nothing is shared between clients, so a gradient from client i's weights reaches only the rows i
    of the parameters. Memory: n (e H + hidden_layers H^2 + L n H) numbers, with L layers.

    The paper's text gives "several fully connected layers", one for the weights of each layer, and
    that these sum to one. Sizes, activations and how they come to sum to one stand in a supplement
    that is not published with it: ReLU, the softmax, embeddings from N(0, 1) and PyTorch's own
    initialisation of linear layers are ours.

    Args:
        clients: n.
        layers: number of the target's layers L, for each target size.
        embedding_size: e, length of a client's embedding.
        hidden: H, units of a hidden layer.
        hidden_layers: number of (Linear(H, H), ReLU) blocks, 0 or more.

    Raises:
        UserError: a malformed size name, or a number out of range.
    """

    def __init__(
        self,
        clients: int,
        layers: Mapping[str, int],
        embedding_size: int = 100,
        hidden: int = 100,
        hidden_layers: int = 1,
    ) -> None:
        super().__init__()
        if hidden_layers < 0 or min(clients, embedding_size, hidden, *layers.values()) < 1:
            raise UserError(
                "clients, layers, embedding_size and hidden must be at least 1 and hidden_layers "
                f"at least 0, got {clients}, {dict(layers)}, {embedding_size}, {hidden} and "
                f"{hidden_layers}; raise the number that is too small"
            )
        for size in layers:
            check_size(size)
        self.clients, self.layers = clients, dict(layers)
        self.embeddings = nn.Embedding(clients, embedding_size)
        widths = [embedding_size] + [hidden] * (hidden_layers + 1)
        self.trunk = nn.ModuleList(
            _StackedLinear(clients, inputs, hidden) for inputs in widths[:-1]
        )
        self.heads = nn.ModuleDict(
            {size: _StackedLinear(clients, hidden, L * clients) for size, L in layers.items()}
        )

    def forward(self, ids: Tensor, size: str = "base", members: Tensor | None = None) -> Tensor:
        """Returns the weights of C clients.

        Args:
            ids: (C,) int64 the clients.
            size: their target size.
            members: (n,) bool, False for a client that must get weight 0; all True where None.

        Returns:
            (C, L, n): weights >= 0 that sum to 1 over the last dimension.
        """
        features: Tensor = self.embeddings(ids)  # (C, e)
        for layer in self.trunk:
            features = F.relu(layer(features, ids))  # (C, H)
        outputs: Tensor = self.heads[size](features, ids)
        logits = outputs.view(len(ids), self.layers[size], self.clients)
        if members is not None:
            logits = logits.masked_fill(~members, -torch.inf)
        return logits.softmax(dim=-1)


class _StackedLinear(nn.Module):
    """n linear layers, one per client: rows x (C, inputs) of the clients ids (C,) to (C, outputs).

    Each is initialised as ``nn.Linear`` is.
    """

    def __init__(self, clients: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(clients, outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(clients, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.einsum("coi,ci->co", self.weight[ids], x) + self.bias[ids]
