"""A user's networks: made, and tried on two examples before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hyperfed import trees
from hyperfed.nets.anatomy import trained_layers
from hyperfed.nets.pretrained import HALF, compute_in_own_precision, with_plain_output
from hyperfed.system.randomness import seeded
from hyperfed.task import BASE

Network = nn.Module | Callable[[], nn.Module]


def made(
    model: Network | Mapping[str, Network], seed: int, problems: list[str]
) -> dict[str, nn.Module]:
    """Returns a network for each size, apart from the caller's own; those that can be made."""
    networks = model if isinstance(model, Mapping) else {BASE: model}
    if not networks:
        problems.append("model must be a network, or one for each size, got {}; pass one")
    found = {}
    for key, network in networks.items():
        size = str(key)
        with seeded(seed, "target", size):
            given = _one(network)
        if isinstance(given, nn.Module):
            found[size] = prepared(given)
        else:
            problems.append(
                f"model {size!r} must be an nn.Module, or a function without arguments that makes "
                f"one, got {given}; pass one"
            )
    return found


def prepared(network: nn.Module) -> nn.Module:
    """Makes a user's network a target: it gives a tensor, and its layers take their own precision.

    Args:
        network: changed in place; most stay as they are (:mod:`hyperfed.nets.pretrained`).
    """
    return compute_in_own_precision(with_plain_output(network))


def _one(network: Any) -> nn.Module | str:
    """Returns a network apart from the caller's own, or what came in the place of one."""
    if isinstance(network, nn.Module):
        try:
            return deepcopy(network)
        except Exception as error:  # so does PyTorch with lazy buffers
            return f"one that cannot be copied ({type(error).__name__}: {error})"
    if not callable(network):
        return repr(network)
    try:
        given = network()
    except Exception as error:  # whatever a user's function raises is to be told
        return f"one that fails ({type(error).__name__}: {error})"
    return given if isinstance(given, nn.Module) else f"one that makes {given!r}"


def in_precision_of(models: Mapping[str, nn.Module], values: Tensor) -> Tensor:
    """Returns floats in the dtype of what is trained, of which frozen parts may have a lower one.

    Anything else is as it came.
    """
    if not values.is_floating_point():
        return values
    trained = [value for net in models.values() for value in trees.parameters_of(net).values()]
    return values.to(trained[0].dtype if trained else torch.get_default_dtype())


def to_try(x: Tensor) -> list[int]:
    """Returns which two examples to try networks on: of tokens those with the least and the most.

    Args:
        x: (N, ...) examples, at least one.
    """
    if x.dtype != torch.int64:
        return list(range(len(x)))[:2]
    tokens = x.flatten(1)
    return [int(tokens.amin(dim=1).argmin()), int(tokens.amax(dim=1).argmax())]


def try_out(
    models: Mapping[str, nn.Module],
    batch: Tensor,
    wanted: tuple[int, ...] | None,
    seed: int,
    problems: list[str],
    *,
    usual: Sequence[str] = ("loss", "score"),
) -> dict[str, Tensor]:
    """Runs each network on a batch, and tells what is wrong with it or with what it gives.

    Lazy layers take their shapes from the batch, and their initial weights from the seed.
    Of (classes,) it must give a row of as many numbers per example, or more; for regression, where
    that is 0, one number, and K where targets are of (K, 0); for labels of tokens (T, classes) a
    row for each of T. None asks for no number. What asks for them are those of loss and score that
    are the ``usual`` ones.

    Returns:
        what each of those gives that give a tensor.
    """
    given = {}
    for size, network in models.items():
        if told := _untrainable(network):
            problems.append(f"model {size!r} must have {told}")
            continue
        try:
            with torch.no_grad(), seeded(seed, "lazy", size):
                if any(map(is_lazy, [*network.parameters(), *network.buffers()])):
                    network.eval()(batch)
                    network.train()
                tried = trees.copied(network).eval()
                entries = trees.entries_of(tried)
                before = trees.versions([*entries.values()])
                output = tried(batch)
        except Exception as error:  # whatever a user's network raises is to be told
            tokens = batch.dtype == torch.int64
            of = f" from {int(batch.min())} to {int(batch.max())}" if tokens else ""
            problems.append(
                f"model {size!r} must take a batch of x, shape {tuple(batch.shape)} {batch.dtype}"
                f"{of}, but fails on it ({type(error).__name__}: {error}); change the model or x"
                + (", to floats if these integers are no tokens" if tokens else "")
            )
            continue
        if not isinstance(output, Tensor):
            problems.append(
                f"model {size!r} must return a tensor, got {type(output).__name__}; return its "
                "part that is the output (a recurrent layer returns its state beside it)"
            )
            continue
        given[size] = output
        after = zip(entries, before, trees.versions([*entries.values()]), strict=False)
        if written := next((name for name, old, new in after if old != new), ""):
            problems.append(
                f"model {size!r} must leave its parameters as they are, and out of training its "
                f"buffers, but writes to {written} in forward; compute with a copy of it, and set "
                "no max_norm of an embedding"
            )
        if idle := _idle_at_the_end(network, batch, seed):
            problems.append(
                f"model {size!r} must use the layer that it defines last, which is taken for the "
                f"one that gives the output, but {idle} has no part in what it gives; define the "
                f"output's layer last, or leave {idle} out"
            )
        if wanted is not None and not (_fits(output, *wanted) and len(output) == len(batch)):
            own = len(usual) < 2
            amounts = wanted[-1] and output.numel() == len(batch) and not own
            nested = output.ndim > 2 and len(wanted) == 1 and output[:1].numel() >= wanted[0] > 0
            problems.append(
                f"model {size!r} must give {_numbers(*wanted)} outputs per example, got shape "
                f"{tuple(output.shape)} for {len(batch)} examples; "
                + (f"make it of shape (B, {wanted[0]})" if nested else "change its last layer")
                + ("" if wanted[-1] else ", or convert y to integers if these floats are labels")
                + (", or convert y to floats if these labels are amounts" if amounts else "")
                + (", or y where it holds no labels of tokens" if wanted[-1] and wanted[1:] else "")
                + (f", or pass a {usual[0]} of your own, too" if own else "")
            )
    return given


def _untrainable(network: nn.Module) -> str:
    """Returns what parameters and buffers a network must have that it lacks, else ""."""
    trained = trees.parameters_of(network)
    if not trained:
        return "parameters to train, but has none or all are frozen; set requires_grad of some"
    moving = {**trained, **trees.buffers_of(network)}
    if unreal := [name for name, value in moving.items() if value.is_complex()]:
        return (  # a mean of them would be that of their real parts
            "real parameters and buffers where they are not frozen, but "
            f"{unreal[0]} is {moving[unreal[0]].dtype}; keep torch.view_as_real of it, and take "
            "torch.view_as_complex of that in forward"
        )
    if half := [name for name, value in trained.items() if value.dtype in HALF]:
        return (  # small steps vanish in it, and PyTorch's fused SGD goes astray
            "float32 or float64 parameters where they are trained, but "
            f"{half[0]} is {trained[half[0]].dtype}; make it float32, and set precision=bf16 to "
            "compute in bfloat16"
        )
    there = [name for name, value in moving.items() if not is_lazy(value)]
    if wild := [name for name in there if not moving[name].isfinite().all()]:
        return (  # what a client returns would not be finite either, and it would be lost
            f"finite parameters and buffers where they are not frozen, but {wild[0]} is not; "
            "initialise it, or, if it is a mask, take booleans or make it in forward"
        )
    layers = trained_layers(network)
    if sparse := [name for name, part in layers if getattr(part, "sparse", False)]:
        return f"gradients that are not sparse, but those of {sparse[0]} are; leave out sparse=True"
    return ""


def _idle_at_the_end(network: nn.Module, batch: Tensor, seed: int) -> str:
    """Returns the name of the layer that is defined last where no output depends on it, else ""."""
    tried = trees.copied(network)
    layers = trained_layers(tried)
    if not layers or isinstance(network, torch.jit.ScriptModule):  # whose copy has no leaves
        return ""
    name, last = layers[-1]
    weights = {*map(id, trees.parameters_of(last).values())}
    for training in (False, True):  # a network may have an output for training alone
        with seeded(seed, "trial"):
            try:
                output = tried.train(training)(batch)
            except Exception:  # such as of batch-norm, of one example
                continue
        if not (isinstance(output, Tensor) and output.requires_grad) or weights & _leaves(output):
            return ""
    return name


def _leaves(output: Tensor) -> set[int]:
    """Returns the ids of the tensors that a differentiable output was computed from.

    The graph is read, and nothing is differentiated: the first time that this is done PyTorch
    settles which devices there are.
    """
    found, seen, ahead = set[int](), set[Any](), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        ahead += [before for before, _ in node.next_functions]
    return found


def try_functions(
    outputs: Mapping[str, Tensor],
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Any] | None,
    score: Callable[[Tensor, Tensor], Any] | None,
    problems: list[str],
) -> None:
    """Runs a user's loss and score on what a network gives, and tells what is wrong with them.

    Nothing is told where something else is wrong already.

    Args:
        outputs: what each network gives for examples, (B, ...), of which the first is taken.
        y: (B, ...) targets of these.
        loss: must return one number that can be differentiated, shape (); None is not tried.
        score: must return a number for each example, shape (B,); None is not tried.
        problems: what must hold and does not is appended here.
    """
    if problems or not outputs:
        return
    given = next(iter(outputs.values()))
    output = given.detach().requires_grad_(given.is_floating_point())
    tried = (
        ("loss", loss, (), "one number of a batch", "take the mean over them"),
        ("score", score, (len(y),), "a number of each example", "take no mean over them"),
    )
    for name, function, shape, wanted, instead in tried:
        if function is None:
            continue
        try:
            came = function(output, y)
        except Exception as error:  # whatever a user's function raises is to be told
            problems.append(
                f"{name} must take a batch of outputs, shape {tuple(output.shape)}, and of y, "
                f"shape {tuple(y.shape)}, but fails on it ({type(error).__name__}: {error}); "
                f"change {name}, or the model"
            )
            continue
        if not isinstance(came, Tensor) or came.shape != shape:
            told = f"shape {tuple(came.shape)}" if isinstance(came, Tensor) else repr(came)
            problems.append(
                f"{name} must return {wanted}, a tensor of shape {shape}, got {told} for {len(y)} "
                f"examples; {instead}"
            )
        elif name == "loss" and not came.requires_grad:
            problems.append(
                "loss must return what can be differentiated, got a tensor that was cut off from "
                "the outputs; compute it without .item(), .detach() and NumPy"
            )


def _fits(output: Tensor, *wanted: int) -> bool:
    *several, classes = wanted
    if classes:  # the largest is sought along the last dimension
        shaped = output.ndim > 1 and list(output.shape[1:-1]) == several
        return shaped and output.shape[-1] >= classes
    return (output[:1].numel() if output.ndim else 0) == prod(several)


def _numbers(*wanted: int) -> str:
    *several, classes = wanted
    return " x ".join(map(str, [*several, classes] if classes else several or [1]))
