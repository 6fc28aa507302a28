"""Doors: a port of each rank, at which the others find whether it is there, and leave word of what they know.

A system answers at a port while the process that has opened it lives, whatever that process does or waits for, refuses
once it is dead, and keeps what was said there until the process looks. Doors therefore need no thread, and no time in a
step: they are opened once, and knocked at where a collective has failed.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

PATIENCE = 1.0
"""Seconds that a machine has to answer at a door."""
AT_ONCE = 200
"""Doors that are knocked at together: a process may have 1,024 files open."""
BACKLOG = 4096
"""Words that wait for a process to look, at the most."""
LETTER = 2**16
"""Bytes of one word, at the most."""
_OPEN: WeakSet[Doors] = WeakSet()


@dataclass(frozen=True)
class Address:
    """Where a rank's door is, as the others know it."""

    host: str
    port: int
    machine: str
    key: str

    @property
    def reachable(self) -> bool:
        """Whether it can be asked from here: a machine's address for itself leads others to themselves."""
        return self.port > 0 and (self.machine == _machine() or not self.host.startswith(("127.", "::1")))


class Doors:
    """This rank's door, and the addresses of the others'. Where none can be opened, nobody is known to be there."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._others: dict[int, Address] = {}
        self._known: set[str] = set()
        self._socket: socket.socket | None = None
        host, port = "", 0
        with suppress(OSError):
            family, host = _own_host()
            self._socket = socket.socket(family)
            finalize(self, self._socket.close)
            self._socket.bind((host, 0))
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
            port = self._socket.getsockname()[1]
        self.own = Address(host, port, _machine(), secrets.token_hex(8))
        _OPEN.add(self)

    def meet(self, every: Sequence[Address]) -> None:
        """Hear of the doors of all ranks, in their order."""
        self._others = {rank: address for rank, address in enumerate(every) if rank != self.rank}
        self._known = {address.key for address in self._others.values()}

    def knock(self, word: Mapping[str, Any] | None = None) -> dict[int, bool | None]:
        """Which of the others are there: True, or False where its process is dead; None: nothing is known.

        Those that are there get the word.
        """
        letter = b"" if word is None else json.dumps({**word, "key": self.own.key, "from": self.rank}).encode()
        found: dict[int, bool | None] = dict.fromkeys(self._others)
        asked = [rank for rank, address in self._others.items() if address.reachable]
        for first in range(0, len(asked), AT_ONCE):
            found |= self._knock(asked[first : first + AT_ONCE], letter[:LETTER])
        return found

    def _knock(self, ranks: Sequence[int], letter: bytes) -> dict[int, bool | None]:
        found: dict[int, bool | None] = {}
        with selectors.DefaultSelector() as waiting, ExitStack() as opened:
            for rank in ranks:
                address = self._others[rank]
                with suppress(OSError):
                    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
                    door = opened.enter_context(socket.socket(family))
                    door.setblocking(False)
                    code = door.connect_ex((address.host, address.port))
                    if code in (0, errno.EINPROGRESS):
                        waiting.register(door, selectors.EVENT_WRITE, rank)
                    else:
                        found[rank] = _there(code)
            end = time.monotonic() + PATIENCE
            while waiting.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    door = key.fileobj  # type: ignore[assignment]
                    waiting.unregister(door)
                    found[key.data] = _there(door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                    if letter and found[key.data]:
                        with suppress(OSError):  # it died since
                            door.send(letter)
        return found

    def heard(self) -> list[dict[str, Any]]:
        """The words that others have left at this door since the last look."""
        found: list[dict[str, Any]] = []
        with suppress(OSError):  # nobody waits any more
            while self._socket is not None:
                with self._socket.accept()[0] as caller:
                    word = _word(caller)
                    if word is not None and str(word.get("key")) in self._known:
                        found.append(word)
        return found

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _there(code: int) -> bool | None:
    return True if code == 0 else False if code == errno.ECONNREFUSED else None


def _word(caller: socket.socket) -> dict[str, Any] | None:
    caller.settimeout(PATIENCE)
    letter = b""
    with suppress(OSError):
        while len(letter) < LETTER and (more := caller.recv(LETTER)):
            letter += more
    try:
        word = json.loads(letter)
    except (ValueError, RecursionError):
        return None
    return word if isinstance(word, dict) else None


def _own_host() -> tuple[socket.AddressFamily, str]:
    """The address of this machine on the way to where the ranks meet; nothing is sent to find it."""
    meeting = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, place = socket.getaddrinfo(meeting, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(place)
        return family, str(way.getsockname()[0])


def _machine() -> str:
    """A name that no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _left_behind() -> None:
    """In a forked process: the doors are its parent's, and would outlive it here."""
    for doors in list(_OPEN):
        doors.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left_behind)
