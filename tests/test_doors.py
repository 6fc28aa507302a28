"""Doors of ranks: who is there is told by its system, whatever the process does; words wait until they are read."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from forked import CONTEXT

from bilevel.distributed.doors import Address, Doors
from bilevel.distributed.lost import between_ranks


def stay(pipe: Connection, forks: bool) -> None:
    """A rank that opens its door and waits; with a process forked from it, as a loader of data has them."""
    doors = Doors(1)
    child = os.fork() if forks else 0
    if not forks or child:
        pipe.send((doors.own, child))
    time.sleep(120)


@contextmanager
def other(*, forks: bool = False) -> Iterator[tuple[Any, Doors, int]]:
    """A process with a door, this one's door, which knows of it, and what the other has forked."""
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=stay, args=(theirs, forks))
    process.start()
    doors = Doors(0)
    try:
        address, child = mine.recv()
        doors.meet([doors.own, address])
        yield process, doors, child
    finally:
        doors.close()
        process.kill()
        process.join()


def refused(doors: Doors) -> bool:
    """Whether the other is known to be dead before long."""
    end = time.monotonic() + 20
    while (answer := doors.knock()[1]) is not False and time.monotonic() < end:
        time.sleep(0.01)
    return answer is False


def test_a_door_answers_while_its_process_stands_still_and_refuses_once_it_is_dead():
    with other() as (process, doors, _):
        assert doors.knock() == {1: True}
        os.kill(process.pid, signal.SIGSTOP)
        assert doors.knock() == {1: True}
        os.kill(process.pid, signal.SIGKILL)
        assert refused(doors)


def test_a_door_is_not_held_open_by_a_process_that_was_forked():
    with other(forks=True) as (process, doors, child):
        assert doors.knock() == {1: True}
        process.kill()
        try:
            assert refused(doors)
            os.kill(child, 0)  # it is there
        finally:
            os.kill(child, signal.SIGKILL)


def say(own: Address, to: Address, pipe: Connection) -> None:
    doors = Doors(1)
    doors.own = own
    doors.meet([to, own])
    assert doors.knock({"found": "what it knew"}) == {0: True}
    pipe.send(None)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_word_waits_for_its_reader_and_outlives_the_rank_that_left_it():
    doors = Doors(0)
    known = Address("127.0.0.1", 1, doors.own.machine, "the key of rank 1")
    doors.meet([doors.own, known])
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=say, args=(known, doors.own, theirs))
    process.start()
    mine.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert doors.heard() == [{"found": "what it knew", "key": known.key, "from": 1}]
    assert doors.heard() == []
    doors.close()


def test_words_of_strangers_are_not_heard():
    doors = Doors(0)
    doors.meet([doors.own, replace(doors.own, key="that of rank 1")])
    known = json.dumps({"found": "x", "key": "y"}).encode()
    for letter in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]", b"\xff\xfe", b"[" * 30_000, known):
        with socket.create_connection((doors.own.host, doors.own.port)) as caller:
            caller.sendall(letter)
    assert doors.heard() == []
    doors.close()


def test_nothing_is_known_of_a_rank_whose_address_leads_back_here_or_that_has_no_door():
    doors = Doors(0)
    elsewhere = Address("127.0.0.1", doors.own.port, "another machine", "")
    doors.meet([doors.own, elsewhere, replace(doors.own, port=0)])
    assert doors.knock() == {1: None, 2: None}
    doors.close()


def test_errors_of_collectives_are_told_from_others():
    assert between_ranks(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not between_ranks(RuntimeError("cannot read igloo.png"))
