"""MAPPER against one-piece autograd and a search by hand for lambda."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from hyperfed import federation as contract
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import mapper
from hyperfed.runs.config import from_keys
from hyperfed.task import Task
from hyperfed.trees import Model
from toys import EXAMPLES, ONE_STEP, PLAIN, Federation, Normed, Saying, close, logits, make_task

SETTINGS: dict[str, Any] = ONE_STEP | {"local_lr": 0.6}
SEVERAL: dict[str, Any] = PLAIN | {"local_steps": 4, "batch_size": 5, "local_lr": 0.1}


def after_three_rounds(**settings: Any) -> Federation:
    """Client 0 chose its lambda in the second, in which its models came to differ."""
    federation = Federation("mapper", make_task(novel=1), **SETTINGS | settings)
    for number, clients in enumerate(([0, 1, 2], [0, 1, 2], [1, 2])):
        federation.round(clients, number)
    return federation


def mixture(task: Task, common: Model, own: Model, share: float, rows: Tensor) -> Tensor:
    """The outputs lambda h_l(x) + (1 - lambda) h_c(x) of each row."""
    net = task.models["base"]
    first, second = (logits(net, model, task.x[rows]) for model in (common, own))
    return share * second + (1 - share) * first


def step_by_hand(
    task: Task, client: int, common: Model, own: Model, share: float
) -> tuple[Model, Model]:
    """One gradient step of both models on the loss of the interpolated outputs."""
    leaves = [{n: v.clone().requires_grad_() for n, v in m.items()} for m in (common, own)]
    rows = task.train[client]
    F.cross_entropy(mixture(task, *leaves, share, rows), task.y[rows]).backward()
    first, second = ({n: leaf.detach() - 0.6 * leaf.grad for n, leaf in m.items()} for m in leaves)
    return first, second


def best_share(task: Task, rows: Tensor, common: Model, own: Model) -> float:
    """Tries all values of the default grid, in evaluation mode."""
    net, losses = task.models["base"].eval(), {}
    first, second = (functional_call(net, m, (task.x[rows],)).detach() for m in (common, own))
    for tenth in range(1, 10):
        output = tenth / 10 * second + (1 - tenth / 10) * first
        chosen = output.gather(1, task.y[rows, None]).squeeze(1)
        losses[tenth / 10] = float((output.exp().sum(1).log() - chosen).mean())
    return min(losses, key=losses.__getitem__)


def check_a_round() -> None:
    """The two models and lambda of a client that has trained before, alone in its cohort."""
    federation = after_three_rounds()
    task, common = federation.task, federation.server.model["base"]
    memory = federation.engine.memory[0]
    share = float(memory["lambda"])
    assert share not in (0.0, 0.5, 1.0)
    common, own = step_by_hand(task, 0, common, memory["local"], share)
    federation.round([0], 3)
    close(federation.server.model["base"], common)
    close(federation.engine.memory[0]["local"], own)


def test_both_models_descend_the_loss_of_the_interpolated_predictor() -> None:
    check_a_round()


def test_the_first_round_starts_from_the_global_model_and_the_middle_lambda() -> None:
    federation = Federation("mapper", make_task(), **SETTINGS)
    start = federation.task.outline().initial()
    federation.round([1])
    common, own = step_by_hand(federation.task, 1, start, start, 0.5)
    close(federation.server.model["base"], common)
    close(federation.engine.memory[1]["local"], own)


def check_the_choice_of_lambda() -> None:
    """Each client alone, so that the global model it chose with is the server's."""
    chosen = []
    for client in range(3):
        federation = after_three_rounds(local_lr=3.0)  # models far apart
        federation.round([client], 3)
        memory = federation.engine.memory[client]
        common, rows = federation.server.model["base"], federation.task.val[client]
        expected = best_share(federation.task, rows, common, memory["local"])
        assert float(memory["lambda"]) == expected
        chosen.append(expected)
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("batch", [512, 4, 2])
def test_lambda_is_each_clients_best_on_its_validation_examples(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all of them, in whatever batches they go through the models."""
    monkeypatch.setattr(mapper, "EVALUATION_BATCH", batch)
    check_the_choice_of_lambda()


@pytest.mark.parametrize(
    ("mixing", "before", "after"),
    [
        ((0.1, 0.5, 0.9), None, 0.5),
        ((0.1, 0.5, 0.9), 0.9, 0.9),
        ((0.9, 0.1), 0.1, 0.1),
        ((0.3, 0.9), 0.5, 0.3),  # of a run whose grid was another
    ],
)
def test_where_every_lambda_is_as_good_a_client_keeps_its_own(
    mixing: tuple[float, ...], before: float | None, after: float
) -> None:
    """Its two models are the same, as they are in a first round."""
    still = SEVERAL | {"local_lr": 1e-30}
    federation = Federation("mapper", make_task(), **still, mixing=mixing)
    if before is not None:
        start = federation.task.outline().initial()
        share = torch.tensor(before, dtype=torch.float64)
        federation.engine.memory[1] = {"local": start, "lambda": share}
    federation.round([1])
    assert float(federation.engine.memory[1]["lambda"]) == after


def test_lambda_is_chosen_on_training_examples_where_there_are_no_others() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    task = dataclasses.replace(make_task(), val=[nothing] * 4)
    federation = Federation("mapper", task, **SETTINGS)
    for number, clients in enumerate(([1, 2], [1, 2], [2])):
        federation.round(clients, number)
    memory, common = federation.engine.memory[2], federation.server.model["base"]
    assert float(memory["lambda"]) == best_share(task, task.train[2], common, memory["local"])


def test_the_server_averages_global_models_by_training_examples_buffers_too() -> None:
    together = Federation("mapper", make_task(Normed), **SEVERAL)
    together.round([0, 1, 2])
    mean: dict[str, Any] = {}
    for client in range(3):
        alone = Federation("mapper", make_task(Normed), **SEVERAL)
        alone.round([client])
        for name, value in alone.server.model["base"].items():
            part = EXAMPLES[client] / sum(EXAMPLES[:3]) * value.double()
            mean[name] = mean.get(name, 0) + part
    for name, ours in together.server.model["base"].items():
        close(ours, mean[name].to(ours.dtype))
    assert together.server.model["base"]["norm.num_batches_tracked"] == 4


def test_each_model_keeps_its_own_buffers() -> None:
    federation = Federation("mapper", make_task(Normed), **SEVERAL)
    for number, clients in enumerate(([0, 1], [1], [0])):
        federation.round(clients, number)
    assert federation.server.model["base"]["norm.num_batches_tracked"] == 12
    assert federation.engine.memory[0]["local"]["norm.num_batches_tracked"] == 8


# Limits


def test_with_lambda_zero_it_is_fedavg() -> None:
    ours = Federation("mapper", make_task(Normed), **SEVERAL, mixing=(0.0,))
    fedavg = Federation("fedavg", make_task(Normed), **SEVERAL)
    for number, clients in enumerate(([0, 1, 2], [1, 3], [0, 3])):
        for federation in (ours, fedavg):
            federation.round(clients, number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    torch.testing.assert_close(losses(ours, [0, 1]), losses(fedavg, [0, 1]), rtol=0, atol=0)


def test_with_lambda_one_it_is_local() -> None:
    ours = Federation("mapper", make_task(), **SEVERAL, mixing=(1.0,))
    local = Federation("local", make_task(), **SEVERAL)
    for number, clients in enumerate(([0, 1], [1, 3], [0, 3])):
        for federation in (ours, local):
            federation.round(clients, number)
    close(losses(ours, [0, 1]), losses(local, [0, 1]))
    start = ours.task.outline().initial()
    close(ours.server.model["base"], start)


# What is evaluated, what travels, what stays


def losses(federation: Federation, clients: list[int]) -> Tensor:
    """(C,) summed test losses of what clients use."""
    cohort = federation.engine.cohort(clients, 99, training=False)
    served = federation.server.personalize(cohort)
    counts = cohort.ask(federation.method.Client.evaluate, served)
    found: Tensor = counts["test"]["loss"]
    return found


def check_the_evaluated_predictor() -> None:
    federation = after_three_rounds()
    task, common = federation.task, federation.server.model["base"]
    for client in range(3):
        memory, rows = federation.engine.memory[client], task.test[client]
        output = mixture(task, common, memory["local"], float(memory["lambda"]), rows).detach()
        expected = F.cross_entropy(output, task.y[rows], reduction="sum")
        close(losses(federation, [client])[0], expected)


def test_the_interpolated_predictor_is_evaluated() -> None:
    check_the_evaluated_predictor()


def test_a_known_client_that_was_never_asked_uses_the_global_model() -> None:
    federation = Federation("mapper", make_task(), **SETTINGS)
    federation.round([0, 1])
    task, rows = federation.task, federation.task.test[2]
    output = logits(task.models["base"], federation.server.model["base"], task.x[rows]).detach()
    expected = F.cross_entropy(output, task.y[rows], reduction="sum")
    close(losses(federation, [2])[0], expected)


def test_a_novel_client_trains_its_own_model_and_chooses_lambda_against_the_global_one() -> None:
    federation = after_three_rounds(novel_rounds=3)
    task, common = federation.task, federation.server.model["base"]
    own, share = common, 0.5
    for _ in range(3):
        _, own = step_by_hand(task, 3, common, own, share)
        share = best_share(task, task.val[3], common, own)
    output = mixture(task, common, own, share, task.test[3]).detach()
    expected = F.cross_entropy(output, task.y[task.test[3]], reduction="sum")
    close(losses(federation, [3])[0], expected)
    torch.testing.assert_close(federation.server.model["base"], common, rtol=0, atol=0)
    assert 3 not in federation.engine.memory
    cohort = federation.engine.cohort([3], 9, training=False)
    federation.server.personalize(cohort)
    assert [e.up for e in cohort.state.exchanges] == [0, 0, 0]


def test_a_novel_client_chooses_lambda_against_the_statistics_that_it_is_served_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its training passes move batch-norm's in the global model too, but for nobody."""
    monkeypatch.setattr(mapper.Client, "export", contract.Client.export)  # both models and lambda
    federation = Federation("mapper", make_task(Normed, novel=1), **SETTINGS, novel_rounds=1)
    federation.round([0, 1, 2])
    task, common, joint = federation.task, federation.server.model["base"], federation.personal(3)
    sent, own = ({name: joint[part + name] for name in common} for part in ("common.", "own."))
    torch.testing.assert_close(sent, common, rtol=0, atol=0)
    assert float(joint["lambda"]) == best_share(task, task.val[3], common, own)


@pytest.mark.parametrize("net", [None, Normed])
def test_the_global_model_goes_down_and_comes_up_and_the_local_one_stays(net: Any) -> None:
    task = make_task(net) if net else make_task()
    federation = Federation("mapper", task, **SETTINGS)
    cohort = federation.round([0, 2])
    size = trees.count_bytes(trees.model_of(task.models["base"]))
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    assert set(federation.engine.memory[0]) == {"local", "lambda"}
    assert trees.count_bytes(federation.engine.memory[0]) == size + 8


def test_two_models_cannot_be_exported_as_one() -> None:
    with pytest.raises(UserError, match=r"must be one, but MAPPER interpolates .* evaluate it"):
        after_three_rounds().personal(0)


# Mistakes that the checks above must reject


CHOOSE = mapper.Client.choose


def the_same_for_all(self: mapper.Client, common: Model, own: Model) -> None:
    self.memory["local"], self.memory["lambda"] = own, self.mixing[4]


def the_worst(self: mapper.Client, common: Model, own: Model) -> None:
    CHOOSE(self, own, common)
    self.memory["local"] = own


@pytest.mark.parametrize("mutant", [the_same_for_all, the_worst])
def test_mutant_that_fixes_or_mistakes_lambda(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(mapper.Client, "choose", mutant)
    with pytest.raises(AssertionError):
        check_the_choice_of_lambda()


def the_global_one(common: Tensor, own: Tensor, share: Tensor) -> Tensor:
    return common


def the_local_one(common: Tensor, own: Tensor, share: Tensor) -> Tensor:
    return own


def exchanged(common: Tensor, own: Tensor, share: Tensor) -> Tensor:
    return share * common + (1 - share) * own


def averaged(common: Tensor, own: Tensor, share: Tensor) -> Tensor:
    return (common + own) / 2


WRONG = [the_global_one, the_local_one, exchanged, averaged]


@pytest.mark.parametrize("mutant", WRONG)
def test_mutant_that_evaluates_one_model_alone_or_another_share(
    mutant: Any, monkeypatch: Any
) -> None:
    def predict(self: mapper.Client, model: Model, x: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(mapper, "interpolated", mutant)
            return PREDICT(self, model, x)

    monkeypatch.setattr(mapper.Client, "predict", predict)
    with pytest.raises(AssertionError):
        check_the_evaluated_predictor()


PREDICT = mapper.Client.predict


def test_mutant_that_interpolates_weights(monkeypatch: Any) -> None:
    def predict(self: mapper.Client, model: Model, x: Tensor) -> Tensor:
        common, own = mapper._parted(model)
        mixed = trees.interpolate(common, own, float(model["lambda"]))
        return mapper.apply(self.module, mixed, x)

    monkeypatch.setattr(mapper.Client, "predict", predict)
    with pytest.raises(AssertionError):
        check_the_evaluated_predictor()


@pytest.mark.parametrize("mutant", WRONG)
def test_mutant_that_trains_another_predictor(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(mapper, "interpolated", mutant)
    with pytest.raises(AssertionError):
        check_a_round()


def test_mutant_that_trains_the_models_apart(monkeypatch: Any) -> None:
    """Each on its own loss, as FedAvg beside Local."""

    def objective(self: mapper.Client, joint: Model, batch: Any) -> Any:
        outputs = [mapper.apply(self.module, model, batch.x) for model in mapper._parted(joint)]
        return sum(self.loss(output, batch.y) for output in outputs), {}

    monkeypatch.setattr(mapper.Client, "joint_objective", objective)
    with pytest.raises(AssertionError):
        check_a_round()


# Settings


@pytest.mark.parametrize("mixing", [(), (0.5, 1.5), (-0.1,)])
def test_lambda_is_chosen_from_some_values_between_zero_and_one(mixing: Any) -> None:
    with pytest.raises(UserError, match="mixing"):
        from_keys("mapper", {"method.mixing": mixing})


def test_presets() -> None:
    for name in mapper.PRESETS:
        assert len(from_keys("mapper", mapper.PRESETS[name]).settings.mixing) == 9
    assert from_keys("mapper", mapper.PRESETS["pfedkt"]).task.val == 0.1


def test_of_log_probabilities_lambda_is_chosen_by_the_loss_of_what_is_predicted() -> None:
    """That of their interpolation as it comes is linear in lambda, and least at an end."""
    chosen = []
    for own in ({}, {"net": Saying, "loss": F.nll_loss}):
        task = make_task(examples=(12, 7, 20, 9, 9), **own)
        ours = Federation("mapper", task, local_steps=20, batch_size=10, local_lr=0.3)
        for number in range(6):
            ours.round([0, 1, 2, 3], number)
        chosen.append([float(ours.engine.memory[client]["lambda"]) for client in range(4)])
    assert chosen[0] == chosen[1]
    assert {*chosen[0]} - {mapper.GRID[0], mapper.GRID[-1]}
