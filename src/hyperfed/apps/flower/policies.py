"""A site's policy as a file, and what a server can learn under it in plain words.

``hyperfed node --policy FILE.toml`` takes a TOML file with any of the keys of
:class:`hyperfed.engines.flower.policy.Policy`; what it does not name stays strict::

    methods = ["fedavg", "pefll"]
    smallest_reply = 50
    evaluations_per_day = 20

    [settings]                 # of the method: least and most
    local_steps = [10, 1000]
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hyperfed.data.site import SiteData
from hyperfed.engines.flower.policy import Policy
from hyperfed.errors import UserError, fields_wrong, nearest
from hyperfed.federation import Client
from hyperfed.methods import METHODS
from hyperfed.metrics import METRICS, ON_REQUEST
from hyperfed.system import toml

BY_CLASS = ("fedpac", "fedproto")
"""Methods that reply by class: of a class with one example, what they say is of that example."""

_POLICY = TypeAdapter(Policy)


def read(path: Path | None) -> Policy:
    """Returns the policy in a file, and the strict one where there is none.

    Raises:
        UserError: it cannot be read, or is wrong.
    """
    strict = Policy(methods=tuple(sorted(METHODS.keys() - set(BY_CLASS))))
    if path is None:
        return strict
    path = path.expanduser()
    if path.exists() and not path.is_file():
        # Nobody may write to a pipe again, and a site that waits answers nobody.
        raise UserError(
            f"--policy must be a file, since it is read again for each message, but {path} is "
            "none; write what it says into one"
        )
    try:
        table = toml.loads(path.read_text(encoding="utf-8"))
        # Lists of TOML become tuples as those of JSON do, and nothing else is converted.
        policy: Policy = _POLICY.validate_json(_POLICY_JSON.dump_json(table), strict=True)
    except ValidationError as error:
        raise UserError(f"{path} must be a policy, but {'; '.join(fields_wrong(error))}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--policy must be a TOML file, but {path} is not ({error})") from error
    if wrong := [*_wrong_names(policy), *_wrong_numbers(policy)]:
        raise UserError(f"{path} must {', and must '.join(wrong)}")
    if policy.methods is None:
        return replace(policy, methods=strict.methods)
    return policy


_POLICY_JSON = TypeAdapter(dict[str, object])


def _wrong_names(policy: Policy) -> Iterator[str]:
    """Yields what a policy must name, and what it does."""
    if policy.methods == ():
        yield "name a method that the site runs, but methods is empty; leave it out for the default"
    if unknown := set(policy.methods or ()) - METHODS.keys():
        yield f"name methods of hyperfed, but names {', '.join(sorted(unknown))}"
    # A name that no step has refuses nothing, in place of what it was meant for.
    steps = {name for method in METHODS.values() for name in _steps(method.Client)}
    if unknown := set(policy.refused_steps) - steps:
        name = min(unknown)
        yield f"refuse steps of methods, but refuses {name}{nearest(name, steps)}"
    known = {field.name for method in METHODS.values() for field in fields(method.Config)}
    if unknown := policy.settings.keys() - known:
        yield f"bound settings of methods, but bounds {', '.join(sorted(unknown))}"
    if unknown := set(policy.metrics) - set(ON_REQUEST):
        yield (
            f"name metrics that are counted for on request, {', '.join(ON_REQUEST)}, but names "
            f"{', '.join(sorted(unknown))}"
        )


def _steps(client: type[Client]) -> set[str]:
    """Returns the names of what the server may ask of a client."""
    return {name for name in dir(client) if hasattr(getattr(client, name), "step")}


def _wrong_numbers(policy: Policy) -> Iterator[str]:
    """Yields what numbers of a policy must do together, and which do not."""
    for name, (least, most) in policy.settings.items():
        if least > most:
            yield f"bound {name} by least and most, but has {least:g} before {most:g}"
    if policy.val + policy.test >= 1:
        yield f"leave examples to train on, but has val + test = {policy.val:g} + {policy.test:g}"


TELLS = {
    "targets": "the sum of a client's targets and that of their squares: their mean and spread",
    "classes": "how many examples a client has of each class, and how many are right",
    "bins": "how many examples of a client are right at each of 15 levels of confidence",
}
"""What counts that a metric needs tell, by their kind."""


def _of_replies(policy: Policy) -> str:
    """Returns what is told in training."""
    methods = ", ".join(policy.methods or ("any method",))
    examples = (
        f"each of at least {policy.smallest_reply} different examples in batches of at least "
        f"{policy.smallest_batch}, but for the last of a pass"
    )
    if policy.masks_in_training:
        return (
            f"- sums over at least {policy.smallest_sum} clients of what {methods} reply, "
            f"{examples}; runs that do not mask them are refused. A server whose own program takes "
            "the places of all others in a sum learns what one replies"
        )
    return (
        f"- what {methods} reply, in the clear: models, changes of models or their gradients, "
        f"{examples}. From a gradient of few examples, some can be reconstructed; that gets harder "
        "with more of them, never impossible. In a run with masks, only the sums over at least "
        f"{policy.smallest_sum} clients"
    )


def explain(policy: Policy, data: SiteData | None) -> list[str]:
    """Returns what a server could learn at a site, a sentence each.

    Args:
        policy: of the site.
        data: of the site, to say which clients are too small for it.
    """
    said = [
        "What a server could learn here, whatever program it runs:",
        "- of each client: its name, how many examples it has to train, validate and test, and "
        "whether it joins after training; of all together: the shape of an example, the number of "
        "classes, mean and deviation of the colours, hashes of the data and of the names of their "
        "columns",
        _of_replies(policy),
        f"- counts of right answers and sums of losses on validation and test data, of at least "
        f"{policy.smallest_evaluation} examples, at most {policy.evaluations_per_day} times a day "
        "for each client. Of a model that says the same of all examples nothing is counted; from "
        "one that was made for it, how many examples have which label can still be estimated",
        *(f"- for {name}: {TELLS[METRICS[name].kind]}" for name in policy.metrics),
        f"- of a client in a private run: answers with noise of this machine's own, for epsilon "
        f"{policy.epsilon:g} at delta {policy.delta:g} in all runs together, and then none. That "
        "bounds what they tell of any one example; answers of training are counted by what they "
        "tell of all of a client's examples at once, those of itpfl's newcomers by what they tell "
        "of one. A run whose server adds the noise is refused if it may spend more than that by "
        "itself; what several of them spend together is not counted here",
        f"Never run: {', '.join(policy.refused_steps) or 'nothing'}. Every call is noted in "
        "audit.jsonl in the state folder.",
    ]
    if policy.noise_in_training:
        said.append(
            "Runs whose clients do not add noise of their own to all that they reply in training "
            "are refused; epsilon is the most that it may cost a client."
        )
    if by_class := sorted({*BY_CLASS} & {*(policy.methods or METHODS)}):
        said.append(
            f"- {' and '.join(by_class)} reply with the mean features of each class: of a class "
            "with one example, those of that example"
        )
    for bound, (least, most) in policy.settings.items():
        said.append(f"Runs with {bound} below {least:g} or above {most:g} are refused.")
    if data is not None:
        for what, of, least in (
            ("reply", slice(1), max(policy.smallest_reply, policy.smallest_batch)),
            ("be evaluated", slice(1, None), policy.smallest_evaluation),
        ):
            held = {client: [len(part) for part in rows[of]] for client, rows in data.rows.items()}
            small = [c for c, counts in held.items() if any(0 < n < least for n in counts)]
            if small:
                named = f"{', '.join(small[:5])}{' ...' if len(small) > 5 else ''}"
                said.append(f"Too small to {what}: {named} ({len(small)} of {len(held)} clients).")
    return said
