"""Sums of parts that sites mask (Bonawitz et al., CCS 2017, figure 4, without its signatures).

Clients are called by their places in the cohort, of which there are C; t of them, more than half,
are needed (:func:`hyperfed.engines.masking.least`). Secrets are fresh for each sum, and come from
the operating system. In four exchanges each client

- ``mask_keys``: tells two public keys, c for what others share with it and s for masks;
- ``mask_shares``: has the keys of all, draws a seed b, splits b and its secret key of s into C
  shares of which t give them back (Shamir), and sends each other client a share of both, which
  that one alone can read; the server passes them on;
- the step itself: trains, and sends its part of the sum plus a mask that b makes, plus one for
  each other client v that shared, which both make of s: one adds it, the other subtracts it;
- ``mask_reveal``: is told who sent a part, and gives away its share of b of each of these, and of
  the secret key of s of each of the others: never both of one client.

So the server finds what b and the missing ones left in the sum. Masks are key streams of ChaCha20;
shares travel under ChaCha20-Poly1305; keys are agreed on X25519 and derived by HKDF, from **all**
public keys as each client was told them, so that who was told others reads no share and shares no
mask. The server is believed to pass on the keys of sites and not its own, and to tell all of them
the same: without signatures nobody could find out.

What a client keeps between two exchanges is a tree, as all that it remembers. Secrets are not in it
any more once the part was sent, nor others' shares once they were given away: nothing can be asked
twice.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.calls import Call, find_step, promised
from hyperfed.engines.flower.policy import RefusedError
from hyperfed.engines.masking import LARGEST, PART, Group, Masking, least
from hyperfed.federation import Client, Each, StepInfo
from hyperfed.training import Batches
from hyperfed.trees import Structure, Tree

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

KEYS, SHARES, REVEAL = (
    StepInfo(name, like=None, deferrable=False, private=False, reads=0)
    for name in ("mask_keys", "mask_shares", "mask_reveal")
)
"""The exchanges beside the step itself. No client's half of a method has them: sites answer."""

KEY = 32
"""Bytes of a key, a seed and a digest."""

SHARE = 52
"""Bytes of a share of one, as Flower's library makes them."""

SEALED = 2 * SHARE + 16
"""Bytes of two that are encrypted, with what proves that they are whole."""

SECRET, SEED = 0, 1
"""Of two shares of a client, that of its secret key and that of its seed."""


# What a site does for a client.


def advertise(state: Tree, *, smallest: int) -> tuple[Tree, Tree]:
    """Returns new public keys, (2, KEY), and what to keep."""
    own = [secrets.token_bytes(KEY) for _ in range(2)]
    return {"keys": _table(map(_public, own))}, {"new": _table(own)}


def share(state: Tree, told: Tree, *, smallest: int) -> tuple[Tree, Tree]:
    """Returns what is shared, and what to keep.

    Args:
        state: after :func:`advertise`.
        told: {"keys": (C, 2, KEY)} of all clients; zeros of who is lost.
        smallest: clients that a sum must be of.

    Returns:
        {"shares": (C, SEALED)} for each other client, {"digest": (KEY,)} of the seed; the state.

    Raises:
        RefusedError: with these keys, sums would tell more than they may.
    """
    own, keys = _rows(_kept(state, "new")), told["keys"]
    public = [_rows(each) for each in keys]
    there = [place for place, row in enumerate(public) if any(map(any, row))]
    mine = [*map(_public, own)]
    if public.count(mine) != 1 or len({key for p in there for key in public[p]}) < 2 * len(there):
        raise RefusedError("each client must have keys of its own, and this one must be among them")
    _check_many(len(there), len(public), smallest)
    me, seed, context = public.index(mine), secrets.token_bytes(KEY), _digest(keys)
    pairs = list(zip(_split(own[1], len(public)), _split(seed, len(public)), strict=True))
    sealed = [
        _sealer(own[0], public[v][0], context, me, v).encrypt(bytes(12), b"".join(pairs[v]), None)
        if v in there and v != me
        else bytes(SEALED)
        for v in range(len(public))
    ]
    # Of another group with the same keys, others could give away what they may not of this one.
    kept = {"own": state["new"], "seed": _table([seed]), "keys": keys, "share": _table(pairs[me])}
    return {"shares": _table(sealed), "digest": _table([_digest_of_seed(seed)])[0]}, kept


def cover(state: Tree, part: Tree, told: Tree, *, smallest: int) -> tuple[Tree, Tree]:
    """Returns a client's part of a sum under masks, and what to keep.

    Args:
        state: after :func:`share`.
        part: {PART: (d,) int64}.
        told: {"shares": (C, SEALED)} from each other client; zeros of who is lost.
        smallest: clients that a sum must be of.

    Raises:
        RefusedError: too few are left, or shares that cannot be read.
    """
    seed, public = _rows(_kept(state, "seed"))[0], [_rows(each) for each in state["keys"]]
    own, context = _rows(state["own"]), _digest(state["keys"])
    me = public.index([*map(_public, own)])
    covered, held = part[PART].cpu() + _stream(seed, len(part[PART])), {me: _rows(state["share"])}
    for v, sealed in enumerate(_rows(told["shares"])):
        if v == me or not any(sealed):
            continue
        try:
            pair = _sealer(own[0], public[v][0], context, v, me).decrypt(bytes(12), sealed, None)
        except Exception as error:
            raise RefusedError(f"what client {v} of the cohort shares cannot be read") from error
        held[v] = [pair[:SHARE], pair[SHARE:]]
        covered += _mask(own[1], public[v][1], context, len(covered), first=me < v)
    _check_many(len(held), len(public), smallest)
    nothing = [bytes(SHARE)] * 2
    kept = [_table(held.get(v, nothing)) for v in range(len(public))]
    there = torch.tensor([v in held for v in range(len(public))])
    return {PART: covered}, {"held": torch.stack(kept), "there": there, "me": torch.tensor(me)}


def reveal(state: Tree, told: Tree, *, smallest: int) -> tuple[Tree, Tree]:
    """Returns what uncovers a sum: one share of each client. Nothing is kept.

    Args:
        state: after :func:`cover`.
        told: {"sent": (C,) bool} who sent a part.
        smallest: clients that a sum must be of.

    Returns:
        {"shares": (C, SHARE)}: of the seed of who sent one, of the secret key of who did not.

    Raises:
        RefusedError: those who sent are too few, or others than shared.
    """
    held, there, sent = _kept(state, "held"), state["there"], told["sent"]
    # Of bytes, one could count for many, and stand for who did not share.
    one_each = sent.dtype == torch.bool and sent.shape == there.shape
    if not one_each or (sent & ~there).any() or not sent[state["me"]]:
        raise RefusedError("a sum must be of clients that shared, and of this one")
    _check_many(int(sent.sum()), len(there), smallest)
    return {"shares": torch.where(sent[:, None], held[:, SEED], held[:, SECRET])}, {}


STEPS: Mapping[str, Callable[..., tuple[Tree, Tree]]] = {
    KEYS.name: advertise,
    SHARES.name: share,
    REVEAL.name: reveal,
}
"""Name -> what a site makes of a client's state and what it is told: a reply, and a new state."""


def _kept(state: Tree, name: str) -> Tensor:
    if name not in state:
        raise RefusedError("the exchanges of a masked sum must come in their order, and each once")
    kept: Tensor = state[name]
    return kept


def _check_many(there: int, asked: int, smallest: int) -> None:
    if asked > LARGEST:
        raise RefusedError(f"a masked sum must be of {LARGEST} clients at most, came {asked}")
    if there < (fewest := max(smallest, least(asked))):
        raise RefusedError(f"a masked sum must be of {fewest} clients here, but {there} are left")


# What the server does.


class PairwiseMasking(Masking):
    """Sums of parts that sites mask."""

    def total(
        self,
        cohort: Group,
        step: Callable[..., Tree],
        payload: Sequence[Tree],
        batches: Batches | None,
    ) -> Tensor:
        """Asks for keys, shares, masked parts and what uncovers their sum, and returns that."""
        keys = cohort.gather(KEYS, ())["keys"]
        cohort.need(fewest := least(len(keys)))
        shared = cohort.gather(SHARES, ({"keys": keys},))
        cohort.need(fewest)
        told = Each({"shares": shared["shares"].transpose(0, 1)})
        parts = cohort.gather(step, (*payload, told), batches, masked=True)[PART]
        cohort.need(fewest)
        sent = cohort.weight > 0
        revealed = cohort.gather(REVEAL, ({"sent": sent},), late=True)
        try:
            return uncover(parts, keys, shared["digest"], sent, revealed)
        except ValueError as error:
            cohort.give_up(f"the masked sum cannot be uncovered: {error}")


def uncover(parts: Tensor, keys: Tensor, digests: Tensor, sent: Tensor, revealed: Tree) -> Tensor:
    """Returns the (d,) int64 sum of C clients' parts without its masks.

    Args:
        parts: (C, d) int64, masked; zeros of who did not send one.
        keys: (C, 2, KEY) public ones.
        digests: (C, KEY) of the seeds; zeros of who did not share.
        sent: (C,) who sent a part.
        revealed: {"shares": (C, C, SHARE)}, a row from each; zeros of who gave none.

    Raises:
        ValueError: too few shares, or wrong ones.
    """
    parts, keys, digests, sent = (each.cpu() for each in (parts, keys, digests, sent))
    if not revealed:
        raise ValueError("nobody gave shares")
    shares, context = [_rows(row) for row in revealed["shares"].cpu()], _digest(keys)
    public, total = [_rows(each) for each in keys], parts.sum(dim=0)
    # What a share is of does not depend on what it says of itself.
    of = [
        [u.to_bytes(4, "little") + row[v][4:] for u, row in enumerate(shares, 1) if any(row[v])]
        for v in range(len(public))
    ]
    for v in range(len(public)):
        if sent[v]:
            (digest,) = _rows(digests[v : v + 1])
            seed = _join(of[v], len(public), _digest_of_seed, digest)
            total -= _stream(seed, len(total))
        elif digests[v].any():
            key = _join(of[v], len(public), _public, public[v][1])
            for u in sent.nonzero().flatten().tolist():
                total += _mask(key, public[u][1], context, len(total), first=v < u)
    return total


def is_exchange(call: Call) -> bool:
    """Returns whether a call is one of the exchanges, which no method knows."""
    return call.step in STEPS


def structure_of(call: Call, client: type[Client]) -> Structure:
    """Returns what the reply to a masked call, or to one of the exchanges, must look like."""
    shape: dict[str, tuple[tuple[int, ...], torch.dtype]]
    if call.masked:
        like = promised(find_step(client, call.step)[1], call)
        assert like is not None
        numbers = sum(leaf.numel() for _, leaf in trees.leaves(like) if leaf.is_floating_point())
        shape = {PART: ((numbers,), torch.int64)}
    elif call.step == KEYS.name:
        shape = {"keys": ((2, KEY), torch.uint8)}
    else:
        (told,) = call.payload
        c = len(next(iter(told.values())))
        shape = {"shares": ((c, SHARE), torch.uint8)}
        if call.step == SHARES.name:
            shape = {"shares": ((c, SEALED), torch.uint8), "digest": ((KEY,), torch.uint8)}
    return tuple(sorted((name, *of) for name, of in shape.items()))


# Keys, shares and streams. cryptography and flwr are imported where they are used: an extra.


def _public(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _agreed(secret: bytes, public: bytes, purpose: bytes, context: bytes) -> bytes:
    """Returns a key for one purpose that two clients alone can know."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    other = X25519PublicKey.from_public_bytes(public)
    common = X25519PrivateKey.from_private_bytes(secret).exchange(other)
    return HKDF(SHA256(), KEY, salt=context, info=b"hyperfed " + purpose).derive(common)


def _sealer(
    secret: bytes, public: bytes, context: bytes, sender: int, receiver: int
) -> "ChaCha20Poly1305":
    """Returns what encrypts the one message from one client to another."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    purpose = f"shares from {sender} to {receiver}".encode()
    return ChaCha20Poly1305(_agreed(secret, public, purpose, context))


def _mask(secret: bytes, public: bytes, context: bytes, size: int, *, first: bool) -> Tensor:
    """Returns what a client adds for another one: the first of both what the second subtracts."""
    stream = _stream(_agreed(secret, public, b"masks", context), size)
    return stream if first else -stream


def _stream(key: bytes, size: int) -> Tensor:
    """Returns (size,) int64 numbers that are uniform to who does not know the key."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return torch.from_numpy(np.frombuffer(stream.update(bytes(8 * size)), np.int64).copy())


def _split(secret: bytes, clients: int) -> list[bytes]:
    """Returns a share of a secret for each client."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    return create_shares(secret, least(clients), clients)


def _join(
    shares: list[bytes], clients: int, known_by: Callable[[bytes], bytes], public: bytes
) -> bytes:
    """Returns the secret of shares, of which one may be wrong where there are more than needed.

    Args:
        shares: of some clients.
        clients: C.
        known_by: returns what of a secret is public.
        public: that of the one.

    Raises:
        ValueError: there are too few, or wrong ones.
    """
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    needed = least(clients)
    if len(shares) < needed:
        raise ValueError(f"{needed} shares are needed, but {len(shares)} came")
    for first in range(len(shares) if len(shares) > needed else 1):
        try:
            secret = combine_shares((shares[first:] + shares[:first])[:needed])
        except ValueError:
            continue
        if len(secret) == KEY and known_by(secret) == public:
            return secret
    raise ValueError("some shares are wrong")


def _digest_of_seed(seed: bytes) -> bytes:
    return sha256(seed).digest()


def _digest(table: Tensor) -> bytes:
    return sha256(table.contiguous().numpy().tobytes()).digest()


def _table(rows: Iterable[bytes]) -> Tensor:
    """Returns (n, length) of bytes, as tensors travel."""
    return torch.from_numpy(np.stack([np.frombuffer(row, np.uint8) for row in rows]))


def _rows(table: Tensor) -> list[bytes]:
    return [row.tobytes() for row in table.numpy()]
