"""A call: plain data, whose draws are a function of what is asked."""

import pickle
from typing import Any

import pytest
import torch

from hyperfed import federation, trees
from hyperfed.engines.calls import LOOKED_AT, Call, execute, find_step
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.engines.replies import BadReplyError, difference
from hyperfed.federation import AllLostError, Each, step
from hyperfed.functional import forward
from hyperfed.system.randomness import generator
from hyperfed.training import Batches, Epochs, Steps
from hyperfed.trees import Tree, structure
from probe import Client, Config, engine_of
from toys import Dropping, TwoLayers, make_task


@pytest.mark.parametrize("batches", [Steps(3, 4), Epochs(2, 4)])
def test_draws_depend_on_client_round_and_step_and_not_on_the_cohort(batches) -> None:
    def ask(clients: list[int], number: int, **options: Any) -> dict[int, Tree]:
        cohort = engine_of(make_task(examples=(12,) * 4), **options).cohort(
            clients, number, training=True
        )
        reply = cohort.ask(Client.draws, batches=batches)
        return {client: trees.take(reply, i) for i, client in enumerate(clients)}

    alone, together = ask([2], 5), ask([3, 2, 0], 5, workers=2, cores_per_client=1)
    torch.testing.assert_close(alone[2], together[2], rtol=0, atol=0)
    for other in (ask([2], 6)[2], together[3]):
        assert not torch.equal(other["batches"], alone[2]["batches"])
        assert not torch.equal(other["other"], alone[2]["other"])


def test_asking_again_in_the_same_round_draws_anew() -> None:
    cohort = engine_of().cohort([0], 0, training=True)
    first = cohort.ask(Client.draws, batches=Steps(3, 4))
    assert not torch.equal(
        first["batches"], cohort.ask(Client.draws, batches=Steps(3, 4))["batches"]
    )


def test_steps_are_without_replacement_and_epochs_ragged() -> None:
    engine = engine_of()
    cohort = engine.cohort([1], 0, training=True)  # seven examples
    assert cohort.ask(Client.sizes_of_batches, batches=Steps(2, 5))["sizes"].tolist() == [[5, 5]]
    assert cohort.ask(Client.sizes_of_batches, batches=Steps(2, 50))["sizes"].tolist() == [[7, 7]]
    ragged = cohort.ask(Client.sizes_of_batches, batches=Epochs(2, 5))
    assert ragged["sizes"].tolist() == [[5, 2, 5, 2]]
    merged = cohort.ask(Client.sizes_of_batches, batches=Epochs(2, 3))
    assert merged["sizes"].tolist() == [[3, 4, 3, 4]]


@pytest.mark.parametrize(
    ("plan", "lengths"), [(Steps(3, 5), [5, 5, 5]), (Epochs(2, 5), [5, 2, 5, 2])]
)
def test_a_step_draws_batches_of_its_own_as_those_asked_for_are_drawn(
    plan: Batches, lengths: list[int]
) -> None:
    """From its own generator, and each order just before its first batch."""

    class Drawing(federation.Client):
        @step
        def draws(self) -> Tree:
            drawn = []
            for batch in self.draw_batches(plan):
                drawn += [*batch.x[:, 0], torch.rand((), generator=self.generator)]
            return {"drawn": torch.stack(drawn)}

    task = make_task()
    engine = LoopEngine(task, Drawing, None, seed=3)
    drawn = engine.cohort([1], 5, training=True).ask(Drawing.draws)["drawn"][0]
    source, expected = generator(3, "client", 1, 5, "draws", 0), []
    for place, length in enumerate(lengths):
        if place % len(plan.lengths(7)) == 0:
            order = iter(torch.randperm(7, generator=source))
        expected += [task.x[task.train[1][next(order)], 0] for _ in range(length)]
        expected.append(torch.rand((), generator=source))
    assert torch.equal(drawn, torch.stack(expected).to(drawn.dtype))


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_a_step_may_draw_as_another_does(kind: type[LoopEngine]) -> None:
    """Whatever draws: batches, its own generator, and networks."""

    class Twins(federation.Client):
        @step
        def draws(self, model: Tree) -> Tree:
            (batch,) = self.batches
            forwarded, _ = forward(self.module, model, batch.x)
            own = torch.rand((), generator=self.generator, dtype=torch.float64)
            return {"forwarded": forwarded, "own": own}

        @step(draws_as=draws)
        def too(self, model: Tree) -> Tree:
            return self.draws(model)

        @step
        def otherwise(self, model: Tree) -> Tree:
            return self.draws(model)

    for net in (TwoLayers, Dropping):
        task = make_task(net, examples=(12, 12))
        cohort = kind(task, Twins, None, seed=3).cohort([0, 1], 5, training=True)
        first, second, third = (
            cohort.ask(asked, task.initial("base"), batches=Steps(1, 4))
            for asked in (Twins.draws, Twins.too, Twins.otherwise)
        )
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        for name, value in third.items():
            assert not torch.equal(value, first[name])


class Going(federation.Client):
    """Goes through its batches a second time."""

    def count(self) -> int:
        return sum(1 for _ in self.batches)

    @step
    def twice(self) -> Tree:
        return {"count": torch.tensor([self.count(), self.count()])}

    @step
    def in_two_parts(self) -> Tree:
        first = next(iter(self.batches))
        return {"count": torch.tensor([len(first.y), self.count()])}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_batches_that_are_gone_or_were_not_asked_for_are_told(kind: type[LoopEngine]) -> None:
    """A training by them would be none."""
    engine = kind(make_task(), Going, None, seed=0)
    cohort = engine.cohort([0, 1], 0, training=True)
    assert cohort.ask(Going.in_two_parts, batches=Steps(3, 4))["count"].tolist() == [[4, 2]] * 2
    assert cohort.ask(Going.twice, batches=Steps(0, 4))["count"].tolist() == [[0, 0]] * 2
    with pytest.raises(AllLostError, match=r"asked this step without; ask it with batches="):
        engine.cohort([0, 1], 0, training=True).ask(Going.twice)
    with pytest.raises(AllLostError, match=r"self\.batches must be gone through once"):
        cohort.ask(Going.twice, batches=Steps(3, 4))


class Wrong(federation.Client):
    """Replies with something that is not like what it was sent."""

    @step(like="model")
    def reply(self, model: Tree) -> Tree:
        shape = [*model["head.bias"].shape, 1]
        return {"head.bias": model["head.bias"].float().view(shape), "more": torch.zeros(2)}


def test_what_a_reply_should_not_have_is_told() -> None:
    model = {"a": torch.zeros(2)}
    came, expected = structure({**model, "b": torch.zeros(1)}), structure(model)
    assert difference(came, expected).endswith("wrong: b must not be there")


def test_how_a_reply_is_wrong_is_told_by_name() -> None:
    task = make_task()
    cohort = LoopEngine(task, Wrong, None, seed=0).cohort([0], 0, training=True)
    told = (
        r"wrong: body\.bias is missing, body\.weight is missing, "
        r"head\.bias must be torch\.float64 \(3,\), came torch\.float32 \(3, 1\)$"
    )
    with pytest.raises(AllLostError, match=told):
        cohort.ask(Wrong.reply, task.outline().initial())


def test_only_an_evaluation_reads_test_data() -> None:
    cohort = engine_of().cohort([0], 0, training=False)
    with pytest.raises(PermissionError, match="test data is for evaluation"):
        cohort.ask(Client.peek)


def test_an_unlabelled_client_has_no_labels_but_can_be_evaluated() -> None:
    task = make_task(novel=1, unlabelled=True)
    cohort = engine_of(task).cohort([3], 0, training=False)
    with pytest.raises(Exception, match="has no labels"):
        cohort.ask(Client.labels)
    counts = cohort.ask(Client.evaluate, task.outline().initial())["test"]
    assert counts["count"].item() == 6
    assert counts["masked_correct"].item() == counts["correct"].item()
    assert counts["zeroed_correct"].item() == counts["correct"].item()
    known = engine_of(task).cohort([0], 0, training=False)
    assert known.ask(Client.labels)["y"].shape == (1, 1)


def run(call: Call, config: Config | None = None, **remembered: Tree) -> Any:
    task = make_task()
    return execute(
        call,
        task=task,
        client=Client,
        config=config or Config(),
        seed=0,
        module=task.models["base"],
        networks={},
        data=str,
        secret=False,
        limits=(),
        private=None,
        **({"memory": {}, "scratch": {}} | remembered),
    )


def test_a_call_that_has_travelled_gives_what_the_engine_gives() -> None:
    call = Call(cohort=0, round=5, client=2, step="draws", batches=Steps(3, 4), turn=1)
    there = pickle.loads(pickle.dumps(call))
    cohort = engine_of().cohort([2], 5, training=True)
    for _ in range(2):
        expected = cohort.ask(Client.draws, batches=Steps(3, 4))
    torch.testing.assert_close(run(there).tree, trees.take(expected, 0), rtol=0, atol=0)


def test_execution_leaves_what_it_is_given_as_it_is() -> None:
    memory, scratch = {"count": torch.tensor(4)}, {"count": torch.tensor(1)}
    answer = run(Call(0, 0, 1, "remember"), memory=memory, scratch=scratch)
    assert (answer.memory["count"], answer.scratch["count"]) == (5, 2)
    assert (memory["count"], scratch["count"]) == (4, 1)


def test_a_reply_carries_no_graph_and_must_be_a_tree() -> None:
    model = {"w": torch.ones(2, requires_grad=True)}
    assert not run(Call(0, 0, 1, "echo", (model,))).tree["w"].requires_grad
    with pytest.raises(BadReplyError, match="must return a"):
        run(Call(0, 0, 1, "echo", (model,)), Config((1,), "not a tree"))


def test_only_steps_of_the_methods_client_can_be_asked() -> None:
    for name in ("answer", "absent", "id"):  # a plain function, nothing, an attribute
        with pytest.raises(TypeError, match=f"must be a step of the method's Client, came {name}"):
            find_step(Client, name)
    cohort = engine_of().cohort([0], 0, training=True)
    for ask in (cohort.ask, cohort.mean, cohort.post):
        with pytest.raises(TypeError, match="came answer; mark a function of that name there"):
            ask(Client.answer, {})


def test_what_a_reply_is_like_is_an_argument_that_is_sent() -> None:
    with pytest.raises(ValueError, match="what step train is sent, model, rate, came 'trained'"):

        class Wrong(federation.Client):
            @step(like="trained")
            def train(self, model: Tree, rate: Tree) -> Tree:
                trained = model  # a name, but nobody's argument
                return trained

    cohort = engine_of().cohort([0], 0, training=True)
    with pytest.raises(TypeError, match=r"step echo must be sent model, .* was sent 0 arguments"):
        cohort.ask(Client.echo)


class Writing(federation.Client):
    """Writes in place, into what it was sent or what it keeps, and counts."""

    @step
    def count(self) -> Tree:
        self.memory["inner"] = {"n": torch.tensor(1.0)}
        return {}

    @step
    def adds_to_memory(self) -> Tree:
        self.memory["inner"]["n"] += 1
        return {}

    @step
    def keeps(self, model: Tree) -> Tree:
        self.scratch["kept"] = model
        return {}

    @step
    def adds_to_scratch(self) -> Tree:
        self.scratch["kept"]["w"] += 1
        return {}

    @step(like="model")
    def adds_to_model(self, model: Tree) -> Tree:
        model["w"].view(-1)[0].add_(1)
        return model

    @step(like="model")
    def adds_uncounted(self, model: Tree) -> Tree:
        model["w"].data.add_(1)
        return model

    @step(like="model")
    def adds_to_copies(self, model: Tree) -> Tree:
        self.memory["inner"]["n"] = self.memory["inner"]["n"].clone().add_(1)
        return {"w": trees.clone(model)["w"].add_(1)}


def test_a_client_of_the_loop_may_keep_other_things_than_tensors_for_a_round() -> None:
    class Keeping(federation.Client):
        @step
        def count(self) -> Tree:
            self.scratch["times"] = self.scratch.get("times", 0) + 1
            return {"times": torch.tensor(self.scratch["times"])}

    cohort = LoopEngine(make_task(), Keeping, None, seed=0).cohort([0], 0, training=True)
    told = [cohort.ask(Keeping.count)["times"].item() for _ in range(2)]
    assert told == [1, 2]


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_who_writes_into_what_others_hold_is_lost(kind: type[LoopEngine], each: bool) -> None:
    engine = kind(make_task(), Writing, None, seed=0)
    sent = {"w": torch.zeros(2, 2) if each else torch.zeros(2)}
    payload = Each(sent) if each else sent
    first = engine.cohort([0, 1], 0, training=True)
    first.ask(Writing.count)
    engine.commit(first)
    later = LOOKED_AT  # where values are not looked at
    for wrong, payloads in ((Writing.adds_to_memory, ()), (Writing.adds_to_model, (payload,))):
        cohort = engine.cohort([0, 1], later, training=True)
        with pytest.raises(AllLostError, match=f"must not write in place .* {wrong.__name__} did"):
            cohort.ask(wrong, *payloads)
    cohort = engine.cohort([0, 1], later, training=True)
    cohort.ask(Writing.keeps, payload)  # another message has brought what is the server's own
    with pytest.raises(AllLostError, match=r"memory or scratch, .* but adds_to_scratch did"):
        cohort.ask(Writing.adds_to_scratch)
    cohort = engine.cohort([0, 1], 2, training=True)
    now = sent["w"].clone()
    torch.testing.assert_close(
        cohort.ask(Writing.adds_to_copies, payload)["w"], (now + 1).expand(2, 2)
    )
    engine.commit(cohort)
    assert torch.equal(sent["w"], now)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_writes_that_no_version_counts_show_in_as_many_rounds_as_a_run_waits(
    kind: type[LoopEngine], dtype: torch.dtype, *, each: bool
) -> None:
    engine = kind(make_task(), Writing, None, seed=0)
    model = torch.tensor([torch.nan, 1.0], dtype=dtype)
    sent: Any = Each({"w": model.expand(2, 2).clone()}) if each else {"w": model}
    for number in (0, LOOKED_AT - 1):
        cohort = engine.cohort([0, 1], number, training=True)
        with pytest.raises(AllLostError, match=r"in place .* adds_uncounted did"):
            cohort.ask(Writing.adds_uncounted, sent)
    unharmed = engine.cohort([0, 1], 0, training=True)
    unharmed.ask(Writing.keeps, sent)
    assert unharmed.there == [0, 1]  # not a number is what it was


def test_what_was_made_in_inference_mode_can_be_sent() -> None:
    with torch.inference_mode():
        assert engine_of().cohort([0], 0, training=False).ask(Client.echo, {"w": torch.ones(1)})
