"""Models of clients whose answers have noise: made once, and given again for nothing.

An answer as long as a model is not kept (:data:`hyperfed.engines.updates.KEPT`), so that a model
that is made of such answers would spend of its client's epsilon each time. It is kept instead, with
the client's account.
"""

from collections.abc import MutableMapping
from contextlib import suppress

from hyperfed import trees
from hyperfed.engines import EngineCohort
from hyperfed.errors import UserError
from hyperfed.federation import Client, Each
from hyperfed.privacy import not_kept
from hyperfed.runs.evaluation import Serve
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree

MADE = "made"
"""Where an account has models, by what they were made from."""


def once(
    serve: Serve, client: type[Client], accounts: MutableMapping[int, Tree], key: str
) -> Serve:
    """Returns what serves clients as ``serve`` does, and with what they had before where they can.

    Args:
        serve: what makes the models.
        client: the method's Client.
        accounts: of clients, as of :class:`hyperfed.privacy.Releases`; models are added to them.
        key: names all that a model is made from, but for the round's draws.
    """

    def served(clients: EngineCohort) -> Tree | Each:
        name = f"{key}-{clients.round}"
        held = {c: accounts.get(c, {}).get(MADE, {}) for c in clients.there}
        old = {c: models[name] for c, models in held.items() if name in models}
        if not old:
            return made(clients, name)
        if new := [c for c in clients.there if c not in old]:
            others = clients.only(new)
            others.ask(client.hold, Each(others.ask(client.export, made(others, name))))
        models = trees.to(trees.stack([*old.values()]), clients.ids.device)
        clients.only([*old]).ask(client.hold, Each(models))
        return {}

    def made(clients: EngineCohort, name: str) -> Tree | Each:
        before = {c: not_kept(accounts.get(c, {})) for c in clients.there}
        sent = serve(clients)
        spent = [c for c in clients.there if not_kept(accounts.get(c, {})) > before[c]]
        if spent:
            with suppress(UserError):  # there is not one network to be handed over
                models = clients.ask(client.export, sent)
                for position, c in enumerate(clients.ids.tolist()):
                    if c in spent and c in clients.there:
                        model = trees.clone(trees.to(trees.take(models, position), CPU))
                        others = accounts[c].get(MADE, {})
                        accounts[c] = accounts[c] | {MADE: others | {name: model}}
        return sent

    return served
