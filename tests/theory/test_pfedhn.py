"""pFedHN's proposition 1 and theorem 1: by hand, by descent, by draws."""

import math

import pytest
import torch
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.nets.hypernets import MultiHead, SingleOutput
from hyperfed.nets.shapes import shapes_of
from hyperfed.theory.covering import log_covering_number
from hyperfed.theory.pfedhn import (
    Lipschitz,
    best_rank,
    expected_error,
    linear_hypernetwork,
    lipschitz_in_embedding,
    lipschitz_in_weights,
    samples_needed,
    samples_order,
    spectral_norms,
)

F64 = torch.float64


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_proposition_1_by_hand() -> None:
    # (3, 0), (0, 1), (3, 0): the sum of theta theta' is diag(18, 1), so W is the first axis; what
    # is lost is the second client's model, 1. About their mean the axis would be (1, -1/3) / norm.
    found = linear_hypernetwork(torch.tensor([[3.0, 0], [0, 1], [3, 0]], dtype=F64), 1)
    torch.testing.assert_close(
        found.models, torch.tensor([[3.0, 0], [0, 0], [3, 0]], dtype=F64), atol=1e-12, rtol=0
    )
    assert found.loss == pytest.approx(1)


@pytest.mark.parametrize("unequal", [False, True])
def test_proposition_1_is_where_descent_on_the_clients_losses_ends(unequal: bool) -> None:
    """sum_i |X_i W v_i - y_i|^2 with X_i'X_i = s_i I, minimised in W and V from a random start."""
    n, m, d, k = 7, 9, 5, 2
    draw = draws(0)
    scale = 1 + torch.arange(n, dtype=F64) if unequal else torch.ones(n, dtype=F64)
    x = torch.linalg.qr(torch.randn(n, m, d, dtype=F64, generator=draw))[0]
    x = x * scale.sqrt()[:, None, None]
    y = torch.randn(n, m, dtype=F64, generator=draw)
    weight = torch.randn(d, k, dtype=F64, generator=draw, requires_grad=True)
    embeddings = torch.randn(k, n, dtype=F64, generator=draw, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, embeddings],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        return (torch.einsum("nmd,dk,kn->nm", x, weight, embeddings) - y).square().sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss()
        total.backward()
        return total

    optimizer.step(closure)
    solutions = torch.einsum("nmd,nm->nd", x, y) / scale[:, None]
    found = linear_hypernetwork(solutions, k, scale)
    trained = (weight @ embeddings).T.detach()
    torch.testing.assert_close(trained, found.models, atol=1e-6, rtol=0)
    alone = (torch.einsum("nmd,nd->nm", x, solutions) - y).square().sum()
    assert loss().item() == pytest.approx(float(alone) + found.loss)  # the proof's constant
    torch.testing.assert_close(found.weight.T @ found.weight, torch.eye(k, dtype=F64))
    if unequal:
        assert (linear_hypernetwork(solutions, k).models - trained).abs().max() > 1e-3


def test_all_directions_are_training_alone() -> None:
    solutions = torch.randn(3, 4, dtype=F64, generator=draws(1))
    found = linear_hypernetwork(solutions, 4)
    torch.testing.assert_close(found.models, solutions)
    assert found.loss == pytest.approx(0, abs=1e-12)


def test_the_error_after_denoising_by_hand_and_by_draws() -> None:
    # Beside the first axis lie 1 and 4 of the truth, 2.5 on average; noise .1 stays in 1 direction.
    truth = torch.tensor([[2.0, 1, 0], [5, 0, -2]], dtype=F64)
    weight = torch.tensor([[1.0], [0], [0]], dtype=F64)
    assert expected_error(truth, weight, 0.1) == pytest.approx(2.6)
    assert expected_error(truth, torch.eye(3, dtype=F64), 0.1) == pytest.approx(0.3)  # alone
    noise = 0.1**0.5 * torch.randn(20_000, 2, 3, dtype=F64, generator=draws(2))
    error = ((truth + noise) @ weight @ weight.T - truth).square().sum(2).mean()
    assert float(error) == pytest.approx(2.6, rel=0.01)


def test_the_best_number_of_directions_is_the_one_with_the_least_error() -> None:
    truth = torch.randn(30, 4, dtype=F64, generator=draws(3)) * torch.tensor([3.0, 1, 0.3, 0.1])
    for variance in (0.001, 0.05, 0.5, 3, 30):
        errors = [
            expected_error(truth, linear_hypernetwork(truth, k).weight, variance)
            for k in range(1, 5)
        ]
        nothing = float(truth.square().sum(1).mean())
        best = min(range(5), key=lambda k, e=[nothing, *errors]: e[k])
        assert best_rank(truth, variance) == best
    assert best_rank(truth, 0.5) == 2


def test_a_hypernetwork_denoises_models_that_lie_in_few_directions() -> None:
    """With directions learned from the noisy models themselves, as pFedHN does."""
    draw = draws(4)
    truth = torch.randn(40, 2, dtype=F64, generator=draw) @ torch.randn(
        2, 20, dtype=F64, generator=draw
    )
    noisy = truth + 0.5 * torch.randn(40, 20, dtype=F64, generator=draw)

    def error(models: Tensor) -> float:
        return float((models - truth).square().sum(1).mean())

    errors = {k: error(linear_hypernetwork(noisy, k).models) for k in (1, 2, 20)}
    assert errors[2] < 0.5 * errors[20] == pytest.approx(0.5 * error(noisy))
    assert errors[2] < errors[1]


CONDITIONS = Lipschitz(radius=2.0, loss=3.0, weights=1.5, embedding=0.5)
SHORT = Lipschitz(radius=0.01, loss=1.0, weights=1.0, embedding=1.0)
NUMBERS = {"embedding_size": 4, "weights": 60, "clients": 10, "epsilon": 0.5, "delta": 0.1}


def test_theorem_1_by_hand() -> None:
    # R L (L_h + L_V) = 2 * 3 * 2 = 12; (k + N / n) / epsilon^2 = (4 + 6) / .25 = 40.
    assert samples_order(CONDITIONS, **NUMBERS) == pytest.approx(40 * math.log(12 / 0.05))
    assert samples_order(CONDITIONS, **NUMBERS, constant=7) == pytest.approx(280 * math.log(240))
    printed = samples_order(CONDITIONS, **NUMBERS, published=True)
    assert printed == pytest.approx(40 * math.log(12 / 0.1))
    # 2 / .25 [10 log(1 + 8 * 12 / .5) + log(20) / 10]
    expected = 8 * (10 * math.log(193) + math.log(20) / 10)
    assert samples_needed(CONDITIONS, **NUMBERS) == pytest.approx(expected)


def test_only_the_hypernetworks_part_of_theorem_1_falls_with_the_clients() -> None:
    many = samples_order(CONDITIONS, **(NUMBERS | {"clients": 10**9}))
    assert many == pytest.approx(4 / 0.25 * math.log(240))


def test_theorem_1_holds_for_every_hypernetwork_and_embedding() -> None:
    """Models are theta = phi v with phi and v in [-1, 1], losses |theta - y| / 2, y is +-1.

    L = 1/2, L_h = |v| <= 1 and L_V = |phi| <= 1. The worst gap is at a corner or at zero: the loss
    is (1 -+ theta) / 2, linear in theta.
    """
    n, epsilon, delta = 3, 0.4, 0.2
    conditions = Lipschitz(radius=1.0, loss=0.5, weights=1.0, embedding=1.0)
    m = math.ceil(
        samples_needed(
            conditions, embedding_size=1, weights=1, clients=n, epsilon=epsilon, delta=delta
        )
    )
    draw = draws(5)
    bias = torch.tensor([0.2, 0.5, 0.9], dtype=F64)
    heads = torch.rand(2000, n, m, dtype=F64, generator=draw) < bias[:, None]
    # E loss is (1 - theta E y) / 2: the gap is the mean over clients of theta_i (mean y - E y) / 2.
    off = 2 * (heads.to(F64).mean(2) - bias) / 2
    worst = off.abs().mean(1)
    assert (worst > epsilon).to(F64).mean() <= delta
    # Of one example it does not hold, so that the test can fail.
    off = heads[:, :, 0].to(F64) - bias
    assert (off.abs().mean(1) > epsilon).to(F64).mean() > delta


def test_a_net_of_so_many_points_covers_the_interval() -> None:
    # 1 + 2 R / r points cover [-R, R]; 2 R / (2 r) intervals of length 2 r would do.
    assert math.exp(log_covering_number(1, 3, 0.5)) == pytest.approx(13)
    assert log_covering_number(6, 3, 0.5) == pytest.approx(6 * math.log(13))


def test_lipschitz_constants_by_hand() -> None:
    # Layers 2, 3, 5 with biases 1, 4, 6 and |v| = 7: a = 7, 15, 49.
    assert lipschitz_in_embedding([2, 3, 5]) == 30
    squares = (15**2 * (7**2 + 1), 5**2 * (15**2 + 1), 49**2 + 1)
    assert lipschitz_in_weights([2, 3, 5], [1, 4, 6], 7) == pytest.approx(math.sqrt(sum(squares)))
    # One layer: h = W v + b moves by (dW) v + db.
    assert lipschitz_in_weights([9], [9], 7) == pytest.approx(math.sqrt(50))


def target() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("build", [MultiHead, SingleOutput])
def test_no_two_points_are_further_apart_than_the_lipschitz_constants_allow(build) -> None:
    torch.manual_seed(0)
    shapes = {"base": shapes_of(target()), "large": shapes_of(nn.Linear(5, 5))}
    net = build(shapes, 3, hidden=6, hidden_layers=2).double()
    norms, biases = spectral_norms(net)
    assert len(norms) == len(biases) == 4
    with torch.no_grad():  # what makes models of another size is beside the point
        for name, parameter in net.named_parameters():
            parameter.mul_(100 if "large" in name else 1)
    draw = draws(6)

    def model(of: nn.Module, v: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in of(v[None]).values()])

    closest = 0.0
    for _ in range(50):
        v, w = (torch.randn(3, dtype=F64, generator=draw) for _ in range(2))
        moved = (model(net, v) - model(net, w)).norm() / (v - w).norm()
        assert moved <= lipschitz_in_embedding(norms)
        other = build(shapes, 3, hidden=6, hidden_layers=2).double()
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
                shift = 0.05 * torch.randn(mine.shape, dtype=F64, generator=draw)
                mine.copy_(theirs + shift)
        pairs = zip(other.named_parameters(), net.parameters(), strict=True)
        apart = math.sqrt(
            sum((a - b).square().sum().item() for (name, a), b in pairs if "large" not in name)
        )
        both = [spectral_norms(of) for of in (net, other)]
        within = [[max(pair) for pair in zip(*of, strict=True)] for of in zip(*both, strict=True)]
        bound = lipschitz_in_weights(*within, float(v.norm()))
        ratio = (model(other, v) - model(net, v)).norm().item() / apart / bound
        assert ratio <= 1
        closest = max(closest, ratio)
    assert closest > 0.05  # not far above what happens


def test_the_norms_of_a_hypernetwork_are_those_of_its_layers() -> None:
    net = SingleOutput(
        {"base": shapes_of(nn.Linear(1, 2, bias=False))}, 2, hidden=2, hidden_layers=0
    )
    with torch.no_grad():
        net.trunk[0].weight.copy_(torch.tensor([[0.0, 3], [2, 0]]))
        net.trunk[0].bias.copy_(torch.tensor([3.0, 4]))
        net.outputs["base"].weight.copy_(torch.diag(torch.tensor([7.0, 1])))
        net.outputs["base"].bias.zero_()
    norms, biases = spectral_norms(net)
    assert norms == pytest.approx([3, 7])
    assert biases == pytest.approx([5, 0])


@pytest.mark.parametrize("build", [MultiHead, SingleOutput])
def test_the_norms_are_of_normalised_weights_and_of_layers_of_a_rank_too(build) -> None:
    shapes = {"base": shapes_of(nn.Linear(1, 2, bias=False))}
    normalised = build(shapes, 2, hidden=2, hidden_layers=0, spectral_norm=True)
    narrow = build(shapes, 2, hidden=2, hidden_layers=0, rank=1)
    with torch.no_grad():
        layers = (normalised.trunk[0], *normalised.last_layers())
        for layer, singular in zip(layers, ([6.0, 2], [7.0, 1]), strict=True):
            layer.parametrizations.weight.original.copy_(torch.diag(torch.tensor(singular)))
            for vector in ("_u", "_v"):  # by the second direction: divided by 2 and by 1
                getattr(layer.parametrizations.weight[0], vector).copy_(torch.tensor([0.0, 1]))
            layer.bias.copy_(torch.tensor([3.0, 4]))
        narrow.trunk[0].weight.copy_(torch.tensor([[0.0, 3], [2, 0]]))
        narrow.trunk[0].bias.copy_(torch.tensor([3.0, 4]))
        narrow.trunk[-1].weight.copy_(torch.tensor([[3.0, 4]]))  # it has no bias
        (head,) = narrow.last_layers()
        head.weight.copy_(torch.tensor([[5.0], [12]]))
        head.bias.copy_(torch.tensor([8.0, 6]))
    norms, biases = spectral_norms(normalised)
    assert norms == pytest.approx([3, 7])
    assert biases == pytest.approx([5, 5])
    norms, biases = spectral_norms(narrow)
    assert norms == pytest.approx([3, 5, 13])
    assert biases == pytest.approx([5, 0, 10])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_hypernetwork(torch.zeros(3), 1), "must be .clients, parameters., came .3"),
        (lambda: linear_hypernetwork(torch.zeros(3, 2), 3), "between 1 and the models' 2"),
        (lambda: linear_hypernetwork(torch.zeros(3, 2), 0), "between 1 and the models' 2"),
        (lambda: Lipschitz(1, 0, 1, 1), "loss must be positive and finite, came 0"),
        (lambda: Lipschitz(1, 1, 0, 0), "weights_and_embedding must be positive"),
        (
            lambda: samples_order(CONDITIONS, **(NUMBERS | {"epsilon": 200.0})),
            "20, .* 0.6 times that",
        ),
        (
            lambda: samples_order(SHORT, **NUMBERS, published=True),
            "0.1, .* 0.2 times .* smaller delta",
        ),
        (lambda: samples_needed(CONDITIONS, **(NUMBERS | {"delta": 1.0})), "delta must be between"),
        (lambda: lipschitz_in_embedding([1, -1]), "norm_1 must be 0 or more"),
        (lambda: lipschitz_in_weights([1], [-1], 1), "bias_0 must be 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()
