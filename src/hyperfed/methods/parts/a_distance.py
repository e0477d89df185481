"""The A-distance between clients: how well a line tells their inputs apart.

For a novel client i and a known client j, logistic regression f(x) = <w, x> + b learns to tell the
inputs of i (label 1) from those of j (label 0). The two weigh alike, whatever their numbers:

    L = 1/2 mean over i of log(1 + exp(-f(x))) + 1/2 mean over j of log(1 + exp(f(x))).

Its gradient is the mean of what each of the two computes on its own, so no input travels. With err
the mean of the two clients' error rates, the distance is 2 (1 - 2 err): 0 for clients that nothing
tells apart, 2 for those that a line separates (Ben-David et al., "Analysis of representations for
domain adaptation", 2007, which section 6.2 of IT-PFL-HN's paper takes it from). The classifier is
fitted on every other input and errs on the rest: where there are more features than inputs, a line
separates any two sets that it was fitted on.

All pairs are fitted at once, in stacked tensors; each client sees only its own pairs. No label is
read. A method whose clients take part names the three steps in its Client::

    input_moments = a_distance.input_moments
    separation_gradient = a_distance.separation_gradient
    separation_error = a_distance.separation_error
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hyperfed.federation import Client, Cohort, Each, step
from hyperfed.trees import Model, Tree, tree_map

INPUTS = 512
"""Inputs of a client, at most, on which a classifier is fitted, and on which it errs."""


def a_distance(novel: Cohort, known: Cohort, steps: int) -> Tensor:
    """Computes the A-distance of each novel to each known client.

    Args:
        novel: C clients.
        known: K clients.
        steps: gradient steps of the classifiers.

    Returns:
        (C, K) distances, at most 2, below 0 for a classifier worse than chance; infinite to a known
        client that was lost.
    """
    classifier = separate(novel, known, steps)
    error = _both(separation_error, novel, known, classifier)["error"]
    distance: Tensor = 2 * (1 - 2 * error)
    return distance.masked_fill(known.weight == 0, torch.inf)


def separate(novel: Cohort, known: Cohort, steps: int) -> Model:
    """Fits the classifiers of all pairs, by gradient descent from zero.

    Its rate is 1 / (an upper bound of the loss's curvature), so the loss falls whatever the scale
    of the inputs.

    Args:
        novel: C clients.
        known: K clients.
        steps: gradient steps, at least 1; a message to every client for each.

    Returns:
        {"weight": (C, K, d), "bias": (C, K)} for inputs of d numbers.
    """
    ours, theirs = novel.ask(input_moments), known.ask(input_moments)
    # The curvature is at most a quarter of the mean square of (x, 1).
    rate = 4 / ((ours["square"][:, None] + theirs["square"]) / 2 + 1)  # (C, K)
    # At zero each input counts by half, so the means are all that the first gradient takes.
    weight = rate[..., None] / 4 * (ours["mean"][:, None] - theirs["mean"])  # (C, K, d)
    classifier: Model = {"weight": weight, "bias": torch.zeros_like(rate)}
    for _ in range(steps - 1):
        gradient = _both(separation_gradient, novel, known, classifier)
        classifier = {
            "weight": classifier["weight"] - rate[..., None] * gradient["weight"],
            "bias": classifier["bias"] - rate * gradient["bias"],
        }
    return classifier


def _both(asked: Callable[..., Tree], novel: Cohort, known: Cohort, classifier: Model) -> Tree:
    """Returns the mean of what the two sides of each pair reply, leaves (C, K, ...)."""

    def ask(side: Cohort, own: Model, label: float) -> Tree:
        return side.ask(asked, Each(own), {"label": torch.tensor(label)})

    ours = ask(novel, classifier, 1.0)
    theirs = ask(known, _transposed(classifier), 0.0)
    return tree_map(lambda a, b: (a + b) / 2, ours, _transposed(theirs))


def _transposed(tree: Tree) -> Tree:
    """Swaps the two sides of all pairs, leaves (C, K, ...) and (K, C, ...)."""
    return tree_map(lambda leaf: leaf.transpose(0, 1), tree)


@step
def input_moments(client: Client) -> Tree:
    """Returns {"mean": (d,), "square": ()}: mean of the inputs x fitted on, and of |x|^2."""
    x, _ = _halves(client)
    return {"mean": x.mean(dim=0), "square": x.square().sum(dim=1).mean()}


@step(like="classifier")
def separation_gradient(client: Client, classifier: Model, side: Tree) -> Model:
    """Returns the mean gradient of the logistic loss on the client's own inputs.

    Args:
        client: one side of P pairs.
        classifier: {"weight": (P, d), "bias": (P,)}.
        side: {"label": ()}, 1 for the novel client and 0 for the known one.
    """
    x, _ = _halves(client)
    residual = torch.sigmoid(_logits(x, classifier)) - side["label"].to(x.dtype)  # (n, P)
    product = (residual.T @ x).to(x.dtype)  # which autocast computes in bfloat16
    return {"weight": product / len(x), "bias": residual.mean(dim=0)}


@step
def separation_error(client: Client, classifier: Model, side: Tree) -> Tree:
    """Returns {"error": (P,) float64}, the shares of the client's other inputs taken for the other.

    Args:
        client: one side of P pairs.
        classifier: {"weight": (P, d), "bias": (P,)}.
        side: {"label": ()}, 1 for the novel client and 0 for the known one.
    """
    _, x = _halves(client)
    wrong = (_logits(x, classifier) > 0) != (side["label"] > 0.5)  # (n, P)
    return {"error": wrong.double().mean(dim=0)}


def _logits(x: Tensor, classifier: Model) -> Tensor:
    return x @ classifier["weight"].T + classifier["bias"]


def _halves(client: Client) -> tuple[Tensor, Tensor]:
    """Returns the inputs (n, d) to fit on and those to err on, alternating over all of them.

    The only input of a client that has but one is both.
    """
    stride = -(-len(client.train) // (2 * INPUTS))
    x = client.train.batch(slice(None, None, stride)).x.flatten(1)
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    return x[::2], x[1::2] if len(x) > 1 else x
