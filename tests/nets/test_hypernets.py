"""Hypernetworks against plain matrix products of their weights, in float64."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.nets import (
    Chunked,
    ChunkHeads,
    DescribedChunks,
    LeNet,
    MultiHead,
    PFedKTCNN,
    SingleOutput,
    shapes_of,
)
from hyperfed.nets.layers import draw_weights, update_norms
from hyperfed.nets.shapes import spread_of
from hyperfed.system.randomness import generator, seeded

SMALL = {"conv.weight": torch.Size([2, 1, 3]), "conv.bias": torch.Size([2]), "scale": torch.Size()}
SIZES = {
    "S": {"fc.weight": torch.Size([2, 3]), "fc.bias": torch.Size([2])},
    "M": {"fc.weight": torch.Size([4, 3]), "fc.bias": torch.Size([4])},
    "L": {"fc.weight": torch.Size([8, 3]), "fc.bias": torch.Size([8])},
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(0, "draw"), dtype=torch.float64)


def matrices(module: nn.Module, *prefixes: str) -> list[tuple[Tensor, Tensor]]:
    """The (weight, bias) pairs under each prefix, pulled out of the module."""
    state = module.state_dict()
    return [(state[f"{prefix}.weight"], state[f"{prefix}.bias"]) for prefix in prefixes]


def hand_made(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Linear layers with ReLU between them and none after the last, one row at a time."""
    rows = []
    for row in x:
        for i, (weight, bias) in enumerate(layers):
            inputs = row if i == 0 else row.clamp(min=0)
            row = (weight * inputs).sum(1) + bias  # noqa: PLW2901
        rows.append(row)
    return torch.stack(rows)


def doubled(layer: nn.Linear) -> nn.Linear:
    """The layer with a weight that is twice what is trained."""

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    return register_parametrization(layer, "weight", Double())


class TestShapesOf:
    def test_lists_parameters_in_order_and_no_buffers(self):
        module = nn.Sequential(nn.Conv1d(2, 3, 5), nn.BatchNorm1d(3), nn.Linear(4, 1, bias=False))
        assert list(shapes_of(module).items()) == [
            ("0.weight", (3, 2, 5)),
            ("0.bias", (3,)),
            ("1.weight", (3,)),
            ("1.bias", (3,)),
            ("2.weight", (1, 4)),
        ]


class TestMultiHead:
    @pytest.mark.parametrize("clients", [1, 3])
    @pytest.mark.parametrize("hidden_layers", [0, 1, 3])
    def test_equals_matrix_products(self, clients, hidden_layers):
        with seeded(1):
            net = MultiHead({"base": SMALL}, 4, hidden=5, hidden_layers=hidden_layers).double()
        descriptor = draw(clients, 4)
        trunk = matrices(net, *(f"trunk.{2 * i}" for i in range(hidden_layers + 1)))
        features = hand_made(descriptor, trunk)

        model = net(descriptor)

        assert list(model) == list(SMALL)
        for name, shape in SMALL.items():
            ((weight, bias),) = matrices(net, f"heads.base/{name.replace('.', '/')}")
            expected = torch.stack([(weight @ row + bias).reshape(shape) for row in features])
            torch.testing.assert_close(model[name], expected, rtol=1e-12, atol=1e-12)

    def test_layers_are_pfedhns(self):
        net = MultiHead({"base": shapes_of(LeNet((3, 32, 32), 10))}, 13)
        trunk = [tuple(layer.weight.shape) for layer in net.trunk if isinstance(layer, nn.Linear)]
        assert trunk == [(100, 13), (100, 100), (100, 100), (100, 100)]
        assert list(net.heads)[:3] == [
            "base/conv1/weight",
            "base/conv1/bias",
            "base/conv2/weight",
        ]
        assert net.heads["base/fc1/weight"].weight.shape == (96_000, 100)

    def test_only_the_size_asked_for_is_computed(self):
        with seeded(2):
            net = MultiHead(SIZES, 3, hidden=5).double()
        model = net(draw(2, 3), "M")
        assert {name: tuple(tensor.shape) for name, tensor in model.items()} == {
            "fc.weight": (2, 4, 3),
            "fc.bias": (2, 4),
        }
        torch.stack([tensor.square().sum() for tensor in model.values()]).sum().backward()
        touched = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
        trunk = {f"trunk.{i}.{kind}" for i in (0, 2, 4, 6) for kind in ("weight", "bias")}
        heads = {
            f"heads.M/fc/{head}.{kind}"
            for head in ("weight", "bias")
            for kind in ("weight", "bias")
        }
        assert touched == trunk | heads

    def test_the_sizes_share_the_trunk(self):
        """The outputs are those of separate hypernetworks with the same trunk."""
        with seeded(3):
            net = MultiHead(SIZES, 3, hidden=5).double()
        descriptor = draw(2, 3)
        for size, tensors in SIZES.items():
            alone = MultiHead({size: tensors}, 3, hidden=5).double()
            state = net.state_dict()
            alone.load_state_dict({name: state[name] for name in alone.state_dict()})
            torch.testing.assert_close(net(descriptor, size), alone(descriptor, size))

    def test_an_arbitrary_module_runs_what_is_generated(self):
        """One-dimensional convolution and batch norm: only parameters are generated."""
        with seeded(4):
            norm = nn.BatchNorm1d(3)
            norm.running_mean = torch.tensor([0.1, -0.2, 0.3])
            module = nn.Sequential(nn.Conv1d(2, 3, 3), norm).double().eval()
            net = MultiHead({"base": shapes_of(module)}, 4, hidden=5).double()
        model = net(draw(1, 4))
        assert set(model) == {"0.weight", "0.bias", "1.weight", "1.bias"}

        x = draw(2, 2, 6)
        tensors = {name: tensor[0] for name, tensor in model.items()}
        output = functional_call(module, tensors, (x,))

        windows = x.unfold(2, 3, 1)  # (B, 2, 4, 3)
        hidden = torch.einsum("bctk,ock->bot", windows, tensors["0.weight"])
        hidden = hidden + tensors["0.bias"][:, None] - norm.running_mean[:, None]
        scale = tensors["1.weight"] / (1 + 1e-5) ** 0.5
        expected = hidden * scale[:, None] + tensors["1.bias"][:, None]
        torch.testing.assert_close(output, expected)

    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput])
    def test_vmap_over_hypernetworks_equals_a_loop(self, kind):
        """Values and gradients, as when every client has a hypernetwork of its own (pFedLA)."""
        with seeded(5):
            net = kind({"base": SMALL}, 4, hidden=5).double()
        noise = generator(5, "noise")
        stacked = {
            name: torch.randn(3, *tensor.shape, generator=noise, dtype=tensor.dtype)
            for name, tensor in net.named_parameters()
        }
        descriptor = draw(3, 2, 4)

        def loss(tensors: dict[str, Tensor], descriptor: Tensor) -> Tensor:
            model: Mapping[str, Tensor] = functional_call(net, tensors, (descriptor,))
            return torch.stack([tensor.cos().sum() for tensor in model.values()]).sum()

        batched = vmap(grad(loss))(stacked, descriptor)
        for i in range(3):
            one = grad(loss)({name: t[i] for name, t in stacked.items()}, descriptor[i])
            torch.testing.assert_close({name: t[i] for name, t in batched.items()}, one)


class TestSingleOutput:
    def test_equals_matrix_products(self):
        with seeded(6):
            net = SingleOutput({"base": SMALL}, 4, hidden=5).double()
        descriptor = draw(3, 4)
        flat = hand_made(descriptor, matrices(net, "trunk.0", "trunk.2", "outputs.base"))
        model = net(descriptor)
        assert list(model) == list(SMALL)
        torch.testing.assert_close(model["conv.weight"], flat[:, :6].reshape(3, 2, 1, 3))
        torch.testing.assert_close(model["conv.bias"], flat[:, 6:8])
        torch.testing.assert_close(model["scale"], flat[:, 8])

    def test_layers_are_table_4s(self):
        """l-100-100-D for PeFLL's client network, with 3x32x32 images and 10 classes."""
        net = SingleOutput({"base": shapes_of(LeNet((3, 32, 32), 10))}, 25)
        layers = [tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")]
        parameters = 16 * 76 + 32 * 401 + 120 * 801 + 84 * 121 + 10 * 85
        assert layers == [(100, 25), (100, 100), (parameters, 100)]

    def test_only_the_size_asked_for_is_computed(self):
        net = SingleOutput(SIZES, 3, hidden=5)
        model = net(torch.ones(1, 3), "L")
        assert model["fc.weight"].shape == (1, 8, 3)
        model["fc.weight"].sum().backward()
        touched = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
        assert {name for name in touched if name.startswith("outputs")} == {
            "outputs.L.weight",
            "outputs.L.bias",
        }


class TestLowRank:
    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput])
    def test_equals_matrix_products(self, kind):
        with seeded(12):
            net = kind({"base": SMALL}, 4, hidden=5, hidden_layers=1, rank=2).double()
        descriptor = draw(3, 4)
        features = hand_made(descriptor, matrices(net, "trunk.0", "trunk.2"))  # no ReLU after it
        heads, narrow = ("heads.base/conv/weight", "trunk.3")
        if kind is SingleOutput:
            features, heads, narrow = features.clamp(min=0), "outputs.base", "trunk.4"
        ((a, bias),) = matrices(net, heads)
        b = net.state_dict()[f"{narrow}.weight"]
        assert b.shape == (2, 5)
        assert f"{narrow}.bias" not in net.state_dict()
        expected = (features @ (a @ b).T + bias)[:, :6].reshape(3, 2, 1, 3)
        made = net(descriptor)["conv.weight"]
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput])
    def test_a_new_one_is_as_wide_as_a_full_one(self, kind):
        """The matrix that the factors make, and the bias, whatever the rank.

        And so is the matrix of a head alone, since by SGD it learns as fast as what it is told is
        long: that must be as long as without the other factor.
        """
        shapes = {"base": {"w": torch.Size([4000])}}
        for rank in (1, 4, None):
            products, biases, alone = [], [], []
            for seed in range(40):
                with seeded(seed):
                    net = kind(shapes, 3, hidden=50, rank=rank)
                ((a, bias),) = matrices(
                    net, "heads.base/w" if kind is MultiHead else "outputs.base"
                )
                matrix = a if rank is None else a @ net.trunk[-1].weight.detach()
                products.append(matrix.square().mean())
                biases.append(bias.square().mean())
                alone.append(a.square().mean())
            assert torch.stack(alone).mean().item() == pytest.approx(1 / 150, rel=0.05)
            assert torch.stack(products).mean().item() == pytest.approx(1 / 150, rel=0.1)
            assert torch.stack(biases).mean().item() == pytest.approx(1 / 150, rel=0.05)

    def test_its_size(self):
        parameters = 16 * 76 + 32 * 401 + 120 * 801 + 84 * 121 + 10 * 85
        net = MultiHead({"base": shapes_of(LeNet((3, 32, 32), 10))}, 13, rank=4)
        trunk = 100 * 14 + 3 * 100 * 101 + 4 * 100
        assert sum(value.numel() for value in net.parameters()) == trunk + 5 * parameters


class TestDescribedChunks:
    @pytest.mark.parametrize("chunk", [1, 4, 9, 20])
    def test_equals_a_loop_over_clients_and_chunks(self, chunk):
        sizes = {"base": SMALL, "other": SIZES["S"]}
        with seeded(13):
            net = DescribedChunks(
                sizes,
                4,
                chunk=chunk,
                embedding=3,
                hidden=5,
                hidden_layers=1,
                spread={"base": {"conv.bias": 0.5}},
            ).double()
        layers = matrices(net, "network.0", "network.2", "network.4")
        # A square of 1 into Linear(7, 5), halved by ReLU, Linear(5, 5), halved, Linear(5, chunk).
        square = 1 / 3 + 1 / 21
        for _ in range(2):
            square = square / 2 / 3 + 1 / 15
        net.common()["scale"].fill_(0.25)
        descriptor = draw(2, 4)
        model = net(descriptor)
        assert list(model) == list(SMALL)
        for row in range(2):
            flat: list[float] = []
            for embedding in net.state_dict()["ids.base.weight"]:
                flat += hand_made(torch.cat([descriptor[row], embedding])[None], layers)[0].tolist()
            flat[6:8] = [value * 0.5 / math.sqrt(square) for value in flat[6:8]]
            flat[8] += 0.25
            expected = torch.tensor(flat, dtype=torch.float64)
            ours = torch.cat([tensor[row].flatten() for tensor in model.values()])
            torch.testing.assert_close(ours, expected[:9])

    def test_new_features_tell_chunks_apart(self):
        torch.manual_seed(0)
        net = DescribedChunks({"base": {"w": torch.Size([40_000])}}, 13)
        ids = net.ids["base"].get_parameter("weight")
        inputs = torch.cat([torch.randn(1, 13).expand(len(ids), -1), ids], dim=1)
        features = nn.functional.normalize(net.network[:-1](inputs), dim=1)
        assert (features @ features.T).mean() < 0.85

    def test_the_size_of_its_network_does_not_follow_the_targets(self):
        small, large = (
            DescribedChunks({"base": {"w": torch.Size([count])}}, 13) for count in (400, 400_000)
        )
        numbers = [sum(p.numel() for p in net.network.parameters()) for net in (small, large)]
        assert numbers[0] == numbers[1] == 27 * 100 + 10_100 + 101 * 400
        assert large.ids["base"].weight.shape == (1000, 13)

    def test_only_the_size_asked_for_is_computed(self):
        net = DescribedChunks(SIZES, 3, chunk=4, embedding=3, hidden=5)
        net(torch.ones(1, 3), "S")["fc.weight"].sum().backward()
        touched = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
        assert {name for name in touched if name.startswith("ids")} == {"ids.S.weight"}


class TestChunked:
    @pytest.mark.parametrize("hidden_layers", [0, 1, 2])
    @pytest.mark.parametrize("chunk", [1, 4, 9, 20])  # 9 parameters: exact, short and single chunks
    def test_equals_a_loop_over_chunks(self, hidden_layers, chunk):
        with seeded(7):
            net = Chunked(
                {"base": SMALL}, chunk=chunk, embedding=3, hidden=5, hidden_layers=hidden_layers
            ).double()
        layers = matrices(net, *(f"network.{2 * i}" for i in range(hidden_layers + 2)))
        flat: list[float] = []
        for embedding in net.state_dict()["ids.base.weight"]:
            flat += hand_made(embedding[None], layers)[0].tolist()

        model = net()

        assert list(model) == list(SMALL)
        position = 0
        for name, shape in SMALL.items():
            expected = torch.tensor(flat[position : position + shape.numel()], dtype=torch.float64)
            torch.testing.assert_close(model[name], expected.reshape(shape))
            position += shape.numel()
        assert len(flat) - position < chunk  # no chunk is generated in vain

    def test_layers_are_table_2s(self):
        net = Chunked({"base": shapes_of(PFedKTCNN((3, 32, 32), 10))})
        linear = [layer for layer in net.network if isinstance(layer, nn.Linear)]
        assert [(layer.in_features, layer.out_features) for layer in linear] == [
            (13, 100),
            (100, 100),
            (100, 400),
        ]
        # The paper counts 102,600 operations a call: a multiplication and an addition a weight.
        assert 2 * sum(layer.weight.numel() for layer in linear) == 102_600
        assert net.state_dict()["ids.base.weight"].shape == (4267, 13)  # 1,706,458 / 400

    @pytest.mark.slow
    @pytest.mark.parametrize("hidden_layers", [0, 1, 2])
    def test_a_new_one_makes_tensors_of_the_spread_asked_for(self, hidden_layers):
        with seeded(11):
            target = LeNet((3, 32, 32), 5)
        nn.init.zeros_(target.fc3.bias)
        wanted = spread_of(target)
        assert wanted["conv1.weight"] == pytest.approx(1 / math.sqrt(3 * 75), rel=0.05)
        net = Chunked(
            {"base": shapes_of(target)}, hidden_layers=hidden_layers, spread={"base": wanted}
        )
        plain = Chunked({"base": shapes_of(target)}, hidden_layers=hidden_layers)

        def square(net: Chunked, name: str) -> float:
            """Mean over 200 draws of a new hypernetwork."""
            noise = generator(11, "draws")
            models = [functional_call(net, draw_weights(net, noise)) for _ in range(200)]
            return torch.stack([model[name].square().mean() for model in models]).mean().item()

        for name in ("conv1.weight", "fc1.weight", "fc2.bias"):
            assert square(net, name) ** 0.5 == pytest.approx(wanted[name], rel=0.1)
        unscaled = square(plain, "fc1.weight") ** 0.5
        assert unscaled > 2 * wanted["fc1.weight"]
        assert square(net, "fc3.bias") == square(plain, "fc3.bias")  # zero: left as it is

    def test_only_the_size_asked_for_is_computed(self):
        net = Chunked(SIZES, chunk=4, embedding=3, hidden=5)
        model = net("S")
        assert {name: tuple(tensor.shape) for name, tensor in model.items()} == {
            "fc.weight": (2, 3),
            "fc.bias": (2,),
        }
        (model["fc.weight"].sum() + model["fc.bias"].sum()).backward()
        touched = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
        assert {name for name in touched if name.startswith("ids")} == {"ids.S.weight"}

    def test_vmap_over_hypernetworks_equals_a_loop(self):
        with seeded(8):
            net = Chunked({"base": SMALL}, chunk=4, embedding=3, hidden=5).double()
        noise = generator(8, "noise")
        stacked = {
            name: torch.randn(3, *tensor.shape, generator=noise, dtype=tensor.dtype)
            for name, tensor in net.named_parameters()
        }

        def loss(tensors: dict[str, Tensor]) -> Tensor:
            model: Mapping[str, Tensor] = functional_call(net, tensors, ())
            return torch.stack([tensor.cos().sum() for tensor in model.values()]).sum()

        batched = vmap(grad(loss))(stacked)
        for i in range(3):
            one = grad(loss)({name: t[i] for name, t in stacked.items()})
            torch.testing.assert_close({name: t[i] for name, t in batched.items()}, one)


class TestChunkHeads:
    OPTIONS = {"chunk": 4, "embedding": 3, "hidden": 5, "hidden_layers": 1}  # noqa: RUF012
    TARGETS = SIZES | {"other": {"w": torch.Size([2, 5]), "b": torch.Size([1])}}
    """Of 8, 16, 32 and 11 parameters: 2, 4, 8 and 3 chunks."""

    @pytest.mark.parametrize("size", ["S", "other"])
    def test_equals_a_loop_over_clients_and_chunks(self, size):
        with seeded(7):
            net = ChunkHeads(self.TARGETS, **self.OPTIONS).double()
        count, embedding = net.chunks[size], draw(2, net.chunks[size], 3)
        model = net(embedding, size)
        for client in range(2):
            flat: list[float] = []
            for place in range(count):
                layers = matrices(net, "trunk.0", "trunk.2", f"heads.{count}.{place}")
                flat += hand_made(embedding[client, place][None], layers)[0].tolist()
            position = 0
            for name, shape in self.TARGETS[size].items():
                piece = torch.tensor(flat[position:][: shape.numel()], dtype=torch.float64)
                torch.testing.assert_close(model[name][client], piece.reshape(shape))
                position += shape.numel()
            assert list(model) == list(self.TARGETS[size])
            assert 0 <= len(flat) - position < 4  # no chunk is generated in vain

    def test_targets_of_as_many_chunks_have_their_heads_in_common(self):
        like = {"fc.weight": torch.Size([9, 1])}  # 3 chunks, as "other" has
        net = ChunkHeads(self.TARGETS | {"like": like}, **self.OPTIONS)
        assert net.chunks == {"S": 2, "M": 4, "L": 8, "other": 3, "like": 3}
        assert {name: len([*heads.children()]) for name, heads in net.heads.items()} == {
            "2": 2,
            "3": 3,
            "4": 4,
            "8": 8,
        }
        embedding = torch.randn(1, 3, 3)
        ours, theirs = net(embedding, "other"), net(embedding, "like")
        torch.testing.assert_close(ours["w"].flatten()[:9], theirs["fc.weight"].flatten())

    def test_the_defaults_are_the_authors(self):
        net = ChunkHeads({"base": {"w": torch.Size([62, 100])}})
        assert net.chunks == {"base": 3}
        wide = [(layer.in_features, layer.out_features) for layer in net.trunk[::2]]
        assert wide == [(64, 128), (128, 128), (128, 128)]
        assert isinstance(net.trunk[-1], nn.ReLU)
        assert tuple(net.state_dict()["heads.3.2.weight"].shape) == (3072, 128)


class TestDrawWeights:
    def test_is_distributed_as_a_new_network(self):
        with seeded(10):
            net = Chunked({"base": SMALL}, chunk=40, embedding=4000, hidden=30)
        ours = draw_weights(net, generator(10, "weights"))
        assert {name: value.shape for name, value in ours.items()} == shapes_of(net)
        for name, value in net.named_parameters():
            theirs = value.detach()
            error = value.numel() ** -0.5  # standard error of a mean, in standard deviations
            assert abs(ours[name].mean().item()) < 4 * error * theirs.std().item()
            assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=4 * error)
            if name.startswith("network"):  # uniform: the largest of n is at the bound but for 1/n
                largest = theirs.abs().max().item()
                assert ours[name].abs().max().item() == pytest.approx(largest, rel=10 * error**2)

    def test_is_a_function_of_the_generator_and_leaves_the_network_alone(self):
        net = Chunked({"base": SMALL}, chunk=4, embedding=3, hidden=5).double()
        before = {name: value.detach().clone() for name, value in net.named_parameters()}
        with seeded(0):
            first = draw_weights(net, generator(1, "weights"))
        second = draw_weights(net, generator(1, "weights"))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        other = draw_weights(net, generator(2, "weights"))
        assert all((first[name] != other[name]).all() for name in first)
        torch.testing.assert_close(dict(net.named_parameters()), before, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "layer", [nn.Linear(90, 40), nn.Conv2d(10, 90, 3), nn.Conv1d(30, 80, 3)]
    )
    def test_of_a_layer_is_distributed_as_a_new_one(self, layer):
        ours = draw_weights(layer, generator(10, "weights"))
        bound = layer.weight[0].numel() ** -0.5
        for name, value in layer.named_parameters():
            assert ours[name].abs().max() <= bound
            rel = 4 * value.numel() ** -0.5
            assert ours[name].std().item() == pytest.approx(value.std().item(), rel=rel)

    def test_the_row_of_an_embedding_that_stands_for_padding_is_zero_as_in_a_new_one(self):
        ours = draw_weights(nn.Embedding(50, 40, padding_idx=3), generator(10, "weights"))
        zero = (ours["weight"] == 0).all(dim=1)
        assert zero.nonzero().flatten().tolist() == [3]

    @pytest.mark.parametrize(
        ("made", "expected"),
        [
            (weight_norm, lambda drawn: drawn),
            (spectral_norm, lambda drawn: drawn / torch.linalg.matrix_norm(drawn, 2)),
            (doubled, lambda drawn: 2 * drawn),  # with no way back to what it is made from
        ],
    )
    @pytest.mark.parametrize("within", [False, True])
    def test_a_weight_that_is_made_from_others_is_made_from_one_drawn_as_ever(
        self, made, expected, within
    ):
        layer = made(nn.Linear(9, 4))
        net = nn.Sequential(nn.ReLU(), layer) if within else layer
        before = {name: value.clone() for name, value in net.state_dict().items()}
        ours = draw_weights(net, generator(10, "weights"))
        torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
        trees.fill(net, ours)
        for _ in range(30):  # spectral_norm measures a weight each time that it is read
            _ = layer.weight
        source = generator(10, "weights")
        bias, drawn = (
            torch.empty(shape).uniform_(-1 / 3, 1 / 3, generator=source) for shape in (4, (4, 9))
        )
        assert torch.equal(layer.bias, bias)
        torch.testing.assert_close(layer.weight, expected(drawn), rtol=0.02, atol=0)

    def test_draws_what_it_is_asked_for_and_leaves_other_layers_as_they_are(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        start = {"1.weight": torch.tensor([7.0] * 4), "2.bias": torch.tensor([8.0, 9.0])}
        ours = draw_weights(net, generator(1, "weights"), start)
        assert list(ours) == ["1.weight", "2.bias"]
        assert ours["1.weight"].tolist() == [7.0] * 4
        assert start["2.bias"].tolist() == [8.0, 9.0]
        drawn = torch.empty(2).uniform_(-0.5, 0.5, generator=generator(1, "weights"))
        assert torch.equal(ours["2.bias"], drawn)


class TestSpectralNorm:
    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput])
    def test_bounds_every_weight_matrix(self, kind):
        with seeded(9):
            net = kind({"base": SMALL}, 4, hidden=6, spectral_norm=True).double()
        linear = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
        raw = [p for name, p in net.named_parameters() if name.endswith("weight.original")]
        for i, original in enumerate(raw):
            nn.init.normal_(original, std=i + 2, generator=generator(9, i))
            assert torch.linalg.matrix_norm(original, ord=2) > 1.5
        assert len(raw) == len(linear)
        for _ in range(300):  # one power iteration each
            update_norms(net)
        assert len(linear) >= 3
        for layer in linear:
            norm = torch.linalg.matrix_norm(layer.weight, ord=2)
            torch.testing.assert_close(norm, torch.ones_like(norm), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput])
    def test_making_models_changes_nothing_and_an_update_is_one_power_iteration(self, kind):
        with seeded(9):
            net = kind({"base": SMALL}, 4, hidden=6, spectral_norm=True).double()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        net(draw(1, 4))
        torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
        update_norms(net)
        prefixes = [name.removesuffix("0._u") for name in before if name.endswith("._u")]
        assert prefixes
        for prefix in prefixes:
            weight, v = before[f"{prefix}original"], before[f"{prefix}0._v"]
            u = weight @ v / (weight @ v).norm()
            v = weight.T @ u / (weight.T @ u).norm()
            after = net.state_dict()
            torch.testing.assert_close((after[f"{prefix}0._u"], after[f"{prefix}0._v"]), (u, v))
            layer = net.get_submodule(prefix.removesuffix(".parametrizations.weight."))
            torch.testing.assert_close(layer.weight, weight / (u @ weight @ v))

    def test_is_off_by_default(self):
        net = MultiHead({"base": SMALL}, 4)
        assert not any("original" in name for name, _ in net.named_parameters())


@pytest.mark.parametrize(
    "build",
    [
        lambda: MultiHead({"base": SMALL}, 4),
        lambda: SingleOutput({"base": SMALL}, 4),
        lambda: Chunked({"base": SMALL}),
        lambda: DescribedChunks({"base": SMALL}, 4),
    ],
    ids=["MultiHead", "SingleOutput", "Chunked", "DescribedChunks"],
)
def test_seeds_reproduce(build):
    states = []
    for seed in (0, 0, 1):
        with seeded(seed):
            net = build()
        states.append(torch.cat([parameter.flatten() for parameter in net.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


class TestErrors:
    KINDS = (
        lambda shapes: MultiHead(shapes, 4),
        lambda shapes: SingleOutput(shapes, 4),
        Chunked,
    )

    @pytest.mark.parametrize("build", KINDS)
    def test_nothing_to_generate(self, build):
        with pytest.raises(UserError, match="at least one target size, got none"):
            build({})
        with pytest.raises(UserError, match="size 'S' has none"):
            build({"S": shapes_of(nn.ReLU())})

    @pytest.mark.parametrize("build", KINDS)
    @pytest.mark.parametrize("size", ["", "a.b", "a/b", "half", "training"])
    def test_malformed_size_name(self, build, size):
        with pytest.raises(UserError, match=f"got '{size}'; rename it"):
            build({size: SMALL})

    def test_unknown_size(self):
        for call in (
            lambda: MultiHead(SIZES, 4)(torch.ones(1, 4), "XL"),
            lambda: SingleOutput(SIZES, 4)(torch.ones(1, 4), "XL"),
            lambda: Chunked(SIZES)("XL"),
            lambda: DescribedChunks(SIZES, 4)(torch.ones(1, 4), "XL"),
        ):
            with pytest.raises(UserError, match="generates the sizes S, M, L, got 'XL'"):
                call()

    @pytest.mark.parametrize("kind", [MultiHead, SingleOutput, DescribedChunks])
    @pytest.mark.parametrize("shape", [(4,), (1, 3), (1, 1, 4)])
    def test_wrong_descriptor(self, kind, shape):
        with pytest.raises(UserError, match=r"shape \(clients, 4\), got "):
            kind({"base": SMALL}, 4)(torch.ones(shape))

    def test_numbers_out_of_range(self):
        shapes = {"base": SMALL}
        for kind in (MultiHead, SingleOutput, DescribedChunks):
            with pytest.raises(UserError, match="descriptor_size must be at least 1, got 0"):
                kind(shapes, 0)
        with pytest.raises(UserError, match="hidden must be at least 1, got 0"):
            SingleOutput(shapes, 4, hidden=0)
        with pytest.raises(UserError, match="hidden_layers must be at least 0, got -1"):
            MultiHead(shapes, 4, hidden_layers=-1)
        with pytest.raises(UserError, match="rank must be at least 1, got 0"):
            MultiHead(shapes, 4, rank=0)
        with pytest.raises(UserError, match="embedding must be at least 1, got 0"):
            Chunked(shapes, embedding=0)
        with pytest.raises(UserError, match="chunk must be at least 1, got 0"):
            Chunked(shapes, chunk=0)
