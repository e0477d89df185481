"""What a hostile site answers in the place of its clients, well digested where it is a message."""

import json
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from hyperfed import trees
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.site import Site
from hyperfed.engines.replies import BadReplyError, NoAnswerError
from hyperfed.trees import Tree, checkpoints

Answer = bytes | Exception | None
Behave = Callable[[Site, bytes], Answer]


def forged(layout: Any, meta: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """A message that says whatever it likes of itself, with the digest of that."""
    tensors = {name: leaf.clone() for name, leaf in tensors.items()}
    header = {"format": "hyperfed-checkpoint-1", "layout": layout, "meta": meta}
    digest = checkpoints._digest(header, tensors)
    text = json.dumps(header | {"digest": digest})
    return safetensors.torch.save(tensors, {"hyperfed": text})


def parts(site: Site, content: bytes) -> tuple[Tree, dict[str, Any]]:
    return checkpoints.loads(site.handle(content), "it")


def meta(**changes: Any) -> Behave:
    def behave(site: Site, content: bytes) -> bytes:
        tree, said = parts(site, content)
        said |= changes
        return checkpoints.dumps(tree, {k: v for k, v in said.items() if v != "nothing"})

    return behave


def reply(change: Callable[[Tree], Any]) -> Behave:
    """Changes what each client replies."""

    def behave(site: Site, content: bytes) -> bytes:
        tree, said = parts(site, content)
        return checkpoints.dumps({place: change(answer) for place, answer in tree.items()}, said)

    return behave


def leaves(change: Callable[[torch.Tensor], torch.Tensor]) -> Behave:
    return reply(lambda answer: trees.tree_map(change, answer))


def layout(change: Callable[[dict[str, Any]], Any]) -> Behave:
    def behave(site: Site, content: bytes) -> bytes:
        tree, said = parts(site, content)
        tensors = dict(checkpoints._leaves(tree))
        return forged(change(checkpoints._layout(tree)), said, tensors)

    return behave


def places(change: Callable[[str], str]) -> Behave:
    def behave(site: Site, content: bytes) -> bytes:
        tree, said = parts(site, content)
        renamed = {change(place): answer for place, answer in tree.items()}
        return checkpoints.dumps(renamed, said)

    return behave


def raises(kind: str, text: str) -> Behave:
    def behave(site: Site, content: bytes) -> bytes:
        _, said = parts(site, content)
        calls = len(wire.unpack_request(content).calls)
        errors = {str(place): [kind, text] for place in range(calls)}
        return checkpoints.dumps({}, said | {"errors": errors})

    return behave


def says(content: Answer) -> Behave:
    return lambda site, asked: content


def deep(levels: int, end: Any = "contiguous") -> Any:
    nested = end
    for _ in range(levels):
        nested = {"a": nested}
    return nested


def honest(site: Site, content: bytes) -> bytes:
    return site.handle(content)


def flipped(site: Site, content: bytes) -> bytes:
    whole = bytearray(site.handle(content))
    whole[-9] ^= 1
    return bytes(whole)


def first(answer: Tree) -> str:
    return next(iter(answer))


UNREADABLE: dict[str, Behave] = {
    "nothing": says(None),
    "an error": says(NoAnswerError("its site did not answer: its app failed")),
    "another record": says(BadReplyError("a message must hold one array of bytes")),
    "no bytes": says(b""),
    "garbage": says(b"garbage" * 10),
    "zeros": says(bytes(1 << 16)),
    "JSON": says(b'{"answers": {}}'),
    "an announced header of 8 EB": says(b"\xff" * 8 + b"{}"),
    "the request": lambda site, content: content,
    "cut short": lambda site, content: site.handle(content)[:-3],
    "the first half": lambda site, content: site.handle(content)[: len(content) // 3],
    "too long": lambda site, content: site.handle(content) + b"\0" * 7,
    "20 MB": lambda site, content: bytes(2 * 10**7),
    "a flipped bit": flipped,
    "tensors alone": says(safetensors.torch.save({"0": torch.ones(3)})),
    "a header that is a number": says(safetensors.torch.save({}, {"hyperfed": "3"})),
    "a header 100000 deep": says(
        safetensors.torch.save({}, {"hyperfed": '{"a":' * 10**5 + "1" + "}" * 10**5})
    ),
    "no layout": lambda site, content: forged(None, {}, {}),
    "a layout that is a list": lambda site, content: forged([["0"]], {}, {}),
    "a layout without its tensors": layout(lambda made: made | {"7": {"w": "contiguous"}}),
    "a layout of numbers": layout(lambda made: deep(1, 3)),
    "a layout 900 deep": layout(lambda made: made | {"0": deep(900, {})}),
    "images of no image": layout(lambda made: trees.tree_map(lambda leaf: "channels_last", made)),
    "a header that says nothing": lambda site, content: forged({}, None, {}),
    "a header that is a list": lambda site, content: forged({}, [1], {}),
    "no serial": meta(serial="nothing"),
    "a serial in words": meta(serial="one"),
    "the serial before": meta(serial=0),
    "a serial of 400 digits": meta(serial=10**400),
    "another session": meta(session=1),
    "an error of no call": meta(errors={"50": ["a", "b"]}),
    "an error of a call below zero": meta(errors={"-1": ["a", "b"]}),
    "a memory of no call": meta(remembers=[50]),
    "answers with noise of no call": meta(spent={"50": [[1.0, 1]]}),
    "answers with noise of more calls than there are": meta(
        spent={str(place): [[1.0, wire.MOST_SPENT]] for place in range(300)}
    ),
    "a surplus": meta(more=1),
    "errors in a list": meta(errors=["a"]),
    "errors at no place": meta(errors={"x": ["a", "b"]}),
    "errors of three parts": meta(errors={"0": ["a", "b", "c"]}),
    "errors of half a letter": meta(errors={"0": ["a", "\ud800"]}),
    "memories in words": meta(remembers=["0"]),
    "memories in a table": meta(remembers={"0": 1}),
    "places in words": places(lambda place: "x" + place),
    "places below zero": places(lambda place: "-" + place),
    "places of 5000 digits": places(lambda place: place + "0" * 5000),
    "places in superscript": places(lambda place: "²"),
    "a tensor for each reply": reply(lambda answer: torch.ones(2)),
    "trees 200 deep": reply(lambda answer: deep(200, torch.ones(1))),
}
"""What is no reply to the message, by its bytes."""

UNUSABLE: dict[str, Behave] = {
    "other places": places(lambda place: str(int(place) + 50)),
    "nothing in each reply": reply(lambda answer: {}),
    "a surplus leaf": reply(lambda answer: answer | {"more": torch.ones(1)}),
    "a leaf left out": reply(lambda answer: dict(list(answer.items())[1:])),
    "a leaf of another name": reply(lambda answer: {f"_{k}": v for k, v in answer.items()}),
    "a name in colours": reply(lambda answer: {f"\x1b[31m\n{k}": v for k, v in answer.items()}),
    "names of 500 kB": reply(lambda answer: {k * 10**5: v for k, v in answer.items()}),
    "a tree for a leaf": reply(lambda answer: answer | {first(answer): {"a": torch.ones(1)}}),
    "a tree without leaves": reply(lambda answer: {"more": {}} | answer),
    "two leaves of one path": reply(
        lambda answer: answer | {"a/b": torch.ones(1), "a": {"b": torch.tensor([1])}}
    ),
    "one number for a leaf": reply(lambda answer: answer | {first(answer): torch.tensor(1.0)}),
    "an axis more": leaves(lambda leaf: leaf.unsqueeze(0)),
    "no entries": leaves(lambda leaf: leaf.new_zeros(0)),
    "ten times the entries": leaves(lambda leaf: leaf.unsqueeze(0).repeat_interleave(10, 0)),
    "half precision": leaves(lambda leaf: leaf.half()),
    "complex numbers": leaves(lambda leaf: leaf.to(torch.complex64)),
    "truth values": leaves(lambda leaf: leaf.bool()),
    "bytes": leaves(lambda leaf: leaf.to(torch.uint8)),
    "NaN": leaves(lambda leaf: leaf * torch.nan),
    "a UserError": raises("UserError", "give up"),
    "an UnlabelledError": raises("UnlabelledError", "no labels"),
    "a BadReplyError": raises("BadReplyError", "no"),
    "a KeyboardInterrupt": raises("KeyboardInterrupt", "stop"),
    "a SystemExit": raises("SystemExit", "0"),
    "an error of 1 MB": raises("OSError", "x" * 10**6),
    "an error in lines and colours": raises("OSError", "\x1b[2J\n2026-01-01  done\r"),
    "an error of a name of lines": raises("A\nB" * 1000, "c"),
}
"""What can be read and not be used, or is an error."""

LIES: dict[str, Behave] = {
    "1e30": leaves(lambda leaf: torch.full_like(leaf, 1e30)),
    "-1e6 times itself": leaves(lambda leaf: leaf * -1e6),
    "infinity": leaves(lambda leaf: torch.full_like(leaf, -torch.inf)),
    "the greatest number": leaves(lambda leaf: torch.full_like(leaf, 1.7e308)),
}
"""What only a comparison with others shows."""


def counts(**changes: Any) -> Behave:
    """Changes what is counted on the test examples; 6 there are in the toy task."""

    def change(answer: Tree) -> Tree:
        test = dict(answer["test"])
        test |= {n: torch.full_like(test[n], value) for n, value in changes.items()}
        return answer | {"test": test}

    return reply(change)


MISCOUNTED: dict[str, Behave] = {
    "names of two levels in one": reply(lambda answer: dict(trees.leaves(answer))),
    "one example more": counts(count=7),
    "one example fewer": counts(count=5),
    "no example": counts(count=0),
    "examples below zero": counts(count=-6),
    "2^62 examples": counts(count=2**62),
    "more right than there are": counts(correct=6.5),
    "fewer right than none": counts(correct=-0.5),
    "a masked score beyond": counts(masked_correct=7.0),
    "a masked score below": counts(masked_correct=-1.0),
    "a zeroed score beyond": counts(zeroed_correct=1e300),
    "a zeroed score below": counts(zeroed_correct=-1e300),
    "a loss below zero": counts(loss=-3.0),
    "a loss of infinity": counts(loss=torch.inf),
    "a score of NaN": counts(correct=torch.nan),
}
