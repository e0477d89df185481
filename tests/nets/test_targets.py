"""Targets against layer-by-layer formulas, textbook layer order and the papers' counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hyperfed.errors import UserError
from hyperfed.nets import (
    ITPFLMLP,
    MLP,
    TARGETS,
    CharLSTM,
    LeNet,
    LeNetBN,
    OmniglotNet,
    PFedKTCNN,
    PFedLACNN,
    PFLlibCNN,
    build_target,
    head_names,
)
from hyperfed.system.randomness import generator, seeded


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(0, "images"), dtype=torch.float64)


def textbook_lenet(model: nn.Module, x: Tensor) -> Tensor:
    """Convolution, ReLU, pool; NCHW memory; from the model's tensors only."""
    p = dict(model.named_parameters())
    x = x.contiguous()
    for layer in ("conv1", "conv2"):
        x = F.conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"])
        x = x.relu().unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
    x = x.contiguous().reshape(len(x), -1)
    for layer in ("fc1", "fc2"):
        x = (x @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]).relu()
    return x @ p["fc3.weight"].T + p["fc3.bias"]


class TestLeNet:
    @pytest.mark.parametrize("width", [8, 16, 32])
    def test_parameters_on_cifar10(self, width):
        expected = (
            (3 * 25 + 1) * width
            + (width * 25 + 1) * 2 * width
            + (2 * width * 5 * 5 + 1) * 120
            + (120 + 1) * 84
            + (84 + 1) * 10
        )
        assert count(LeNet((3, 32, 32), 10, width=width)) == expected

    def test_names(self):
        model = LeNet((3, 32, 32), 10)
        layers = ["conv1", "conv2", "fc1", "fc2", "fc3"]
        expected = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
        assert [name for name, _ in model.named_parameters()] == expected

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_equals_textbook_order(self, layout):
        with seeded(1):
            model = LeNet((3, 20, 24), 7, width=4, hidden=(11, 9)).double()
        x = images(5, 3, 20, 24).to(memory_format=layout).requires_grad_()
        y = torch.arange(5)

        logits = model(x)
        expected = textbook_lenet(model, x)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

        inputs = [x, *model.parameters()]
        torch.testing.assert_close(
            torch.autograd.grad(F.cross_entropy(logits, y), inputs),
            torch.autograd.grad(F.cross_entropy(expected, y), inputs),
            rtol=1e-10,
            atol=1e-12,
        )

    @pytest.mark.parametrize(
        ("shape", "pixels"),
        [
            ((1, 16, 16), 1 * 1),
            ((1, 28, 28), 4 * 4),
            ((3, 32, 32), 5 * 5),
            ((3, 17, 40), 1 * 7),
            ((2, 64, 33), 13 * 5),
        ],
    )
    def test_any_side_and_channels(self, shape, pixels):
        model = LeNet(shape, 6, width=3)
        assert model.fc1.in_features == 6 * pixels
        assert model(torch.zeros(2, *shape)).shape == (2, 6)

    @pytest.mark.parametrize("size", [(17, 20), (16, 31), (32, 32)])
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_without_a_gradient_the_same_bits(self, size, layout):
        model = LeNet((3, *size), 10).double()
        x = images(4, 3, *size)
        x[0, 0, 9, 9] = torch.nan
        x = x.contiguous(memory_format=layout)
        with torch.no_grad():
            found = model(x)
        assert found.isnan().any()
        assert not found.isnan().all()
        torch.testing.assert_close(found, model(x).detach(), rtol=0, atol=0, equal_nan=True)


class TestPFedKTCNN:
    def test_parameters_are_the_papers(self):
        assert count(PFedKTCNN((3, 32, 32), 10)) == 1_706_458

    def test_layers_are_the_papers(self):
        model = PFedKTCNN((3, 32, 32), 100)
        assert model.conv1.weight.shape == (16, 3, 5, 5)
        assert model.conv2.weight.shape == (32, 16, 5, 5)
        assert model.fc1.weight.shape == (1920, 800)
        assert model.fc2.weight.shape == (80, 1920)
        assert model.fc3 is not None
        assert model.fc3.weight.shape == (100, 80)


class TestPFLlibCNN:
    @pytest.mark.parametrize(
        ("shape", "flat", "parameters"),
        [((1, 28, 28), 1024, 582_026), ((3, 32, 32), 1600, 878_538)],
    )
    def test_equals_its_layers_in_textbook_order(self, shape, flat, parameters):
        with seeded(1):
            model = PFLlibCNN(shape, 10).double()
        assert count(model) == parameters
        weight = dict(model.named_parameters())
        outputs = {"conv1": 32, "conv2": 64, "fc1": 512, "fc2": 10}
        assert {name: len(weight[f"{name}.weight"]) for name in outputs} == outputs
        assert weight["fc1.weight"].shape[1] == flat
        x = images(3, *shape)
        expected = x
        for name in ("conv1", "conv2"):
            expected = F.conv2d(expected, weight[f"{name}.weight"], weight[f"{name}.bias"])
            expected = F.max_pool2d(F.relu(expected), 2)
        expected = F.relu(F.linear(expected.flatten(1), weight["fc1.weight"], weight["fc1.bias"]))
        expected = F.linear(expected, weight["fc2.weight"], weight["fc2.bias"])
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)

    def test_base_and_head_are_parted_at_its_last_layer(self):
        assert head_names(PFLlibCNN((1, 28, 28), 10)) == ("fc2.weight", "fc2.bias")


class TestLeNetBN:
    def test_normalises_before_pooling_and_relu(self):
        with seeded(3):
            model = LeNetBN((3, 16, 18), 4).double()
        p = dict(model.named_parameters())
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            nn.init.normal_(
                p[name], generator=generator(3, name)
            )  # negative scales tell orders apart
        x = images(6, 3, 16, 18)
        expected = x
        for i in (1, 2):
            h = F.conv2d(expected, p[f"conv{i}.weight"], p[f"conv{i}.bias"])
            mean = h.mean((0, 2, 3), keepdim=True)
            variance = h.var((0, 2, 3), keepdim=True, correction=0)
            scale, shift = p[f"norm{i}.weight"], p[f"norm{i}.bias"]
            h = (h - mean) / (variance + 1e-5).sqrt() * scale[:, None, None] + shift[:, None, None]
            expected = h.relu().unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
        expected = expected.reshape(6, -1)
        for layer in ("fc1", "fc2"):
            expected = (expected @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]).relu()
        expected = expected @ p["fc3.weight"].T + p["fc3.bias"]
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)

    def test_that_of_pfedla_has_neither_scale_nor_shift(self):
        with seeded(4):
            model = PFedLACNN((3, 32, 32), 10).double()
            whole = LeNetBN((3, 32, 32), 10).double()
        names = {name for name, _ in LeNet((3, 32, 32), 10).named_parameters()}
        assert {name for name, _ in model.named_parameters()} == names
        assert count(model) == count(LeNet((3, 32, 32), 10))
        assert {name for name, _ in model.named_buffers()} == {n for n, _ in whole.named_buffers()}
        whole.load_state_dict(model.state_dict(), strict=False)  # its scale is 1, its shift 0
        x = images(5, 3, 32, 32)
        torch.testing.assert_close(model(x), whole(x))

    def test_vmap_over_clients_equals_a_loop(self):
        with seeded(5):
            model = LeNetBN((1, 16, 16), 3).double()
        noise = generator(5, "models")
        models = {
            name: tensor + 0.1 * torch.rand(2, *tensor.shape, generator=noise, dtype=tensor.dtype)
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }
        models["norm1.num_batches_tracked"] = torch.zeros(2, dtype=torch.int64)
        models["norm2.num_batches_tracked"] = torch.zeros(2, dtype=torch.int64)
        x = images(2, 4, 1, 16, 16)

        def forward(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
            copy = {name: tensor.clone() for name, tensor in tensors.items()}  # statistics move
            result: Tensor = functional_call(model, copy, (x,))
            return result

        loop = torch.stack([forward({k: v[i] for k, v in models.items()}, x[i]) for i in range(2)])
        torch.testing.assert_close(vmap(forward)(models, x), loop)


class TestOmniglotNet:
    def test_parameters(self):
        expected = (9 + 1) * 64 + 3 * (64 * 9 + 1) * 64 + (64 + 1) * 84 + (84 + 1) * 55
        assert count(OmniglotNet((1, 28, 28), 55)) == expected

    @pytest.mark.parametrize("size", [(35, 20), (16, 32), (32, 16)])
    def test_equals_textbook_order(self, size):
        with seeded(6):
            model = OmniglotNet((1, *size), 5, width=3, hidden=7).double()
        p = dict(model.named_parameters())
        x = images(4, 1, *size)
        expected = x
        for i in range(1, 5):
            h = F.conv2d(expected, p[f"conv{i}.weight"], p[f"conv{i}.bias"], padding=1).relu()
            expected = h.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
        expected = expected.reshape(4, -1) @ p["fc1.weight"].T + p["fc1.bias"]
        expected = expected.relu() @ p["fc2.weight"].T + p["fc2.bias"]
        torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)


class TestMLP:
    @pytest.mark.parametrize("hidden", [(), (5,), (5, 4)])
    def test_equals_matrix_products(self, hidden):
        with seeded(7):
            model = MLP((2, 3, 4), 6, hidden).double()
        x = images(3, 2, 3, 4)
        expected = x.reshape(3, 24)
        layers = len(hidden) + 1
        p = dict(model.named_parameters())
        for i in range(layers):
            expected = expected @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"]
            if i < layers - 1:
                expected = expected.relu()
        torch.testing.assert_close(model(x), expected)
        assert len(p) == 2 * layers

    def test_a_number_is_one_hidden_layer(self):
        one, default = MLP((4,), 3, 7), MLP((4,), 3)
        assert [tuple(layer.weight.shape) for layer in one.layers] == [(7, 4), (3, 7)]
        assert [tuple(layer.weight.shape) for layer in default.layers] == [(200, 4), (3, 200)]


class TestITPFLMLP:
    def test_equals_matrix_products_but_for_a_fifth_of_what_the_last_layer_takes(self):
        with seeded(7):
            model = ITPFLMLP((6,), 4).double()
        x = images(50, 6)
        w = {name: p.detach() for name, p in model.named_parameters()}
        assert {name: len(w[name]) for name in w if name.endswith("bias")} == {
            "dense1.bias": 500, "dense2.bias": 500, "dense3.bias": 4,
        }  # fmt: skip
        h = x
        for layer in ("dense1", "dense2"):
            h = (h @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).relu()
        expected = h @ w["dense3.weight"].T + w["dense3.bias"]
        torch.testing.assert_close(model.eval()(x), expected)
        seen = []
        model.dense3.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        model.train()(x)
        on = h > 0
        kept = seen[0] != 0
        torch.testing.assert_close(seen[0][kept], (h / 0.8)[kept])
        assert abs(float(kept[on].double().mean()) - 0.8) < 0.02  # about 12,500 draws
        assert not kept[~on].any()


class TestCharLSTM:
    def test_equals_the_recurrence(self):
        """Gates i, f, g, o as Hochreiter & Schmidhuber's cell with forget gate, step by step."""
        with seeded(8):
            model = CharLSTM(9, embedding=3, hidden=4, layers=2).double()
        p = dict(model.named_parameters())
        x = torch.randint(9, (5, 6), generator=generator(8))
        sequence = [p["embedding.weight"][x[:, t]] for t in range(6)]
        for layer in range(2):
            h = c = torch.zeros(5, 4, dtype=torch.float64)
            states = []
            for value in sequence:
                gates = (
                    value @ p[f"lstm.weight_ih_l{layer}"].T
                    + p[f"lstm.bias_ih_l{layer}"]
                    + h @ p[f"lstm.weight_hh_l{layer}"].T
                    + p[f"lstm.bias_hh_l{layer}"]
                )
                i, f, g, o = gates.split(4, dim=1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states.append(h)
            sequence = states
        expected = sequence[-1] @ p["fc.weight"].T + p["fc.bias"]
        torch.testing.assert_close(model(x), expected)

    def test_sizes_by_default(self):
        """As McMahan et al. describe it; what tells classes of texts is smaller."""
        texts = {"input_shape": (80,), "classes": 90}
        char, text = (build_target(name, **texts) for name in ("char_lstm", "text_lstm"))
        for model, hidden, layers in ((CharLSTM(90), 256, 2), (char, 256, 2), (text, 64, 1)):
            assert model.embedding.embedding_dim == 8
            assert (model.lstm.hidden_size, model.lstm.num_layers) == (hidden, layers)
            assert model.fc.out_features == 90

    def test_uses_the_parameters_it_is_called_with(self):
        """LSTM modules hold a second, flat list of their weights; it must not be what is read."""
        with seeded(9):
            model, other = CharLSTM(9, hidden=4).double(), CharLSTM(9, hidden=4).double()
        x = torch.randint(9, (2, 6), generator=generator(9))

        def loss(tensors: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(model, tensors, (x,)).square().sum()
            return result

        tensors = {name: parameter.detach() for name, parameter in other.named_parameters()}
        other(x).square().sum().backward()
        expected = {name: parameter.grad for name, parameter in other.named_parameters()}
        torch.testing.assert_close(loss(tensors), other(x).square().sum().detach())
        torch.testing.assert_close(grad(loss)(tensors), expected)


class TestBuildTarget:
    OPTIONS: tuple[tuple[str, tuple[int, ...], dict[str, object]], ...] = (
        ("lenet", (3, 32, 32), {"width": 8, "hidden": [20, 10]}),
        ("omniglot_net", (1, 28, 28), {"width": 4, "hidden": 5}),
        ("mlp", (1, 8, 8), {"hidden": [5, 4]}),
        ("itpfl_mlp", (16,), {}),
        ("lenet_bn", (3, 32, 32), {"affine": False}),
        ("pfedla_cnn", (3, 32, 32), {}),
        ("pfedkt_cnn", (3, 32, 32), {}),
        ("pfllib_cnn", (1, 28, 28), {}),
        ("char_lstm", (12,), {"embedding": 3, "hidden": 4, "layers": 1}),
        ("text_lstm", (12,), {"embedding": 3, "hidden": 4, "layers": 2}),
    )

    @pytest.mark.parametrize(("name", "input_shape", "options"), OPTIONS)
    def test_builds_every_target(self, name, input_shape, options):
        model = build_target(name, input_shape=input_shape, classes=13, **options)
        dtype = torch.int64 if name.endswith("lstm") else torch.float32
        assert model(torch.zeros(2, *input_shape, dtype=dtype)).shape == (2, 13)

    def test_the_list_above_is_complete(self):
        assert {name for name, _, _ in self.OPTIONS} == set(TARGETS)

    def test_options_arrive(self):
        model = build_target("lenet", input_shape=(1, 28, 28), classes=3, width=5)
        assert model.state_dict()["conv1.weight"].shape == (5, 1, 5, 5)
        text = build_target("char_lstm", input_shape=(7,), classes=5, embedding=3, hidden=4)
        assert text.state_dict()["lstm.weight_ih_l0"].shape == (4 * 4, 3)
        assert text.state_dict()["embedding.weight"].shape == (5, 3)
        sizes = {"embedding": 3, "hidden": 4, "layers": 2}
        text = build_target("text_lstm", input_shape=(7,), classes=5, **sizes)
        assert text.state_dict()["embedding.weight"].shape == (257, 3)
        assert text.state_dict()["lstm.weight_ih_l0"].shape == (4 * 4, 3)
        assert text.state_dict()["lstm.weight_ih_l1"].shape == (4 * 4, 4)
        assert "lstm.weight_ih_l2" not in text.state_dict()

    @pytest.mark.parametrize(("name", "input_shape", "options"), OPTIONS)
    def test_seeds_reproduce(self, name, input_shape, options):
        states = []
        for seed in (0, 0, 1):
            with seeded(seed):
                model = build_target(name, input_shape=input_shape, classes=3, **options)
            states.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])

    def test_unknown_name_suggests_the_nearest(self):
        with pytest.raises(UserError, match="got 'lennet'; did you mean 'lenet'"):
            build_target("lennet", input_shape=(1, 28, 28), classes=3)
        with pytest.raises(UserError, match=r"got 'xyz'$"):  # like none of them
            build_target("xyz", input_shape=(1, 28, 28), classes=3)

    def test_unknown_option_lists_the_known(self):
        with pytest.raises(UserError, match="options of mlp are hidden, got hiden, width"):
            build_target("mlp", input_shape=(1, 28, 28), classes=3, hiden=(3,), width=1)

    @pytest.mark.parametrize(
        "name", ["lenet", "omniglot_net", "lenet_bn", "pfedkt_cnn", "pfllib_cnn"]
    )
    @pytest.mark.parametrize("input_shape", [(28, 28), (1, 15, 28), (1, 28, 15), (0, 28, 28)])
    def test_image_shapes(self, name, input_shape):
        with pytest.raises(UserError, match="sides of at least 16, got "):
            build_target(name, input_shape=input_shape, classes=3)

    def test_text_shapes(self):
        with pytest.raises(UserError, match=r"shape \(T,\), got input_shape \(1, 28, 28\)"):
            build_target("char_lstm", input_shape=(1, 28, 28), classes=3)

    @pytest.mark.parametrize(
        ("name", "input_shape", "options", "message"),
        [
            ("lenet", (1, 28, 28), {"width": 0}, "width must be at least 1, got 0"),
            ("lenet", (1, 28, 28), {"hidden": (5,)}, r"outputs of fc1 and fc2, got \(5,\)"),
            ("lenet", (1, 28, 28), {"hidden": 5}, "outputs of fc1 and fc2, got 5"),
            ("lenet", (1, 28, 28), {"hidden": (0, 5)}, "fc1 must be at least 1, got 0"),
            ("lenet", (1, 28, 28), {"hidden": (5, 0)}, "fc2 must be at least 1, got 0"),
            ("omniglot_net", (1, 28, 28), {"width": 0}, "width must be at least 1, got 0"),
            ("omniglot_net", (1, 28, 28), {"hidden": -1}, "hidden must be at least 1, got -1"),
            (
                "omniglot_net",
                (1, 28, 28),
                {"hidden": (5, 4)},
                r"hidden must be one number, got \(5,",
            ),
            ("mlp", (4,), {"hidden": (3, 0)}, "layer must be at least 1, got 0"),
            ("char_lstm", (4,), {"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
            ("char_lstm", (4,), {"embedding": 0}, "embedding must be at least 1, got 0"),
            ("char_lstm", (4,), {"hidden": 0}, "hidden must be at least 1, got 0"),
            ("char_lstm", (4,), {"layers": 0}, "layers must be at least 1, got 0"),
        ],
    )
    def test_sizes_out_of_range(self, name, input_shape, options, message):
        with pytest.raises(UserError, match=message):
            build_target(name, input_shape=input_shape, classes=3, **options)

    @pytest.mark.parametrize(("name", "input_shape", "options"), OPTIONS)
    def test_no_classes(self, name, input_shape, options):
        said = {"mlp": "layer", "char_lstm": "vocabulary"}.get(name, "classes")
        with pytest.raises(UserError, match=f"{said} must be at least 1, got 0"):
            build_target(name, input_shape=input_shape, classes=0, **options)
