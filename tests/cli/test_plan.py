"""`asyncrl plan`: memory in the table and in JSON, and what is said of `--tune`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.bench.recommendation import Tuned
from asyncrl_cli.bench.search import Row
from asyncrl_cli.bench.space import Setting
from asyncrl_cli.cli.app import run
from asyncrl_cli.cli.plan_tune import LEGEND, _against_others
from asyncrl_cli.plan import cluster, machine, memory_fit
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.simulate.workload import Reference
from asyncrl_cli.simulate.workload_files import Residual
from tests.llama import LLAMA_7B


def test_a_plan_estimates_the_memory_of_every_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "--profile", "partial-rollout"]) == 0
    out = capsys.readouterr().out
    # 0.75 M parameters: 4 bytes each of weights and gradients, 8 of AdamW's moments.
    assert "754,752 parameters" in out
    assert [size in out for size in ("2.9 MiB", "5.8 MiB")] == [True, True]
    assert "64 slots * 352 tokens" in out
    assert "fits" in out


def test_the_memory_of_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--gpus", "8", "--gpu-memory", "80", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    parameters = {
        item["role"]: item["num_bytes"]
        for item in memory["items"]
        if item["what"] in ("parameters", "weights")
    }
    # 4 ranks share the float32 weights; every worker has them whole, in bfloat16.
    assert parameters == {"trainer": 754752, "rollout": 2 * 754752}
    fits = {tuple(device["roles"]): device["fits"] for device in memory["devices"]}
    assert fits == {("trainer",): True, ("rollout",): True, ("4 trainer", "4 rollout"): None}


def test_gpus_without_known_memory_get_the_estimate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--gpus", "8", "--json"]) == 0
    assert {device["fits"] for device in json.loads(capsys.readouterr().out)["memory"]["devices"]} == {None}


def hinted(said: str) -> list[str]:
    """The arguments that an error's hint gives."""
    return shlex.split(said.partition("hint: ")[2])


def test_a_job_that_does_not_fit_is_refused_after_the_plan_with_sets_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = ["plan", "-p", "base", "--gpus", "2", "--gpu-memory", "0.2"]
    assert run(plan) == 3
    captured = capsys.readouterr()
    assert "trainer needs about" in captured.err
    assert "does not fit" in captured.out
    assert run([*plan, *hinted(captured.err)]) == 0
    assert "does not fit" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["rollout.engine=vllm", "rollout.max_response_tokens=8192"],
        ["rollout.max_response_tokens=16384", "rollout.slots=256"],
        ["placement.colocate=true", "rollout.engine=vllm", "rollout.max_response_tokens=8192"],
    ],
)
@pytest.mark.parametrize("gpu_gib", ["40", "80"])
def test_the_hint_of_a_plan_leads_to_one_that_fits_in_one_step(
    sets: list[str], gpu_gib: str, seven_billion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "-p", "base", "--gpus", "8", "--gpu-memory", gpu_gib]
    plan += [word for text in (seven_billion, "model.dtype=float32", *sets) for word in ("--set", text)]
    assert run(plan) == 3
    assert run([*plan, *hinted(capsys.readouterr().err)]) == 0


def test_without_settings_that_fit_the_hint_is_a_number_of_gpus_that_do(
    seven_billion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "-p", "base", "--set", seven_billion, "--gpu-memory", "24", "--gpus"]
    assert run([*plan, "2"]) == 3
    words = hinted(capsys.readouterr().err)
    gpus, more = words[words.index("--gpus") + 1], words[words.index("--gpus") + 2 :]
    assert run([*plan, gpus, *more]) == 0


QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
HEADS_7B = {"num_attention_heads": 28, "num_key_value_heads": 4}
NODES_7B = (
    "rollout.engine=vllm",
    "trainer.activation_checkpointing=full",
    "rollout.max_response_tokens=4096",
)


@pytest.fixture
def qwen_7b(tmp_path: Path) -> list[str]:
    """7,615,616,512 parameters: 14.2 GiB in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **QWEN_7B, **HEADS_7B}))
    return [
        "plan",
        "-p",
        "base",
        *(word for text in (f"model.path={tmp_path}", *NODES_7B) for word in ("--set", text)),
    ]


def node_needs_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    """GiB of host memory by what is on a node."""
    run([*arguments, "--json"])
    devices = json.loads(capsys.readouterr().out)["memory"]["devices"]
    return {
        " ".join(one["roles"]): round(one["num_bytes"] / 2**30, 1)
        for one in devices
        if one["device"] == "node"
    }


def test_a_nodes_host_memory_is_counted_with_all_that_its_processes_hold(
    qwen_7b: list[str], capsys: Any
) -> None:
    # Rank 0 has two versions, and so has the object store; a checkpoint's copy is 12 bytes per parameter;
    # each worker has a buffer of a version and 0.44 GiB of vLLM's own. Payloads in flight take 0.25 GiB.
    version, state, payloads, engine = 14.18, 85.1, 0.25, 0.44
    one = 4 * version + state + 4 * (version + engine) + payloads
    gpus = [*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]
    assert node_needs_of(capsys, *gpus) == {"4 trainer 4 rollout": pytest.approx(one, abs=0.2)}
    assert node_needs_of(capsys, *gpus, "--nodes", "2") == {
        "8 trainer": pytest.approx(4 * version + state + payloads, abs=0.2),
        "8 rollout": pytest.approx(2 * version + 8 * (version + engine) + payloads, abs=0.2),
    }
    less = 4 * version - 2 * version  # nothing through the store, no buffers
    direct = [*gpus, "--set", "weights.transport=nccl", "--set", "placement.device=cuda"]
    assert node_needs_of(capsys, *direct) == {
        "4 trainer 4 rollout": pytest.approx(less + state + 4 * engine + payloads, abs=0.2)
    }


def test_a_job_that_does_not_fit_its_nodes_host_memory_is_refused_with_sets_that_fit(
    qwen_7b: list[str], capsys: Any
) -> None:
    gpus = [*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]
    assert run([*gpus, "--node-memory", "256"]) == 0
    assert "of 256.0 GiB: fits" in capsys.readouterr().out.replace("\n", " ")
    assert run([*gpus, "--node-memory", "160"]) == 3
    said = capsys.readouterr()
    assert "4 trainer and 4 rollout need about" in said.err
    assert "of a node's 160.0 GiB" in said.err
    assert run([*gpus, "--node-memory", "160", *hinted(said.err)]) == 0


def test_where_no_settings_fit_the_hosts_more_nodes_are_the_hint(qwen_7b: list[str], capsys: Any) -> None:
    arguments = [*qwen_7b, "--gpu-memory", "80", "--node-memory", "64"]
    assert run([*arguments, "--gpus", "8"]) == 3
    words = hinted(capsys.readouterr().err)
    assert run([*arguments, *words[words.index("--gpus") :]]) == 0


def test_a_plan_says_what_its_defaults_follow_from(
    qwen_7b: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]) == 0
    out = capsys.readouterr().out
    assert "model.dtype = bfloat16 (default for cuda)" in out
    assert "placement.start_timeout_s = 900 s (default for 30.5 GB of weights at 100 MB/s)" in out
    assert "checkpoint.timeout_s = 1,210 s (default for 91.4 GB of weights and moments at 100 MB/s)" in out
    assert "trainer.step_timeout_s = " in out
    assert "object store of a local session: 28.6 GiB of shared memory" in out


def test_a_store_that_this_machine_cannot_hold_is_warned_of(
    qwen_7b: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=24 * 2**30))
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: 10**13)
    here = [*qwen_7b, "--set", "rollout.engine=transformers", "--set", "placement.device=cpu"]
    assert run([*here, "--set", "model.dtype=bfloat16"]) == 0
    said = capsys.readouterr()
    assert "would be refused: ray's object store needs 28.6 GiB of shared memory" in said.err
    assert "has 24.0 GiB free: not enough" in said.out.replace("\n", " ")
    assert run([*here, "--set", "weights.transport=disk"]) == 0
    said = capsys.readouterr()
    assert ("object store needs" in said.err, "24.0 GiB free: enough" in said.out.replace("\n", " ")) == (
        False,
        True,
    )


def test_the_doctor_says_which_model_the_shared_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 7_000_000_000 + 2**28)
    )
    assert (
        "enough for two versions of a model of 7.0e9 parameters in bfloat16"
    ) in machine._shared_memory().found


@pytest.fixture
def seven_billion(tmp_path: Path) -> str:
    """6.74e9 parameters: 75 GiB of float32 weights and moments, shared by the ranks, and 25 GiB of float32 in
    each worker."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B), encoding="utf-8")
    return f"model.path={tmp_path}"


def test_what_cannot_fit_on_any_account_is_refused_after_the_plan_with_sets_that_help(
    seven_billion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "-p", "base", "--set", seven_billion, "--set", "model.dtype=float32", "--json"]
    arguments += ["--set", "trainer.lr=1e-6", "--gpus", "8", "--gpu-memory", "16"]
    assert run(arguments) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["memory"]["devices"][0]["fits"] is False
    refusal = (
        "error: a trainer rank's weights and moments take 18.8 GiB of a GPU, which has 16.0 GiB: this "
        "cannot run\n"
    )
    assert said.err.startswith(refusal)  # 75 GiB in parts of 16
    assert run([*arguments, "--set", "placement.trainer_workers=5"]) == 3
    assert "a rollout worker's weights take 25.1 GiB" in capsys.readouterr().err
    assert run([*arguments, *hinted(said.err)]) == 0


def test_train_refuses_what_a_plan_refuses(
    seven_billion: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_gpus = cluster.ClusterResources(
        nodes=(cluster.NodeResources(name="local", cpus=8, gpus=2),), elastic_cpus=True
    )
    monkeypatch.setattr(cluster, "local_cluster", lambda: two_gpus)
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: 16 * 2**30)
    command = ["train", "-p", "base", "--set", seven_billion, "--set", "trainer.lr=1e-6"]
    command += ["--runs-dir", str(tmp_path / "runs")]
    assert run([*command, "--dry-run"]) == 3
    refusal = capsys.readouterr().err
    assert run(command) == 3
    assert capsys.readouterr().err == refusal
    assert "75.3 GiB of a GPU, which has 16.0 GiB" in refusal


def test_options_for_gpus_are_said_to_be_unused_on_cpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "usable_cores", lambda: 2)  # on one core there is another warning
    cpus = ["plan", "-p", "base", "--set", "placement.device=cpu", "--json"]
    assert run([*cpus, "--gpus", "8", "--gpu-memory", "80"]) == 0
    said = capsys.readouterr().err
    assert "warning: --gpus 8 is not used: the job runs on CPUs" in said
    assert "warning: --gpu-memory 80 is not used: the job runs on CPUs" in said
    assert run([*cpus, "--gpus", "0"]) == 0
    assert capsys.readouterr().err == ""


def test_this_machines_cores_are_not_held_against_another_machines_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: None)
    assert run(["plan", "-p", "base", "--gpus", "512", "--json"]) == 0
    assert capsys.readouterr().err == ""
    here = ["plan", "-p", "base", "--set", "placement.device=cpu", "--set", "rollout.workers=512", "--json"]
    assert run(here) == 0
    assert "slow each other down" in capsys.readouterr().err


def test_several_nodes_are_planned_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [
        f"--set={role}.{key}" for role in ("trainer", "rollout") for key in ("nnodes=1", "n_gpus_per_node=8")
    ]
    assert run(["plan", "-p", "base", *shapes, "--nodes", "2", "--gpus", "8", "--json"]) == 0
    said = capsys.readouterr()
    assert {row["would be there"] for row in json.loads(said.out)["cluster"]} == {"8 trainer", "8 rollout"}
    assert said.err == ""
    assert run(["plan", "-p", "base", *shapes, "--gpus", "8"]) == 3
    assert run(["plan", "-p", "base", *shapes, "--nodes", "2", "--gpus", "4"]) == 3
    assert "node 2: free 4 of 4 GPUs, 8 of 8 CPUs" in capsys.readouterr().err
    assert run(["plan", "-p", "base", "--nodes", "2"]) == 2


def test_a_model_of_the_hub_is_planned_without_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "-p", "base", "--set", 'model.path="someone/not-here"']
    assert run([*arguments, "--json"]) == 0
    assert "needs its config.json" in json.loads(capsys.readouterr().out)["memory"]["unknown"]
    assert run(arguments) == 0
    assert "no estimate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "machine", "is_warned"),
    [
        ("promts.jsonl", [], True),
        ("promts-*.jsonl", [], True),
        ("prompts.jsonl", [], False),
        ("prompt*.jsonl", [], False),
        ("promts.jsonl", ["--gpus", "8"], False),
    ],
)
def test_a_plan_for_this_machine_warns_of_a_file_that_is_not_there(
    name: str, machine: list[str], is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "Which number is even, 1 or 2?", "answer": "2"}', encoding="utf-8"
    )
    source = tmp_path / name
    assert (
        run(
            [
                "plan",
                "-p",
                "base",
                "--set",
                f"task.source=jsonl:{source}",
                "--set",
                "eval.prompts=0",
                *machine,
            ]
        )
        == 0
    )
    told = " ".join(capsys.readouterr().err.split())
    assert ("a run on this machine would be refused: task.source:" in told) == is_warned


def test_a_plan_without_a_rehearsal_does_not_read_the_whole_data_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        '{"prompt": "Which number is even, 1 or 2?", "answer": "2"}\nthe second line is damaged\n',
        encoding="utf-8",
    )
    plan = ["plan", "-p", "base", "--set", f"task.source=jsonl:{source}", "--set", "eval.prompts=0"]
    plan += ["--set", "model.path=builtin:untaught", "--set"]
    assert run([*plan, "task.rehearsal_items=2"]) == 0
    assert "would be refused" in " ".join(capsys.readouterr().err.split())
    assert run([*plan, "task.rehearsal_items=0"]) == 0
    assert "would be refused" not in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("model", "eval_prompts", "said"),
    [
        (
            "builtin:untaught",
            3,
            "has 3 distinct prompts, and eval.prompts = 3 of them are held out: none are left to train on",
        ),
        ("builtin:tiny", 1, 'model.path = "builtin:tiny" learns from demonstrations, and jsonl:'),
    ],
)
def test_a_plan_for_this_machine_warns_of_a_task_that_a_run_would_refuse(
    model: str, eval_prompts: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        json.dumps({"prompt": f"What is {number} + 1?", "answer": str(number + 1)}) for number in (10, 20, 30)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    sets = [
        f"task.source=jsonl:{tmp_path / 'rows.jsonl'}",
        f"model.path={model}",
        f"eval.prompts={eval_prompts}",
    ]
    assert run(["plan", "-p", "base", *(f"--set={value}" for value in sets)]) == 0
    err = capsys.readouterr().err
    assert "warning: a run on this machine would be refused: " in err
    assert said in err


def test_a_plan_rehearses_on_the_training_prompts_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        json.dumps({"prompt": f"What is {number} + 1?", "answer": str(number + 1)})
        for number in range(10, 15)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    sets = [f"task.source=jsonl:{tmp_path / 'rows.jsonl'}", "model.path=builtin:untaught", "eval.prompts=2"]
    assert run(["plan", "-p", "base", "--json", *(f"--set={value}" for value in sets)]) == 0
    assert json.loads(capsys.readouterr().out)["rehearsal"]["items"] == 3


def test_a_bound_belongs_to_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "-p", "base", "--max-staleness", "1"]) == 2
    assert "needs --tune" in capsys.readouterr().err


def test_a_plan_without_a_search_writes_no_profile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["plan", "-p", "base", "--out", str(tmp_path / "my.toml")]) == 2
    assert "needs --tune" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "workload", "said"),
    [
        ("8", "laptop-tiny", "laptop-tiny runs on CPUs, where --gpus 8 means nothing"),
        ("0", "laptop-tiny", "laptop-tiny runs on CPUs, where --gpus 0 means nothing"),
        ("0", "verl-7b-math-128", "there is no split"),
        ("1", "verl-7b-math-128", "hint: --gpus 2, or no --gpus: then it is the workload's own 128"),
    ],
)
def test_gpus_that_cannot_be_split_are_refused(
    gpus: str, workload: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--tune", workload, "--gpus", gpus]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert said in shown.err


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [("taken.toml", 4, "taken-2.toml"), ("my", 2, "my.toml"), ("no/my.toml", 4, "my.toml")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    name: str,
    code: int,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import asyncrl_cli.bench.recommendation as tune

    monkeypatch.setattr(tune, "search", lambda *arguments: pytest.fail("searched"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.toml").write_text("mine", encoding="utf-8")
    assert run(["plan", "--tune", "laptop-tiny", "--out", name]) == code
    assert f"hint: --out {hint}\n" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.toml"]
    assert (tmp_path / "taken.toml").read_text(encoding="utf-8") == "mine"


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", "--tune", "no-such-thing", "--runs-dir", str(tmp_path)]) == 2
    assert "no workload 'no-such-thing'" in capsys.readouterr().err


def test_a_colocated_profile_has_no_split_to_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    assert run(["plan", "--tune", str(workload), "--profile", "colocate"]) == 2
    assert "no split to tune" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_finds_a_better_split_and_prints_sets_that_make_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On equal halves generation takes about 3 times as long as training: more GPUs belong to the rollout."""
    import asyncrl_cli.bench.recommendation as tune

    monkeypatch.setattr(tune, "TRAJECTORIES", 1)
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    out = tmp_path / "my.toml"
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "--tune", str(workload), "--max-staleness", "1", "--json", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["profile_file"] == str(out)
    best, current = found["recommended"], found["current"]
    assert found["simulated"] is True
    assert "SIMULATED" in captured.err
    assert current["split"] == "4:4"
    assert best["rollout_workers"] > 4
    assert best["window_time_s"] < 0.9 * current["window_time_s"]
    assert max(row["max_staleness"] for row in found["rows"]) <= 1
    sets = [argument for entry in best["sets"] for argument in ("--set", entry)]
    assert run(["plan", "--profile", "partial-rollout", "--gpus", "8", *sets, "--json"]) == 0
    roles = {
        role["role"]: role["workers"] for role in json.loads(capsys.readouterr().out)["placement"]["roles"]
    }
    assert roles == {"trainer": best["trainer_workers"], "rollout": best["rollout_workers"]}
    assert (
        run(["bench", "--simulate", str(workload), "--compare", "partial-rollout", "-p", str(out), "--json"])
        == 0
    )
    compared = json.loads(capsys.readouterr().out)["results"]
    assert [result["profile"] for result in compared] == ["partial-rollout", "my"]
    assert compared[1]["speedup"] > 1.1


@pytest.mark.slow
def test_all_that_a_search_prints_says_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncrl_cli.bench.recommendation as tune

    monkeypatch.setattr(tune, "TRAJECTORIES", 1)
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "rollout.temperature=0.9"]
    assert run(["plan", "--tune", "small.toml", "--max-staleness", "0", *sets, "--out", "my.toml"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-2].startswith("SIMULATED: ")
    assert "settings tried in" in err.splitlines()[-2]  # and not in mid-count
    assert out.startswith("SIMULATED: small, seconds per 64 groups (W), at most 0 versions of staleness")
    assert "recommended (SIMULATED)" in out
    assert "> S" in out  # the current setting is beyond the bound, and shown all the same
    # Without staleness one of the two sides waits, so that the bound has a price: the current setting is 1 /
    # speedup as slow.
    price = float(out.partition("The price of the bound: ")[2].split()[0])
    factor = float(out.partition(" s (")[2].partition("x)")[0])
    assert price == pytest.approx(1 / factor, rel=0.02)
    assert "what this search cannot know" in out
    assert "made up for a test" in out
    copied = [line for line in out.splitlines() if line.startswith("  --set ")]
    assert all(line.endswith(" \\") for line in copied[:-1])
    assert max(map(len, [*copied, *LEGEND.splitlines()])) <= 80
    recommended = shlex.split(" ".join(line.removesuffix("\\") for line in copied))[1::2]
    assert "async_training.staleness_threshold=0" in recommended
    written = load("my.toml", environ={}).profile
    assert written.model_dump(exclude={"name", "purpose"}) == load(
        "partial-rollout", recommended, environ={}
    ).profile.model_dump(exclude={"name", "purpose"})
    text = (tmp_path / "my.toml").read_text(encoding="utf-8")
    assert text.splitlines()[1] == (
        "#   asyncrl plan --tune small.toml --max-staleness 0 --set rollout.temperature=0.9"
    )
    assert "asyncrl bench --compare partial-rollout --profile my.toml" in out


def simulated(setting: Setting, windows: int, time_s: float) -> Row:
    return Row(
        setting=setting,
        windows=windows,
        window_time_s=time_s,
        staleness_mean=0.0,
        staleness_max=0.0,
        trainer_idle_ratio=0.1,
        rollouter_idle_ratio=0.1,
    )


def test_a_search_that_found_the_current_setting_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncrl_cli.bench.recommendation as tune

    def evaluator(*arguments: object) -> object:
        """One setting is the fastest: the one that laptop-tiny begins with."""

        def seconds(setting: Setting, windows: int) -> Row:
            is_current = (setting.eta, setting.window_steps, setting.slots) == (0.5, 4, 64)
            return simulated(setting, windows, 1.0 if is_current else 2.0)

        return lambda settings, windows: [seconds(setting, windows) for setting in settings]

    monkeypatch.setattr(tune, "evaluator", evaluator)
    assert run(["plan", "--tune", "laptop-tiny"]) == 0
    out = capsys.readouterr().out
    assert "the current setting is the recommended one" in out
    assert "--out my.toml" in out


def test_a_search_says_what_the_split_does_and_what_the_rest_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made up: 1:3 takes half of the time of 2:2, and eta = 1 takes 0.8 of it."""
    import asyncrl_cli.bench.recommendation as tune

    def seconds(setting: Setting, windows: int) -> Row:
        return simulated(
            setting,
            windows,
            100.0
            * (0.5 if setting.split == "1:3" else 1.0)
            * (0.8 if setting.eta == 1 else 1.0)
            * (0.8 if setting.on_stale == "accept" else 1.0),
        )

    monkeypatch.setattr(
        tune,
        "evaluator",
        lambda *arguments: lambda settings, windows: [seconds(one, windows) for one in settings],
    )
    two_and_two = ["--set", "placement.trainer_workers=2", "--set", "rollout.workers=2"]
    assert run(["plan", "--tune", "laptop-tiny", *two_and_two]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "recommended (SIMULATED): 1:3 trainer:rollout, predicted 40.00 s per" in out
    assert "the current setting, 2:2, 100.00 s (2.50x), has split 2:2, eta 0.5" in out
    assert "on the current split, 2:2, 80.00 s: they make 1.25x, the split 2.00x" in out
    assert (
        'the strict bound costs 25.0%: without one (on_stale = "accept") 32.00 s, tokens up to 0 versions old'
    ) in out


def test_a_search_that_keeps_the_split_names_the_fastest_other_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncrl_cli.bench.recommendation as tune

    def seconds(setting: Setting, windows: int) -> Row:
        time_s = {"2:2": 100.0, "1:3": 130.0, "3:1": 110.0}[setting.split] * (
            0.8 if setting.eta == 1 else 1.0
        )
        return simulated(setting, windows, time_s)

    monkeypatch.setattr(
        tune,
        "evaluator",
        lambda *arguments: lambda settings, windows: [seconds(one, windows) for one in settings],
    )
    assert (
        run(
            [
                "plan",
                "--tune",
                "laptop-tiny",
                "--set",
                "placement.trainer_workers=2",
                "--set",
                "rollout.workers=2",
            ]
        )
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "the current setting, 2:2, 100.00 s (1.25x), has eta 0.5" in out
    assert "the split stays: the fastest other one, 3:1, 88.00 s" in out
    assert "* best 2:2 " in out, "the marks come first"


def test_a_search_from_a_known_row_is_held_against_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl-7b-math-128 has a published row of its partial rollout: 150.63 s. 128 GPUs split elsewhere are
    another setting."""
    import asyncrl_cli.bench.recommendation as tune

    def evaluate(settings: Sequence[Setting], windows: int) -> list[Row]:
        return [simulated(setting, windows, 100.0) for setting in settings]

    monkeypatch.setattr(tune, "evaluator", lambda *arguments: evaluate)
    assert run(["plan", "--tune", "verl-7b-math-128"]) == 0
    assert "published for the current setting: 150.63 s (1.51x)" in capsys.readouterr().out
    assert run(["plan", "--tune", "verl-7b-math-128", "--set", "placement.ratio=3:1"]) == 0
    assert "published for" not in capsys.readouterr().out


WORKLOAD = """
purpose = "eight GPUs that generate twice as slowly as they train"
notes = "made up for a test"
windows = 4

[profile.placement]
gpus = 8
[profile.trainer]
ppo_mini_batch_size = 16
[profile.rollout]
n = 4
slots = 8
max_response_tokens = 200

[lengths]
median_tokens = 50.0
sigma = 0.8

[decoding]
step_s = 0.02
step_s_per_sequence = 0.0005

[training]
s_per_token = 0.0003

[syncing]
parameter_bytes = 1e9
gather_bytes_per_s = 1e10
send_bytes_per_s = 1e10
load_bytes_per_s = 1e10
"""


def tuned(
    speedup: float | None, known: Any = None, current_s: float = 1.0, **parts: tuple[float, float]
) -> Tuned:
    """A search whose calibrated run took these seconds, measured and simulated, per part."""
    fit = [
        Residual(profile="own", part=part, measured_s=measured_s, predicted_s=predicted_s, calibrated=True)
        for part, (measured_s, predicted_s) in parts.items()
    ]
    current = SimpleNamespace(window_time_s=current_s)
    found: Any = SimpleNamespace(
        best=SimpleNamespace(window_time_s=1.0), current=current, without_bound=None, speedup=speedup
    )
    workload: Any = None
    return Tuned(workload=workload, profile="own", sets=(), found=found, known=known, fit=fit)


@pytest.mark.parametrize(
    ("speedup", "parts", "said"),
    [
        (
            1.05,
            {"window": (2.0, 1.8)},
            "the gain, 5%, is within the error of the simulation, 10% of a window",
        ),
        (1.25, {"window": (2.0, 1.8)}, "the gain, 25%, exceeds the error of the simulation, 10% of a window"),
        (
            1.25,
            {"window": (2.0, 2.0), "wait_data": (0.5, 1.095)},
            "the gain, 25%, is within the error of the simulation, 30% of",
        ),
        (1.25, {}, "nothing measured tells how far the simulation is off"),
    ],
)
def test_a_gain_is_held_against_the_simulations_error(
    speedup: float, parts: dict[str, tuple[float, float]], said: str
) -> None:
    assert any(said in line for line in _against_others(tuned(speedup, **parts)))


def test_a_published_row_of_the_current_setting_tells_the_error_too() -> None:
    known = Reference(profile="own", window_time_s=1.25, parts_s={}, source="published")
    assert any(
        "within the error of the simulation, 20%" in line for line in _against_others(tuned(1.1, known))
    )


def test_a_part_that_is_simulated_wrong_is_named_if_it_matters() -> None:
    def doubted(measured_s: float, predicted_s: float) -> list[str]:
        lines = _against_others(tuned(None, window=(2.0, 2.0), wait_data=(measured_s, predicted_s)))
        return [line for line in lines if line.startswith("do not trust")]

    (told,) = doubted(0.5, 1.095)
    assert "wait_data: 0.5 s measured, 1.095 s simulated, 30% of a window apart" in told
    assert doubted(0.01, 0.05) == []


@pytest.mark.parametrize("machine", [[], ["--gpus", "8", "--gpu-memory", "80"]], ids=["cpu", "gpus"])
def test_80_columns_show_the_memory_with_at_most_four_lines_each(
    machine: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["plan", "-p", "partial-rollout", *machine]) == 0
    lines = capsys.readouterr().out.split("\nmemory per ")[1].splitlines()
    items = [
        not line.startswith(" ")
        for line in lines[2 : next(n for n, line in enumerate(lines) if " on one " in line)]
    ]
    assert sum(items) >= 14
    assert len(items) <= 2 * sum(items)
    assert max(len(list(same)) for is_item, same in groupby(items) if not is_item) <= 3


def test_sets_alone_are_planned_over_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--set", "async_training.trigger_parameter_sync_step=3", "--json"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["profile"], json.loads(said.out)["schedule"]["window_steps"]) == ("base", 3)
    assert "no --profile given: using base" in said.err
    assert run(["plan", "--set", "rollout.n=1"]) == 2


def test_the_hub_is_asked_for_a_hub_name_only_and_only_if_wanted(
    seven_billion: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: None)
    assert run(["plan", "--set", seven_billion, "--ask-hub"]) == 0
    assert "6,738,415,616 parameters" in capsys.readouterr().out
    name = "model.path=no-such-owner/no-such-model"
    assert run(["plan", "--set", name]) == 0
    assert "`asyncrl plan --ask-hub` downloads it" in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run(["plan", "--set", name, "--ask-hub"]) == 3
    assert "the hub cannot be reached" in capsys.readouterr().err
