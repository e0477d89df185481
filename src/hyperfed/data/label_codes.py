"""Clients that code their labels differently: the same input means one class here, another there.

No model is right for two codes, and no input tells which is its client's: only labels do.
"""

from dataclasses import replace

import torch

from hyperfed.data.examples import Examples, fingerprint_of
from hyperfed.data.partitions import Partition
from hyperfed.errors import UserError


def recoded(examples: Examples, partition: Partition, codes: int) -> Examples:
    """Has client k code its labels as (y + (k mod codes) * (classes // codes)) mod classes.

    Args:
        examples: the data set; not changed.
        partition: who holds what, each example one client at most.
        codes: how many there are, at most one for each class.

    Returns:
        All examples, with the labels that their clients give them; nobody's keep theirs.

    Raises:
        UserError: there are fewer classes than codes.
    """
    if codes > examples.classes:
        raise UserError(
            f"label_codes must be at most {examples.classes}, the classes of {examples.name}, "
            f"got {codes}; lower it"
        )
    y, shift = examples.y.clone(), examples.classes // codes
    splits = zip(partition.train, partition.val, partition.test, strict=True)
    for client, held in enumerate(splits):
        own = torch.cat(held)
        y[own] = (examples.y[own] + client % codes * shift) % examples.classes
    changed = replace(examples, y=y)
    return replace(changed, fingerprint=fingerprint_of(changed.tensors()))
