"""The other processes of a sharded model: actors in the placement group of the one that starts them."""

from __future__ import annotations

import socket
from typing import Any

import ray
from engine import Engine
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(concurrency_groups={"health": 1})  # so that a rank that is at work still answers `ping`
class Follower(Engine):
    """A rank that generates what rank 0 generates."""

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Say that this process lives."""


def start_followers(folder: str, dtype: str, device: str, size: int) -> tuple[list[Any], str, int]:
    """Start all ranks but rank 0, which calls this. Returned is also where rank 0 has to listen for them."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    group = ray.util.get_current_placement_group()
    own = ray.get_runtime_context().get_assigned_resources()  # those of rank 0 are those of each
    followers = [
        Follower.options(
            num_cpus=own["CPU"],
            resources={name: number for name, number in own.items() if name == "NPU"},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote(folder, dtype, device, rank, size, address, port)
        for rank in range(1, size)
    ]
    return followers, address, port
