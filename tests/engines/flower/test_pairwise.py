"""The exchanges of a masked sum: what each step tells, and what comes out of them."""

import os
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pytest
import torch
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from scipy import stats
from torch import Tensor

from hyperfed.engines.flower import pairwise
from hyperfed.engines.flower.pairwise import SEED, advertise, cover, reveal, share, uncover
from hyperfed.engines.flower.policy import RefusedError
from hyperfed.engines.masking import least
from hyperfed.trees import Tree

D = 5000
NOBODY: frozenset[int] = frozenset()


class Clients:
    """C clients that take the exchanges of one sum, of which some go away in between."""

    def __init__(self, count: int, smallest: int = 3) -> None:
        draw = torch.Generator().manual_seed(count)
        self.parts = torch.randint(-(2**40), 2**40, (count, D), generator=draw)
        self.states: list[Tree] = [{} for _ in range(count)]
        self.there = set(range(count))
        self.keys = torch.zeros(count, 2, 32, dtype=torch.uint8)
        self.shares = torch.zeros(count, count, pairwise.SEALED, dtype=torch.uint8)
        self.digests = torch.zeros(count, 32, dtype=torch.uint8)
        self.masked = torch.zeros_like(self.parts)
        self.revealed = torch.zeros(count, count, pairwise.SHARE, dtype=torch.uint8)
        self.smallest = smallest

    def do(self, function: Callable[..., tuple[Tree, Tree]], client: int, *told: Tree) -> Tree:
        reply, self.states[client] = function(self.states[client], *told, smallest=self.smallest)
        return reply

    def advertise(self) -> None:
        for client in self.there:
            self.keys[client] = self.do(advertise, client)["keys"]

    def share(self) -> None:
        for client in self.there:
            told = self.do(share, client, {"keys": self.keys})
            self.shares[client], self.digests[client] = told["shares"], told["digest"]

    def cover(self) -> None:
        for client in self.there:
            told = {"shares": self.shares[:, client]}
            part = {"part": self.parts[client]}
            self.masked[client] = self.do(cover, client, part, told)["part"]

    def reveal(self, sent: Collection[int]) -> None:
        for client in self.there:
            told = {"sent": self.sent(sent)}
            self.revealed[client] = self.do(reveal, client, told)["shares"]

    def sent(self, sent: Collection[int]) -> Tensor:
        return torch.tensor([client in sent for client in range(len(self.parts))])

    def sum(self, sent: Collection[int]) -> Tensor:
        told = {"shares": self.revealed}
        return uncover(self.masked, self.keys, self.digests, self.sent(sent), told)

    def until_covered(self) -> None:
        self.advertise()
        self.share()
        self.cover()


@pytest.mark.parametrize(
    ("count", "lost"),
    [
        (3, ((), (), (), ())),
        (5, ((), (), (), ())),
        (6, ((1,), (), (), ())),  # before it has keys
        (6, ((), (4,), (), ())),  # before it shares
        (6, ((), (), (0, 3), ())),  # before it sends: the others subtract its masks
        (6, ((), (), (), (2, 5))),  # before it reveals: what it sent counts
        (9, ((6,), (1,), (3,), (0,))),
    ],
)
def test_the_masks_leave_the_sum_of_those_who_sent(
    count: int, lost: tuple[tuple[int, ...], ...]
) -> None:
    clients = Clients(count)
    steps: list[Callable[[], None]] = [clients.advertise, clients.share, clients.cover]
    for step, away in zip(steps, lost, strict=False):
        clients.there -= set(away)
        step()
    sent = set(clients.there)
    clients.there -= set(lost[3])
    clients.reveal(sent)
    expected = clients.parts[sorted(sent)].sum(dim=0)
    assert torch.equal(clients.sum(sent), expected)


def uniform(numbers: Tensor) -> float:
    """The p-value of bytes that are uniform."""
    found = numbers.numpy().tobytes()
    counts = torch.bincount(torch.frombuffer(bytearray(found), dtype=torch.uint8).int())
    assert len(counts) == 256
    return float(stats.chisquare(counts.numpy()).pvalue)


def test_a_masked_part_looks_uniform_also_to_who_knows_all_masks_but_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client 0 of 3: its own mask is told in the end, those with 1 and 2 are not.

    Secrets are those of a seed: of seven p-values by others one is below 1e-4 now and then.
    """
    monkeypatch.setattr(pairwise.secrets, "token_bytes", random.Random(0).randbytes)
    clients = Clients(3)
    clients.parts.zero_()
    clients.advertise()
    secrets = [state["new"].clone() for state in clients.states]
    clients.share()
    seed = pairwise._rows(clients.states[0]["seed"])[0]
    clients.cover()
    context = pairwise._digest(clients.keys)
    public = pairwise._rows(clients.keys[0])[1]
    masks = [pairwise._stream(seed, D)] + [
        -pairwise._mask(pairwise._rows(secrets[v])[1], public, context, D, first=v < 0)
        for v in (1, 2)
    ]
    assert torch.equal(sum(masks), clients.masked[0])
    for left_out in masks:
        assert uniform(left_out) > 1e-4
        assert uniform(clients.masked[0] - left_out) > 1e-4
    assert uniform(clients.masked[0]) > 1e-4
    assert len({mask.sum().item() for mask in masks}) == 3


def test_masks_and_secrets_are_new_each_time() -> None:
    first, again = Clients(3), Clients(3)
    for clients in (first, again):
        clients.until_covered()
    assert torch.equal(first.parts, again.parts)
    assert not (first.masked == again.masked).any(dim=1).all()
    rows = torch.cat([first.keys, again.keys]).flatten(0, 1)
    assert len({bytes(row.tolist()) for row in rows}) == 12
    mirrored = [state["held"].flatten(1) for state in first.states]
    assert len({bytes(row.tolist()) for held in mirrored for row in held}) == 9


def test_each_secret_is_a_draw_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []

    def draw(size: int) -> bytes:
        drawn.append(os.urandom(size))
        return drawn[-1]

    clients = Clients(3)
    clients.advertise()
    monkeypatch.setattr("secrets.token_bytes", draw)
    clients.do(advertise, 0)
    clients.keys[0] = torch.stack(
        [torch.frombuffer(bytearray(pairwise._public(key)), dtype=torch.uint8) for key in drawn]
    )
    clients.do(share, 0, {"keys": clients.keys})
    kept = clients.states[0]
    assert [*pairwise._rows(kept["own"]), *pairwise._rows(kept["seed"])] == drawn[:3]
    assert {len(each) for each in drawn[:3]} == {32}


@pytest.mark.parametrize("sent", [{0, 1, 2, 3, 4}, {0, 1, 2}])
def test_of_each_client_one_share_is_given_away_and_none_is_kept(sent: set[int]) -> None:
    clients = Clients(5)
    clients.until_covered()
    held = clients.states[0]["held"].clone()
    assert all(row.any() for row in held.flatten(0, 1))
    assert not {"own", "seed", "share"} & clients.states[0].keys()
    told = clients.do(reveal, 0, {"sent": clients.sent(sent)})["shares"]
    for client in range(5):
        one, other = held[client].flip(0) if client in sent else held[client]
        assert torch.equal(told[client], one)
        assert not torch.equal(told[client], other)
    assert clients.states[0] == {}
    assert SEED == 1


def test_shares_are_read_by_whom_they_are_for_alone() -> None:
    clients = Clients(4)
    clients.advertise()
    clients.share()
    clients.shares[[1, 2]] = clients.shares[[2, 1]]
    with pytest.raises(RefusedError, match="what client 1 of the cohort shares cannot be read"):
        clients.cover()
    assert not clients.shares[0, 0].any()


def test_what_was_sent_cannot_be_sent_back() -> None:
    """Each way has a key of its own, as each encrypts one message without a nonce."""
    clients = Clients(3)
    clients.advertise()
    clients.share()
    clients.shares[1, 0] = clients.shares[0, 1]
    with pytest.raises(RefusedError, match="what client 1 of the cohort shares cannot be read"):
        clients.cover()


@pytest.mark.parametrize("count", [3, 6])
def test_fewer_shares_than_a_sum_has_clients_tell_nothing(count: int) -> None:
    secret = bytes(range(32))
    shares = pairwise._split(secret, count)
    assert combine_shares(shares[: least(count)]) == secret
    assert combine_shares(shares[-least(count) :]) == secret
    with suppress(ValueError):  # most others are no secrets
        assert combine_shares(shares[: least(count) - 1]) != secret


REFUSED: dict[str, tuple[str, Callable[[Clients], Any]]] = {}
"""What a server may try -> what it is told, and how."""


def attempt(told: str) -> Callable[[Callable[[Clients], Any]], None]:
    def note(function: Callable[[Clients], Any]) -> None:
        REFUSED[function.__name__] = told, function

    return note


ORDER = "must come in their order, and each once"


@attempt(ORDER)
def shares_before_keys(clients: Clients) -> None:
    clients.share()


@attempt(ORDER)
def a_part_before_shares(clients: Clients) -> None:
    clients.advertise()
    clients.cover()


@attempt(ORDER)
def a_second_part_under_the_same_masks(clients: Clients) -> None:
    clients.until_covered()
    clients.cover()


@attempt(ORDER)
def other_shares_of_the_same_secrets(clients: Clients) -> None:
    clients.until_covered()
    clients.share()


@attempt(ORDER)
def one_key_in_two_groups(clients: Clients) -> None:
    clients.advertise()
    clients.share()
    clients.keys[4] = 0
    clients.share()


@attempt(ORDER)
def shares_of_the_other_kind(clients: Clients) -> None:
    clients.until_covered()
    clients.reveal({0, 1, 2, 3, 4})
    clients.reveal({0, 1, 2})


@attempt(ORDER)
def shares_before_a_part_was_sent(clients: Clients) -> None:
    clients.advertise()
    clients.share()
    clients.reveal({0, 1, 2, 3, 4})


@attempt("must be of clients that shared, and of this one")
def a_sum_of_the_others(clients: Clients) -> None:
    clients.until_covered()
    clients.reveal({1, 2, 3, 4})


@attempt("must be of clients that shared, and of this one")
def a_sum_of_who_did_not_share(clients: Clients) -> None:
    clients.there -= {4}
    clients.until_covered()
    clients.reveal({0, 1, 2, 3, 4})


@attempt("must be of clients that shared, and of this one")
def a_sum_of_clients_that_there_are_not(clients: Clients) -> None:
    clients.until_covered()
    told = {"sent": torch.ones(9, dtype=torch.bool)}
    clients.do(reveal, 0, told)


@attempt("must be of clients that shared, and of this one")
def a_sum_of_one_that_counts_for_five(clients: Clients) -> None:
    clients.until_covered()
    clients.do(reveal, 0, {"sent": torch.tensor([5, 0, 0, 0, 0], dtype=torch.uint8)})


@attempt("must be of clients that shared, and of this one")
def a_sum_of_who_did_not_share_by_other_bits(clients: Clients) -> None:
    clients.there -= {4}
    clients.until_covered()
    clients.do(reveal, 0, {"sent": torch.tensor([1, 1, 1, 1, 2], dtype=torch.uint8)})


@attempt("must be of 3 clients here, but 2 are left")
def a_sum_of_two_in_the_end(clients: Clients) -> None:
    clients.until_covered()
    clients.reveal({0, 1})


@attempt("must be of 3 clients here, but 2 are left")
def a_group_of_two(clients: Clients) -> None:
    clients.there -= {2, 3, 4}
    clients.advertise()
    clients.share()


@attempt("must be of 3 clients here, but 2 are left")
def a_group_of_which_two_share(clients: Clients) -> None:
    clients.advertise()
    clients.share()
    clients.shares[[2, 3, 4]] = 0
    clients.there = {0, 1}
    clients.cover()


@attempt("must be of 4 clients here, but 3 are left")
def fewer_than_the_site_s_own_least(clients: Clients) -> None:
    clients.smallest = 4
    clients.there -= {3, 4}
    clients.advertise()
    clients.share()


@attempt("must be of 250 clients at most, came 251")
def a_group_that_takes_hours(clients: Clients) -> None:
    clients.advertise()
    clients.keys = torch.cat([clients.keys, torch.zeros(246, 2, 32, dtype=torch.uint8)])
    clients.share()


@attempt("must have keys of its own")
def one_client_under_two_names(clients: Clients) -> None:
    clients.advertise()
    clients.keys[4] = clients.keys[3]
    clients.do(share, 0, {"keys": clients.keys})


@attempt("must have keys of its own")
def one_key_for_masks_of_two(clients: Clients) -> None:
    clients.advertise()
    clients.keys[4, 1] = clients.keys[3, 1]
    clients.do(share, 0, {"keys": clients.keys})


@attempt("must have keys of its own, and this one must be among them")
def a_group_without_the_client(clients: Clients) -> None:
    clients.advertise()
    clients.keys[0, 1] = clients.keys[0, 1].flip(0)
    clients.share()


@attempt("what client 0 of the cohort shares cannot be read")
def other_keys_for_each_client(clients: Clients) -> None:
    clients.there = {0, 1, 2}
    clients.advertise()
    for client in (0, 1, 2):
        clients.keys[3] = torch.full((2, 32), 9 + client, dtype=torch.uint8)
        clients.keys[3, 1] += 100
        told = clients.do(share, client, {"keys": clients.keys})
        clients.shares[client] = told["shares"]
    clients.do(cover, 2, {"part": clients.parts[2]}, {"shares": clients.shares[:, 2]})


@attempt("what client 1 of the cohort shares cannot be read")
def shares_that_it_made_up(clients: Clients) -> None:
    clients.advertise()
    clients.share()
    clients.shares[1, 0] = 7
    clients.do(cover, 0, {"part": clients.parts[0]}, {"shares": clients.shares[:, 0]})


@pytest.mark.parametrize("name", REFUSED)
def test_a_server_is_refused(name: str) -> None:
    told, attack = REFUSED[name]
    with pytest.raises(RefusedError, match=told):
        attack(Clients(5))


def test_a_site_gives_nothing_away_for_half_of_a_cohort_or_less() -> None:
    clients = Clients(7)
    clients.until_covered()
    with pytest.raises(RefusedError, match="must be of 4 clients here, but 3 are left"):
        clients.reveal({0, 1, 2})


def ready(count: int) -> Clients:
    clients = Clients(count)
    clients.until_covered()
    clients.there -= {1}
    clients.masked[1] = 0
    clients.reveal(set(range(count)) - {1})
    return clients


@pytest.mark.parametrize("of", [0, 1])  # whose seed, or secret key, the share is of
@pytest.mark.parametrize("liar", [0, 3, 5])
def test_one_wrong_share_beside_enough_is_left_out(liar: int, of: int) -> None:
    clients, sent = ready(6), {0, 2, 3, 4, 5}
    clients.revealed[liar, of, 4] ^= 1  # the secret's first bytes: its padding stays right
    assert torch.equal(clients.sum(sent), clients.parts[sorted(sent)].sum(dim=0))


def test_what_a_share_says_of_itself_does_not_matter() -> None:
    clients, sent = ready(6), {0, 2, 3, 4, 5}
    clients.revealed[:, :, :4] = 9
    assert torch.equal(clients.sum(sent), clients.parts[sorted(sent)].sum(dim=0))


@pytest.mark.parametrize("of", [0, 1])
def test_with_too_many_wrong_shares_there_is_no_sum(of: int) -> None:
    clients, sent = ready(6), {0, 2, 3, 4, 5}
    clients.revealed[[0, 3], of, 4] ^= 1
    with pytest.raises(ValueError, match="some shares are wrong"):
        clients.sum(sent)


def test_with_too_few_shares_there_is_no_sum() -> None:
    clients, sent = ready(6), {0, 2, 3, 4, 5}
    clients.revealed[[0, 3]] = 0
    assert least(6) == 4
    with pytest.raises(ValueError, match="4 shares are needed, but 3 came"):
        clients.sum(sent)
    with pytest.raises(ValueError, match="nobody gave shares"):
        uncover(clients.masked, clients.keys, clients.digests, clients.sent(sent), {})
