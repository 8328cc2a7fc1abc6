"""Plans: pure arithmetic of roles, bundles and devices."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.cli.plan_report import plan_rows
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.algorithm_section import RewardModelSection
from asyncrl_cli.profile.schema import AlgorithmSection, ModelSection, Profile, TrainerSection

from .crew import nodes, small_profile

LAPTOP = nodes((2, 0), elastic_cpus=True)


def job(cluster: Any = LAPTOP, *, workers: int | None = None, **placement: Any) -> JobPlan:
    return compile_job(profile(workers=workers, **placement), cluster)


@pytest.mark.parametrize(
    ("dtype", "has_instructions", "warns"),
    [
        ("bfloat16", False, True),
        ("bfloat16", True, False),
        ("bfloat16", None, False),
        ("float32", False, False),
    ],
)
def test_bfloat16_on_a_cpu_that_would_emulate_it_is_warned_of(dtype, has_instructions, warns):
    asked = small_profile().model_copy(update={"model": ModelSection.model_validate({"dtype": dtype})})
    plan = compile_job(asked, replace(LAPTOP, cpu_bfloat16=has_instructions))
    assert [("emulates" in warning) for warning in plan.warnings] == ([True] if warns else [])


@pytest.mark.parametrize("cluster", [LAPTOP, nodes((16, 8))], ids=["cpu", "cuda"])
def test_moments_that_are_on_the_host_already_are_not_moved_there(cluster):
    asked = small_profile().model_copy(update={"trainer": TrainerSection(offload_optimizer=True)})
    warnings = compile_job(asked, cluster).warnings
    assert ["offload_optimizer changes nothing" in warning for warning in warnings] == [True] * (
        cluster is LAPTOP
    )


def test_ranks_that_cannot_be_divided_into_sequence_groups_are_refused():
    asked = profile(trainer_workers=6).model_copy(
        update={"trainer": TrainerSection(sequence_parallel_size=4)}
    )
    with pytest.raises(ConfigError) as refused:
        compile_job(asked, nodes((16, 8)))
    assert "trainer.sequence_parallel_size = 4 does not divide 6 trainer ranks" in str(refused.value)
    assert refused.value.hint == "--set trainer.sequence_parallel_size=2"


@pytest.mark.parametrize(
    ("slots", "workers", "says"),
    [
        (8, 1, "8 on 1 worker: 1 group of rollout.n = 8|mini_batch_size = 16|about 16 groups|slots=128 has"),
        (8, 2, "8 on 2 workers: 2 groups|about 8 groups|slots=64 has"),
        (16, 2, ""),
        (128, 1, ""),
        (192, 1, ""),
        (10000, 1, "at most 24 groups of rollout.n = 8, 192 responses|9808 slots|slots=192)"),
        (10000, 4, "10000 on 4 workers|39808 slots|slots=48)"),
    ],
)
def test_slots_for_too_few_groups_or_for_more_than_are_ever_under_way_are_warned_of(slots, workers, says):
    """B = W = 16 and eta = 0.5: 24 groups of 8 are admitted."""
    asked = Profile.model_validate(
        {
            "run": {"train_steps": 5},
            "rollout": {"slots": slots, "n": 8, "workers": workers},
            "trainer": {"ppo_mini_batch_size": 16},
            "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 1},
        }
    )
    warnings = [
        warning for warning in compile_job(asked, nodes((16, 0))).warnings if "rollout.slots" in warning
    ]
    assert len(warnings) == bool(says)
    assert all(said in warnings[0] for said in says.split("|") if says)


def profile(*, workers: int | None = None, **placement: Any) -> Profile:
    return small_profile(placement=placement, rollout={"workers": workers})


def shape(plan: JobPlan) -> dict[str, tuple[int, float, int, int]]:
    return {
        role.role: (role.workers, role.gpus_per_worker, role.cpus_per_worker, role.threads)
        for role in plan.roles
    }


def test_a_laptop_gets_one_rank_and_one_worker_with_one_core_each():
    plan = job()
    assert (plan.device, plan.cpus, plan.gpus) == ("cpu", 2, 0)
    assert shape(plan) == {"trainer": (1, 0, 1, 1), "rollout": (1, 0, 1, 1)}
    assert list(plan.groups) == ["trainer", "rollout"]
    assert plan.warnings == ()


def test_colocated_sides_have_a_rank_and_a_worker_on_every_core_that_they_would_use_apart():
    plan = job(colocate=True)
    assert [(name, len(bundles)) for name, bundles in plan.groups.items()] == [("colocated", 2)]
    assert shape(plan) == {"trainer": (2, 0, 1, 1), "rollout": (2, 0, 0, 1)}
    assert {(role.placement_group, role.workers) for role in plan.roles} == {("colocated", 2)}
    assert plan.cpus == job().cpus


def test_a_local_session_may_ask_for_more_cpus_than_cores_and_is_warned():
    plan = job(workers=2)
    assert plan.cpus == 3
    assert plan.warnings == (
        "the job asks for 3 CPUs on 2 cores and starts all the same; 3 threads on 2 cores slow each "
        "other down: ask for fewer workers",
    )


def test_gpus_are_shared_by_ratio_in_whole_rollout_workers():
    plan = job(nodes((16, 8)), ratio="1:3", gpus_per_rollout_worker=2)
    assert plan.device == "cuda"
    assert shape(plan) == {"trainer": (2, 1, 1, 1), "rollout": (3, 2, 1, 1)}
    assert plan.gpus == 8


@pytest.mark.parametrize(
    ("asked", "trainer", "rollout"),
    [
        ({"trainer_workers": 2}, 2, 6),
        ({"workers": 5}, 3, 5),
        ({"trainer_workers": 1, "workers": 2}, 1, 2),
        ({"gpus": 4}, 2, 2),
    ],
)
def test_explicit_counts_win_and_the_other_side_gets_the_rest(asked, trainer, rollout):
    plan = job(nodes((16, 8)), **asked)
    assert (plan.role("trainer").workers, plan.role("rollout").workers) == (trainer, rollout)


THREE = (("train", "prox"), ("ref",), ("rollout",))


def kl_job(cluster: Any, **placement: Any) -> JobPlan:
    asked = profile(tasks=THREE, **placement)
    return compile_job(asked.model_copy(update={"algorithm": AlgorithmSection(use_kl_loss=True)}), cluster)


def test_a_reference_with_resources_of_its_own_gets_its_share():
    assert shape(kl_job(nodes((64, 16)), ratios=(2, 1, 1))) == {
        "trainer": (8, 1, 1, 1),
        "ref": (4, 1, 1, 1),
        "rollout": (4, 1, 1, 1),
    }
    plan = kl_job(nodes((64, 16)), ratios=(1, 1, 2), gpus_per_rollout_worker=2, gpus=8)
    assert (plan.trainer_workers, plan.scorers, plan.rollout_workers) == (2, {"ref": 2}, 2)
    assert (plan.gpus, plan.cpus) == (8, 6)
    assert [(name, len(bundles)) for name, bundles in plan.groups.items()] == [
        ("trainer", 2),
        ("ref", 2),
        ("rollout", 2),
    ]
    here = kl_job(LAPTOP)
    assert (here.trainer_workers, here.scorers, here.rollout_workers, here.cpus) == (1, {"ref": 1}, 1, 3)
    assert kl_job(LAPTOP, ratios=(2, 1, 3)).cpus == 6


def test_a_reward_model_has_processes_of_its_own_wherever_it_is_named():
    judged = {"reward_model": RewardModelSection(path="judge")}
    assert compile_job(profile().model_copy(update=judged), LAPTOP).scorers == {"reward": 1}
    named = profile(tasks=(("train",), ("reward",), ("rollout",)), ratios=(2, 1, 1)).model_copy(update=judged)
    assert compile_job(named, nodes((64, 8))).groups.keys() == {"trainer", "reward", "rollout"}
    with pytest.raises(ConfigError, match="nothing says how many GPUs reward gets") as refused:
        compile_job(profile().model_copy(update=judged), nodes((64, 8)))
    assert '[["train"],["reward"],["rollout"]]' in refused.value.hint


@pytest.mark.parametrize(
    ("placement", "numbers"), [({}, ["no"]), ({"ratios": (1, 1, 1)}, ["[1, 1, 1]", "16 GPUs"])]
)
def test_shares_that_come_to_no_whole_gpus_are_refused(placement, numbers):
    with pytest.raises(ConfigError) as refused:
        kl_job(nodes((64, 16)), **placement)
    assert all(number in str(refused.value) for number in numbers)
    assert "--set placement." in refused.value.hint


def test_a_colocated_rank_has_more_than_half_of_its_gpu_and_the_worker_the_rest():
    plan = job(nodes((16, 4)), colocate=True)
    assert shape(plan) == {"trainer": (4, 0.6, 1, 2), "rollout": (4, 0.4, 1, 2)}
    assert {(role.placement_group, role.workers) for role in plan.roles} == {("colocated", 4)}


@pytest.mark.parametrize("gpus", [0, 4])
def test_lent_workers_are_beside_the_ranks_and_reserve_nothing_more_than_cores_on_gpus(gpus):
    plan, plain = job(nodes((16, gpus)), lend=True), job(nodes((16, gpus)))
    rank = shape(plan)["trainer"]
    assert shape(plan)["lent"] == ((2, 0.4, 1, 2) if gpus else (1, 0, 0, 1))
    assert rank == ((2, 0.6, 1, 2) if gpus else (1, 0, 1, 1))
    assert shape(plan)["rollout"] == shape(plain)["rollout"]
    assert list(plan.groups) == ["trainer", "rollout"]
    assert (plan.gpus, plan.cpus) == (plain.gpus, plain.cpus + (2 if gpus else 0))
    beside = [
        plan.bundle_of(plan.role(role), index) for index in range(rank[0]) for role in ("trainer", "lent")
    ]
    assert beside == [index for index in range(rank[0]) for _ in range(2)]


def test_colocated_places_on_cpus_have_as_many_threads_as_cores():
    plan = job(nodes((12, 0)), colocate=True, workers=2, cpus_per_worker=4)
    assert shape(plan) == {"trainer": (3, 0, 4, 4), "rollout": (3, 0, 0, 4)}
    assert [bundle.cpus for bundle in plan.bundles] == [4, 4, 4]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (1, 3)])
def test_on_cpus_the_same_keys_give_both_placements_the_same_cores(ranks, workers):
    apart = job(nodes((12, 0)), trainer_workers=ranks, workers=workers)
    assert job(nodes((12, 0)), colocate=True, trainer_workers=ranks, workers=workers).cpus == apart.cpus


@pytest.mark.parametrize(
    ("gpus", "asked", "numbers"),
    [
        (8, {"ratio": "1:2"}, ["1:2", "8 GPUs"]),
        (8, {"gpus_per_rollout_worker": 3}, ["8 GPUs", "3 per rollout worker"]),
        (8, {"trainer_workers": 3, "gpus_per_rollout_worker": 2}, ["5 of 8 GPUs", "2 each"]),
        (8, {"gpus": 4, "trainer_workers": 4, "workers": 4}, ["placement.gpus = 4", "8"]),
        (8, {"colocate": True, "trainer_workers": 4, "workers": 2}, ["trainer_workers = 4", "workers = 2"]),
        (8, {"colocate": True, "gpus_per_rollout_worker": 2}, ["gpus_per_rollout_worker = 2"]),
        (1, {}, ["1 GPU"]),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_with_the_numbers(gpus, asked, numbers):
    with pytest.raises(ConfigError) as refused:
        job(nodes((16, gpus)), **asked)
    assert all(number in str(refused.value) for number in numbers), str(refused.value)
    assert "--set" in refused.value.hint


TOO_MUCH = [
    (LAPTOP, {"gpus": 8}),
    (LAPTOP, {"device": "cuda"}),
    (nodes((16, 8)), {"gpus": 16}),
    (nodes((16, 8)), {"trainer_workers": 4, "workers": 8}),
    (nodes((16, 8)), {"trainer_workers": 8}),
    (nodes((4, 0)), {"cpus_per_worker": 4}),
    (nodes((4, 0)), {"trainer_workers": 2, "workers": 6}),
    (nodes((8, 4), (8, 4)), {"trainer_workers": 4, "workers": 1, "gpus_per_rollout_worker": 8}),
    (nodes((2, 4)), {}),
    (nodes((16, 8)), {"colocate": True, "gpus": 12}),
    (nodes((16, 8)), {"gpus": 12, "trainer_workers": 12}),
    (nodes((16, 6)), {"gpus": 8, "trainer_workers": 9, "workers": 3}),
    (nodes((16, 8)), {"gpus": 12, "workers": 12}),
]


@pytest.mark.parametrize(("cluster", "asked"), TOO_MUCH)
def test_too_little_hardware_is_a_preflight_error_and_its_hint_fits(cluster, asked):
    with pytest.raises(PreflightError) as refused:
        job(cluster, **asked)
    hinted = re.findall(r"--set (?:placement|rollout)\.(\w+)=(\w+)", refused.value.hint)
    assert hinted, refused.value.hint
    values = {key: int(value) if value.isdigit() else value for key, value in hinted}
    compile_job(profile(**(asked | values)), cluster)


def test_the_hint_of_shares_that_do_not_divide_fits_the_cluster():
    with pytest.raises(ConfigError) as refused:
        job(nodes((16, 4)), gpus=7)
    assert refused.value.hint == "--set placement.gpus=4"


@pytest.mark.parametrize(
    ("num_nodes", "hint"),
    [(1, "rollout.nnodes=1 --set rollout.n_gpus_per_node=7"), (2, "rollout.n_gpus_per_node=7")],
)
def test_the_hint_of_a_shape_fits_the_nodes_that_are_there(num_nodes, hint):
    shaped = profile().model_copy(
        update={"rollout": profile().rollout.model_copy(update={"nnodes": 2, "n_gpus_per_node": 8})}
    )
    with pytest.raises(PreflightError) as refused:
        compile_job(shaped, nodes(*[(16, 8)] * num_nodes))
    assert refused.value.hint == f"--set {hint}"


def test_a_ratio_beside_counts_is_said_to_be_unused():
    (warning,) = job(nodes((16, 8)), ratio="3:1", trainer_workers=4).warnings
    assert warning == 'placement.ratio = "3:1" is not used: placement.trainer_workers decides instead'


def test_the_message_says_what_was_asked_and_what_there_is():
    with pytest.raises(PreflightError) as refused:
        job(nodes((16, 8)), trainer_workers=4, workers=8)
    assert "4 trainer ranks and 8 rollout workers ask for 12 GPUs and 12 CPUs" in str(refused.value)
    assert "it has 8 GPUs and 16 CPUs on 1 node" in str(refused.value)
    assert refused.value.exit_code == 3


def test_gpus_that_a_cpu_job_cannot_use_are_said_and_not_counted():
    plan = job(nodes((16, 8)), device="cpu", gpus=8)
    assert plan.gpus == 0
    assert plan.warnings == ("placement.gpus = 8 is not used: the job runs on CPUs",)


def test_logical_gpus_are_counted_and_claimed_as_gpus_and_the_job_computes_on_cpus():
    asked = {"ratio": "1:3", "gpus_per_rollout_worker": 2, "gpus": 8}
    real, rehearsal = job(nodes((16, 8)), **asked), job(LAPTOP, device="cpu", gpu_bundles=True, **asked)
    assert rehearsal.groups == real.groups
    assert (real.device, rehearsal.device) == ("cuda", "cpu")
    assert rehearsal.warnings == (
        "the job asks for 5 CPUs on 2 cores and starts all the same; 5 threads on 2 cores slow each "
        "other down: ask for fewer workers",
    )
    with pytest.raises(PreflightError) as refused:
        job(nodes((16, 4)), device="cpu", gpu_bundles=True, **asked)
    assert "--set" in refused.value.hint
    with pytest.raises(PreflightError, match="how many logical GPUs") as refused:
        job(LAPTOP, device="cpu", gpu_bundles=True)
    assert refused.value.hint == "--set placement.gpus=8"


def test_a_model_is_shared_by_all_gpus_of_a_worker_and_on_cpus_by_as_many_processes_as_are_asked_for():
    def shared_by(processes: int, gpus: int, **placement: Any) -> JobPlan:
        rollout = {"engine": "vllm", "tensor_parallel_size": processes}
        return compile_job(small_profile(placement=placement, rollout=rollout), nodes((16, gpus)))

    assert shared_by(2, 0).device == "cpu"
    assert shared_by(2, 4, gpus_per_rollout_worker=2).device == "cuda"
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size = 4, but placement.gpus_per_rollout_worker = 2"
    ) as refused:
        shared_by(4, 8, gpus_per_rollout_worker=2)
    assert refused.value.hint.startswith("--set placement.gpus_per_rollout_worker=4")


def test_the_bundles_of_a_role_are_ranges():
    rows = plan_rows(job(cluster=nodes((200, 64), (200, 64))))
    assert [row["bundles"] for row in rows] == ["0-63", "0-63"]


def test_rows_are_plain_values_one_per_role():
    rows = plan_rows(job())
    assert [row["role"] for row in rows] == ["trainer", "rollout"]
    assert all(isinstance(value, str | int | float) for row in rows for value in row.values())
