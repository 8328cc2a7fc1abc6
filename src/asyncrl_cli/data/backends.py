"""The stores by name (`data_plane.backend`): the driver's, and the other processes' ends of it."""

from __future__ import annotations

from asyncrl_cli.data.ray_store import RayStore
from asyncrl_cli.data.sample_fields import schema_of
from asyncrl_cli.data.store import Store
from asyncrl_cli.data.transferqueue_client import Address
from asyncrl_cli.profile.schema import Profile


def started_store(profile: Profile, run: str) -> Store:
    """In the driver, which closes it. May take minutes. Raises PreflightError if it cannot start."""
    plane, schema = profile.data_plane, schema_of(profile)
    if plane.backend == "transferqueue":
        from asyncrl_cli.data import transferqueue_store

        return transferqueue_store.start(run, plane, schema)
    return RayStore(schema, plane.timeout_s)


def store_at(profile: Profile, address: Address | None) -> Store:
    """Another process's end of the driver's store, which has this address. Connects at its first call."""
    plane, schema = profile.data_plane, schema_of(profile)
    if address is not None:
        from asyncrl_cli.data.transferqueue_store import TransferQueueStore

        return TransferQueueStore(address, schema, plane.timeout_s)
    return RayStore(schema, plane.timeout_s)
