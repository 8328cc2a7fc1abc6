"""Two fake nodes, reached by address: how the roles are packed."""

import pytest

from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER
from tests.cluster import ray_nodes

from .crew import in_place, nodes, small_profile, witnesses


@pytest.mark.slow
def test_two_nodes_are_packed_role_by_role_and_reached_by_address():
    with ray_nodes((8, 4), (8, 4)) as cluster, ray_session(small_profile(), address=cluster.address) as plan:
        assert (plan.role(TRAINER).workers, plan.role(ROLLOUT).workers) == (4, 4)
        seen = in_place(witnesses, nodes((8, 4), (8, 4)))
    node_of = {name: {node for _, node in found} for name, found in seen.items()}
    assert len(node_of[TRAINER]) == len(node_of[ROLLOUT]) == 1
    assert node_of[TRAINER] != node_of[ROLLOUT]
    assert (
        sorted(gpus for gpus, _ in seen[TRAINER])
        == sorted(gpus for gpus, _ in seen[ROLLOUT])
        == ["0", "1", "2", "3"]
    )
