"""Central inference: the server answers as the actors themselves would, in batches, and nobody waits for a lost group."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from helpers import collect, make_async, parts_of, tiny
from remote_group import drive
from test_inference import CASES, answers, histories, inference_of, message

from headrace.errors import HeadraceError, WaitTimeoutError
from headrace.inference import central
from headrace.inference.actor import Published
from headrace.inference.bank import SlotBank
from headrace.inference.batcher import Limits
from headrace.inference.central import InferenceServer
from headrace.inference.messages import Request
from headrace.runtime.parts import blank_row
from headrace.runtime.serving import Serving
from headrace.seeds import Role

N = 6
"""Slots of every server here, so that few programs are compiled."""


@pytest.fixture(scope="module")
def lstm_parts():
    return parts_of(tiny(agent__network__core="lstm", agent__network__frame_stack=2))


def server_of(parts, limits=None, own_thread=False, published=None):
    bank = SlotBank(parts.agent, parts.spec, N, published or parts.newest, 0, Role.TRAIN_ACTION)
    blank = blank_row(parts.agent, parts.spec).timestep
    return InferenceServer(bank, blank, limits or Limits(1, N, 0.01), own_thread)


@contextmanager
def served(server):
    """On a thread of its own; an error of it is an error here."""
    errors = []
    serving = Serving(server, lambda: False, errors.append)
    serving.start()
    try:
        yield
    finally:
        serving.stop()
        assert not any(t.name == "inference" for t in threading.enumerate())
    assert not errors, errors


def ask(group, timestep, ids, lives=None):
    ids = np.asarray(ids, np.int32)
    return group.submit(Request(timestep, ids, np.zeros(len(ids), np.int64) if lives is None else lives))


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.action, expected.action)


def rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.mark.parametrize("limits", [(1, 6), (4, 6), (2, 3)])
def test_the_server_answers_as_the_actors_would(lstm_parts, limits):
    """Groups of one, two and three slots, which ask in any order for any of their slots; some begin new lives."""
    rng = np.random.default_rng(0)
    whole = inference_of(lstm_parts, N)
    server = server_of(lstm_parts, Limits(*limits, 0.01))
    groups = [(0, server.group(0, 1)), (1, server.group(1, 2)), (3, server.group(3, 3))]
    lives, requests = np.zeros(6, np.int64), 0
    for turn in range(12):
        timestep = message(rng, range(6), first=turn in (0, 5))
        lives += rng.random(6) < 0.2
        expected = answers(whole, timestep, range(6), lives)
        asked = []
        for number in rng.permutation(3):
            first, group = groups[number]
            ids = rng.permutation(number + 1)
            cuts = [ids[:1], ids[1:]] if number and rng.random() < 0.5 else [ids]
            for local in cuts:
                at = local + first
                asked.append((at, group, ask(group, rows(timestep, at), local, lives[at])))
        requests += len(asked)
        for at, group, ticket in asked:
            assert_same(group.answer(ticket, True), rows(expected, at))
            assert ticket.version.tolist() == [0] * len(at) and ticket.version.dtype == np.int32
    tally = server.take_tally()
    assert (tally.rows, tally.requests) == (72, requests) and tally.rows_max <= limits[1]
    assert tally.batches == tally.by_minimum + tally.by_maximum + tally.by_deadline
    assert server.take_tally().batches == 0


def test_threads_that_ask_at_once_each_get_their_own_answer(lstm_parts):
    server = server_of(lstm_parts, Limits(3, 4, 0.002), own_thread=True)
    twin, failures = inference_of(lstm_parts, N), []
    turns = 40
    rng = np.random.default_rng(0)
    messages = [message(rng, range(6), first=turn % 9 == 0) for turn in range(turns)]
    expected = [answers(twin, m, range(6)) for m in messages]

    def client(number):
        mine, group = slice(2 * number, 2 * number + 2), server.group(2 * number, 2)
        own = np.random.default_rng(number)
        try:
            for m, e in zip(messages, expected, strict=True):
                for local in ([0, 1],) if own.random() < 0.5 else ([1], [0]):
                    at = np.arange(6)[mine][local]
                    got = group.answer(ask(group, rows(m, at), local), True)
                    assert_same(got, rows(e, at))
        except BaseException as error:
            failures.append(error)

    with served(server):
        threads = [threading.Thread(target=client, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures, failures[0]
    tally = server.take_tally()
    assert tally.rows == 6 * turns and tally.rows_max <= 4
    assert tally.by_minimum + tally.by_deadline + tally.by_maximum == tally.batches


def test_nothing_is_compiled_after_the_warm_up(lstm_parts):
    """Counted by the server, and by JAX itself: whatever it traces in this process."""
    traced = []

    def listen(event, _, **__):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(event)

    rng, parts = np.random.default_rng(0), lstm_parts
    newest = [parts.newest.value]
    server = server_of(parts, Limits(6, 6, 1.0), published=lambda: newest[0])
    group = server.group(0, 6)
    before = group.get_state()
    server.warm_up()
    jax.tree.map(np.testing.assert_array_equal, group.get_state(), before)
    assert server.compilations == 4 + 2  # batches of 1, 2, 4 and 6; renewal; a group's slots
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for turn in range(12):
            size = turn % 6 + 1
            ids = rng.permutation(6)[:size]
            lives = np.full(size, turn // 6, np.int64)
            group.answer(ask(group, message(rng, ids), ids, lives), True)
        newest[0] = parts.learner.publish()
        group.answer(ask(group, message(rng, range(6)), range(6), np.ones(6, np.int64)), True)
        group.get_state()
        server.warm_up()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert server.compilations == 6 and not traced


def test_parts_of_a_split_request_name_their_own_versions(lstm_parts):
    """Each batch is answered with the newest params at that moment: of five rows, two, two and one."""
    version = iter(range(10, 99))

    def published():
        return lstm_parts.newest.value._replace(version=next(version))

    server = server_of(lstm_parts, Limits(2, 2, 1.0), published=published)
    group, twin = server.group(0, 5), inference_of(lstm_parts, N)
    timestep = message(np.random.default_rng(0), range(5), first=True)
    ticket = ask(group, timestep, range(5))
    assert not ticket.done.is_set()  # its last row is less than the minimum
    assert_same(group.answer(ticket, True), answers(twin, timestep, range(5)))
    assert ticket.version.tolist() == [10, 10, 11, 11, 12]
    tally = server.take_tally()
    assert (tally.by_maximum, tally.by_deadline, tally.requests, tally.padding) == (2, 1, 1, 0)


def test_answers_use_the_params_that_are_newest_when_the_batch_goes_out(lstm_parts):
    old = lstm_parts.newest.value
    changed = Published(jax.tree.map(lambda x: x * 2 + 0.1, old.params), 17, old.progress)
    newest = [old]
    server = server_of(lstm_parts, Limits(4, 4, 1.0), published=lambda: newest[0])
    group, timestep = server.group(0, 2), message(np.random.default_rng(0), range(2), first=True)
    before = answers(inference_of(lstm_parts, N), timestep, range(2))
    ticket = ask(group, timestep, range(2))
    newest[0] = changed
    answer = group.answer(ticket, False)
    assert ticket.version.tolist() == [17, 17] and np.abs(answer.extras - before.extras).max() > 1e-3


def test_a_silent_group_delays_nobody_beyond_the_deadline(lstm_parts):
    deadline_s = 0.05
    server = server_of(lstm_parts, Limits(4, 4, deadline_s), own_thread=True)
    group, silent, rng = server.group(0, 2), server.group(2, 2), np.random.default_rng(0)
    server.warm_up()
    with served(server):
        for _ in range(5):
            group.answer(ask(group, message(rng, range(2)), range(2)), False)
        tally = server.take_tally()
        assert (tally.by_deadline, tally.rows, tally.rows_max) == (5, 10, 2)
        assert deadline_s <= tally.wait_s / 5 <= tally.wait_max_s < deadline_s + 5
        both = [ask(g, message(rng, range(2)), range(2)) for g in (group, silent)]
        for g, ticket in zip((group, silent), both, strict=True):
            g.answer(ticket, False)
        assert server.take_tally().by_deadline == 0  # together they are enough


def test_h13_a_killed_process_delays_nobody_beyond_the_deadline(lstm_parts):
    """The boundary of the seam is a process: a group there asks over a pipe, its process is killed between two steps."""
    deadline_s = 0.05
    server = server_of(lstm_parts, Limits(4, 4, deadline_s), own_thread=True)
    remote, local, twin = server.group(0, 2), server.group(2, 2), inference_of(lstm_parts, N)
    server.warm_up()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=drive, args=(there, 2), daemon=True)
    process.start()
    there.close()
    came: list[tuple[Request, jax.Array]] = []

    def relay():
        """Stands for whatever would carry messages between machines."""
        try:
            while True:
                request = here.recv()
                answer = remote.answer(remote.submit(request), False)
                came.append((request, answer.action))
                here.send(lstm_parts.agent.to_env(answer.action))
        except (EOFError, OSError):
            here.close()

    carrier, rng = threading.Thread(target=relay), np.random.default_rng(0)
    try:
        with served(server):
            carrier.start()
            limit = time.monotonic() + 60
            while len(came) < 25:
                assert time.monotonic() < limit and process.is_alive(), process.exitcode
                local.answer(ask(local, message(rng, range(2)), range(2)), False)
            together = server.take_tally()
            os.kill(process.pid, signal.SIGKILL)
            carrier.join(30)
            assert not carrier.is_alive()
            server.take_tally()
            for _ in range(5):
                local.answer(ask(local, message(rng, range(2)), range(2)), False)
            alone = server.take_tally()
    finally:
        process.kill()
        process.join(30)
        process.close()
    assert together.by_maximum > 5 and together.rows_max == 4
    assert (alone.batches, alone.by_deadline) == (5, 5)
    assert deadline_s <= alone.wait_s / 5 <= alone.wait_max_s < deadline_s + 5
    for request, action in came:
        expected = twin.answer(twin.submit(request), False)
        np.testing.assert_array_equal(action, expected.action)


def test_what_cannot_be_answered_is_refused_to_whoever_asks(lstm_parts):
    server, rng = server_of(lstm_parts, Limits(4, 4, 1.0)), np.random.default_rng(0)
    group, good = server.group(2, 2), message(np.random.default_rng(0), range(2))
    wide = good._replace(observation=good.observation.astype(np.float64))
    with pytest.raises(ValueError, match=r"2 slots has leaves .*float64.*; expected .*\(2, 4\), 'float32'"):
        ask(group, wide, range(2))
    with pytest.raises(ValueError, match="expected"):
        ask(group, message(rng, range(3)), range(2))
    ticket = ask(group, good, range(2))
    with pytest.raises(ValueError, match=r"slots \[3\] ask again"):
        ask(group, rows(good, [1]), [1])
    assert len(group.answer(ticket, False).action) == 2
    with pytest.raises(HeadraceError, match=r"slots \[2, 3\] never asked"):
        group.answer(central.Ticket(ticket.request, ticket.slot_ids), False)


def test_waits_for_a_server_end_with_an_error(lstm_parts, monkeypatch):
    monkeypatch.setattr(central, "ANSWER_S", 0.3)
    monkeypatch.setattr(central, "POLL_S", 0.05)
    server = server_of(lstm_parts, Limits(1, 2, 0.1), own_thread=True)
    group, timestep = server.group(0, 2), message(np.random.default_rng(0), range(2))
    ticket = ask(group, timestep, range(2))
    with pytest.raises(
        WaitTimeoutError, match=r"waited 0.4 s .* slots \[0, 1\]; nobody serves, though 2 rows"
    ):
        group.answer(ticket, False)
    server.close()
    with pytest.raises(HeadraceError, match="has ended"):
        group.answer(ticket, False)
    assert not server.serve(10.0)


def test_grouping_placement_and_order_change_no_slot():
    options = {"env__max_episode_steps": 6, "experience__max_lag": 30, "agent__batch_size": 1}
    options |= CASES["stack longer than a trajectory"]
    lockstep = parts_of(tiny(**options))
    rows_there, policies = histories(collect(lockstep, 40))
    options |= {"inference__placement": "central", "inference__min_batch": 3, "inference__max_batch": 3}
    for asynchronous in (False, True):
        config = tiny(**options)
        parts = parts_of(config)
        if asynchronous:
            make_async(config, parts)
        assert parts.server is not None and parts.server.compilations == 0
        rows_here, policies_here = histories(collect(parts, 60))
        tally = parts.server.take_tally()
        assert tally.rows_max == 3 and tally.by_maximum > 30  # of rows of both groups
        for slot in range(4):
            n = min(len(rows_there[slot]), len(rows_here[slot]))
            assert n >= 5
            for a, b in zip(rows_there[slot][:n], rows_here[slot][:n], strict=True):
                assert a[0] == b[0]
                np.testing.assert_allclose(a[1], b[1], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(a[2], b[2], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(policies[slot][:n], policies_here[slot][:n], rtol=1e-4, atol=1e-5)


def test_state_has_one_format_in_both_placements(lstm_parts):
    """Slots 2 to 4 of five, from an actor to the server and back."""
    rng = np.random.default_rng(0)
    actor, server = inference_of(lstm_parts, N), server_of(lstm_parts)
    first, second = server.group(0, 2), server.group(2, 3)
    for _ in range(3):
        answers(actor, message(rng, range(5)), range(5), [0, 2, 1, 0, 4])
    state = actor.get_state()

    def part(lo, hi):
        return {"slots": [x[lo:hi] for x in state["slots"]], "lives": state["lives"][lo:hi]}

    first.set_state(part(0, 2))
    second.set_state(part(2, 5))
    for group, (lo, hi) in ((first, (0, 2)), (second, (2, 5))):
        jax.tree.map(np.testing.assert_array_equal, group.get_state(), part(lo, hi))
    for _ in range(3):
        timestep = message(rng, range(5))
        expected = answers(actor, timestep, range(5), [0, 2, 1, 0, 4])
        lives = np.array([1, 0, 4])
        assert_same(
            second.answer(ask(second, rows(timestep, slice(2, 5)), range(3), lives), True),
            rows(expected, slice(2, 5)),
        )
    np.testing.assert_array_equal(first.get_state()["lives"], [0, 2])
    jax.tree.map(np.testing.assert_array_equal, first.get_state(), part(0, 2))
