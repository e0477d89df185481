"""Networks that are made from a target, tried before anything is trained."""

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.system.randomness import seeded


def check_it_runs(
    network: nn.Module,
    target: nn.Module,
    *inputs: Tensor,
    gives: tuple[int, ...],
    of: str,
    instead: str,
) -> None:
    """Refuses a network made from a target's layers that cannot run where the target can.

    The layers are taken in the order of their definition, of which nobody knows whether it is that
    in which they run.

    Args:
        network: made from the target.
        target: a network of one tensor.
        inputs: of ``network``; the first is what the target takes. Where it does not, as made-up
            examples need not suit it, nothing is told.
        gives: the shape of what the network must give.
        of: what the network is, such as "a deep set".
        instead: what to do.

    Raises:
        UserError: it fails, or gives something else.
    """
    # Where the target is: what is frozen may be large, and is shared by the copies there.
    device = next(target.parameters()).device
    here = [value.to(device) for value in inputs]
    with torch.no_grad(), seeded(0, "trial"):
        try:
            trees.copied(target).eval()(here[0])
        except Exception:
            return
        try:
            given = tuple(trees.copied(network).to(device).eval()(*here).shape)
        except Exception as error:  # whatever a user's layers raise is to be told
            came = f"fails ({type(error).__name__}: {error})"
        else:
            came = f"gives {given}"
    if came != f"gives {gives}":
        raise UserError(
            f"{of} that is made of the layers of {type(target).__name__} must give {gives} for "
            f"examples {tuple(here[0].shape)}, but {came}; define layers in the order in which "
            f"they run, each for one thing, {instead}"
        )
