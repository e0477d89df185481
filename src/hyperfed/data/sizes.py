"""Which client runs which target network, as a user says it."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from hyperfed.data.arrays import is_missing


def sizes_of(
    size: Mapping[Hashable, str] | Sequence[str] | Any,
    names: Sequence[str],
    models: Collection[str],
    problems: list[str],
) -> tuple[str, ...]:
    """Returns for each client the size of its target network.

    Args:
        size: {client's id, or its name: size}, or a pandas ``Series`` whose index has the ids; or a
            size for each client, in the order of ``names``.
        names: of the clients.
        models: the sizes that there are.
        problems: what must hold and does not is appended here.
    """
    if hasattr(size, "to_dict"):  # a Series need not be in the order of the clients
        size = size.to_dict()
    if isinstance(size, Mapping):
        by_name = {str(client): own for client, own in size.items()}
        if strange := [client for client in by_name if client not in names]:
            problems.append(
                f"size must be of clients that have examples, got {', '.join(strange[:5])} "
                f"({len(strange)} such); remove or rename them"
            )
        dealt = [by_name.get(name) for name in names]
    elif isinstance(size, str) or not isinstance(size, Iterable):
        problems.append(
            f"size must be {{client: size}}, or a size for each client, got {size!r}; pass one of "
            "these"
        )
        return ()
    else:
        dealt = size.tolist() if hasattr(size, "tolist") else list(size)
        if len(dealt) > len(names):
            problems.append(
                f"size must have one entry for each client, got {len(dealt)} for {len(names)} "
                "clients; pass {client: size}, or one for each in the order of their appearance"
            )
            return ()
        dealt += [None] * (len(names) - len(dealt))
    if without := [name for name, own in zip(names, dealt, strict=True) if is_missing(own)]:
        problems.append(
            f"each client must have a size, got none for {len(without)} of {len(names)} clients "
            f"({', '.join(without[:5])}); add theirs"
        )
    chosen = tuple(str(own) for own in dealt if not is_missing(own))
    if unknown := sorted({*chosen} - {*models}):
        problems.append(
            f"size must be one of the models {', '.join(models)}, got {', '.join(unknown[:5])}; "
            "rename it, or add a model of that name"
        )
    return chosen
