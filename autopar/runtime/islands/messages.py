"""Tensors between the same rank of each island, in the form that a wire gives them.

The mean over islands, where all elements travel (of a sparse wire all send all):

    island 0   codes its parts 0 | 1    --part 1-->    decodes, sums, codes part 1
    island 1   codes its parts 0 | 1    <--part 0--    and each sends its mean to all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.collectives.memory_format import settled
from autopar.updates.wires import Sender, Wire, flat_of, shaped_as

Message = tuple[Tensor, ...]
NamedTensors = Sequence[tuple[str, Tensor]]
_DTYPES = (  # of messages, which have their places here
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)
_MEETINGS = ("a gradient's mean", "the border", "parameters", "a server's answer")


class Mark(NamedTuple):
    """The occasion of a message, which all islands must have alike: what they do, in or after which step."""

    kind: int
    step: int = 0

    def __str__(self) -> str:
        return f"{_MEETINGS[self.kind]} of step {self.step}"


GRADIENTS, BORDER, PARAMETERS, SERVER = range(4)


class Across:
    """A group of the ranks that hold the same part, one on each island; `sent` are bytes that left."""

    def __init__(self, group: Any, mine: int, count: int, device: torch.device | None = None) -> None:
        self.group, self.mine, self.count, self.device = group, mine, count, device
        self.sent = 0

    def others(self) -> list[int]:
        """Numbers of the other islands."""
        return [island for island in range(self.count) if island != self.mine]

    def swap(
        self, messages: Mapping[int, Message], mark: Mark, peers: Sequence[int] | None = None
    ) -> dict[int, Message]:
        """Send each peer its message, and receive one from each of `peers`, or of those that are sent to."""
        peers = list(messages) if peers is None else peers
        sends = [self._send(peer, message, mark) for peer, message in messages.items()]
        received = {peer: self.receive(peer, mark) for peer in peers}
        for works, _ in sends:
            for work in works:
                work.wait()
        return received

    def send(self, peer: int, message: Message, mark: Mark) -> None:
        """Send a message; returns when it has left."""
        works, _ = self._send(peer, message, mark)
        for work in works:
            work.wait()

    def _send(self, peer: int, message: Message, mark: Mark) -> tuple[list[Any], list[Tensor]]:
        """Begin to send: how many tensors on which occasion, their dtypes and sizes, their bytes."""
        held = [settled(item.detach()).cpu().contiguous() for item in message]
        kinds = torch.tensor([[_code(item.dtype), item.numel()] for item in held], dtype=torch.int64)
        body = torch.cat([torch.empty(0, dtype=torch.uint8), *(_bytes(item) for item in held)])
        parts = [torch.tensor([len(held), *mark]), kinds, body]
        self.sent += body.nbytes
        return [self.group.send([part], peer, tag) for tag, part in enumerate(parts) if part.numel()], parts

    def receive(self, peer: int, mark: Mark) -> Message:
        """The next message of a peer; raises InputError for one of another occasion."""
        count, *told = self._receive(peer, 0, torch.empty(3, dtype=torch.int64)).tolist()
        if mark != (theirs := Mark(*told)):
            raise InputError(
                where=f"island {self.mine}, at {mark}",
                found=f"island {peer} at {theirs}",
                wanted="the same steps on all islands",
                remedy="step the optimizer in the same bodies of the loop on every island",
            )
        kinds = self._receive(peer, 1, torch.empty(count, 2, dtype=torch.int64)).tolist()
        sizes = [_DTYPES[code].itemsize * length for code, length in kinds]
        body = self._receive(peer, 2, torch.empty(sum(sizes), dtype=torch.uint8))
        parts = zip(body.split(sizes), kinds, strict=True)
        return tuple(part.clone().view(_DTYPES[code]).to(self.device) for part, (code, _) in parts)

    def _receive(self, peer: int, tag: int, buffer: Tensor) -> Tensor:
        if buffer.numel():
            self.group.recv([buffer], peer, tag).wait()
        return buffer

    def largest(self, number: int, mark: Mark) -> int:
        """The largest of the islands' numbers; collective."""
        told = self.swap({peer: (torch.tensor([number]),) for peer in self.others()}, mark)
        return max(number, *(int(item[0]) for item in told.values()))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with island 0's; collective."""
        if self.mine == 0:
            message = tuple(tensor.reshape(-1) for tensor in tensors)
            self.swap(dict.fromkeys(self.others(), message), Mark(PARAMETERS), [])
            return
        for tensor, first in zip(tensors, self.receive(0, Mark(PARAMETERS)), strict=True):
            tensor.copy_(first.view_as(tensor))


class MeanOverIslands:
    """The mean of tensors over islands, on a wire; keeps what it drops for the next time."""

    def __init__(self, across: Across, wire: Wire) -> None:
        self.across, self.wire = across, wire
        self.sender, self.again = Sender(wire), Sender(wire)
        self._mark = Mark(GRADIENTS)

    def __call__(self, named: NamedTensors, mark: Mark) -> list[Tensor]:
        """The means of the islands' tensors of these names, which they have in the same order; collective."""
        self._mark = mark
        flats = [(name, flat_of(tensor)) for name, tensor in named]
        means = self._in_parts(flats) if self.wire.is_dense else self._mean(flats, self._to_all(flats))
        return [shaped_as(tensor, mean) for mean, (_, tensor) in zip(means, named, strict=True)]

    def _to_all(self, flats: NamedTensors) -> dict[int, list[Message]]:
        """The messages of all islands, for each tensor."""
        mine = [self.sender.send(name, flat) for name, flat in flats]
        return self._swap(dict.fromkeys(self.across.others(), mine)) | {self.across.mine: mine}

    def _in_parts(self, flats: NamedTensors) -> list[Tensor]:
        """Each island sums its part of each tensor, and sends the sum as it has received the addends."""
        count, mine = self.across.count, self.across.mine
        pieces = [_part(flats, owner, count) for owner in range(count)]
        coded = [[self.sender.send(name, piece) for name, piece in part] for part in pieces]
        arrived = self._swap({peer: coded[peer] for peer in self.across.others()}) | {mine: coded[mine]}
        sums = self._mean(pieces[mine], arrived)
        again = [self.again.send(name, mean) for (name, _), mean in zip(flats, sums, strict=True)]
        whole = self._swap(dict.fromkeys(self.across.others(), again)) | {mine: again}
        decoded = [self._decoded(whole[owner], pieces[owner]) for owner in range(count)]
        return [torch.cat(parts) for parts in zip(*decoded, strict=True)]

    def _decoded(self, messages: Sequence[Message], like: NamedTensors) -> list[Tensor]:
        return [self.wire.decoded(item, tensor) for item, (_, tensor) in zip(messages, like, strict=True)]

    def _swap(self, messages: Mapping[int, list[Message]]) -> dict[int, list[Message]]:
        """Swap messages of several tensors, each of one or more tensors, as one."""
        packed = {peer: _packed(items) for peer, items in messages.items()}
        return {peer: _unpacked(message) for peer, message in self.across.swap(packed, self._mark).items()}

    def _mean(self, flats: NamedTensors, messages: Mapping[int, list[Message]]) -> list[Tensor]:
        """What messages stand for, summed in the order of islands, so that all have the same sum."""
        totals = [torch.zeros_like(flat) for _, flat in flats]
        for island in range(self.across.count):
            for total, message in zip(totals, messages[island], strict=True):
                total += self.wire.decoded(message, total)
        return [total.div_(self.across.count) for total in totals]

    def state_dict(self) -> dict[str, Any]:
        """What was dropped so far."""
        return {"sender": dict(self.sender.residuals), "again": dict(self.again.residuals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was dropped."""
        self.sender.residuals, self.again.residuals = dict(state["sender"]), dict(state["again"])


def _code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise InputError(
            where="a message between islands",
            found=str(dtype),
            wanted=f"one of {', '.join(map(str, _DTYPES))}",
            remedy="keep the buffer or parameter in one of these",
        )
    return _DTYPES.index(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _part(flats: NamedTensors, owner: int, count: int) -> NamedTensors:
    """The part of each flat tensor that one of `count` islands sums."""
    return [(f"{name}/{owner}", flat.tensor_split(count)[owner]) for name, flat in flats]


def _packed(messages: Sequence[Message]) -> Message:
    """One message of the tensors' messages, which may be of one or more tensors."""
    return (torch.tensor([len(item) for item in messages]), *(part for item in messages for part in item))


def _unpacked(message: Message) -> list[Message]:
    """The tensors' messages of one message."""
    lengths, rest = message[0].tolist(), iter(message[1:])
    return [tuple(next(rest) for _ in range(length)) for length in lengths]
