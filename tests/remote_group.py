"""An env group in another process: it asks over a pipe, with arrays and ids only, and knows nothing of JAX."""

import sys
from multiprocessing.connection import Connection

from headrace.envs.registry import make_group
from headrace.inference.messages import Request


def drive(connection: Connection, num_slots: int) -> None:
    """Play CartPole with the actions that come back, until the process is killed."""
    group = make_group("CartPole-v1", num_slots, lambda slot, life: 100 + slot)
    while True:
        timestep, ids = group.recv(10.0)
        assert "jax" not in sys.modules
        connection.send(Request(timestep, ids, group.run_ids()[ids]))
        if not connection.poll(60.0):
            raise TimeoutError("no answer came over the pipe within 60 s")
        group.send(connection.recv(), ids)
