"""`asyncrl plan`: memory in the table and in JSON, and what fits."""

from __future__ import annotations

import json
import shlex
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.cli.app import run
from asyncrl_cli.job.driver_run import Run
from asyncrl_cli.plan import cluster, machine, memory_fit
from asyncrl_cli.plan.remedies import refuse_what_cannot_fit
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import changed
from tests.llama import LLAMA_7B

pytestmark = pytest.mark.usefixtures("quick_task")


def test_a_plan_estimates_the_memory_of_every_process(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "--profile", "partial-rollout"]) == 0
    out = capsys.readouterr().out
    # 0.75 M parameters: 4 bytes each of weights and gradients, 8 of AdamW's moments.
    assert "754,752 parameters" in out
    assert [size in out for size in ("2.9 MiB", "5.8 MiB")] == [True, True]
    assert "64 slots * 352 tokens" in out
    assert "fits" in out


def test_the_memory_of_a_plan_as_json(capsys):
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


def test_gpus_without_known_memory_get_the_estimate_alone(capsys):
    assert run(["plan", "-p", "base", "--gpus", "8", "--json"]) == 0
    assert {device["fits"] for device in json.loads(capsys.readouterr().out)["memory"]["devices"]} == {None}


def hinted(said: str) -> list[str]:
    """The arguments that an error's hint gives."""
    return shlex.split(said.partition("hint: ")[2])


def test_a_job_that_does_not_fit_is_refused_after_the_plan_with_sets_that_fit(capsys):
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
def test_the_hint_of_a_plan_leads_to_one_that_fits_in_one_step(sets, gpu_gib, seven_billion, capsys):
    plan = ["plan", "-p", "base", "--gpus", "8", "--gpu-memory", gpu_gib]
    plan += [word for text in (seven_billion, "model.dtype=float32", *sets) for word in ("--set", text)]
    assert run(plan) == 3
    assert run([*plan, *hinted(capsys.readouterr().err)]) == 0


def test_without_settings_that_fit_the_hint_is_a_number_of_gpus_that_do(seven_billion, capsys):
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


def test_a_nodes_host_memory_is_counted_with_all_that_its_processes_hold(qwen_7b, capsys):
    # Rank 0 has two versions, and so has the object store; a checkpoint's copy is 12 bytes per parameter;
    # a node's workers have two buffers of a version, and each 0.44 GiB of vLLM's own. Payloads in flight take
    # 0.25 GiB, a process's own modules 0.375 GiB.
    version, state, payloads, engine, process = 14.18, 85.1, 0.25, 0.44, 0.375
    own = 8 * process + payloads
    one = 4 * version + state + 2 * version + 4 * engine + own
    gpus = [*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]
    assert node_needs_of(capsys, *gpus) == {"4 trainer 4 rollout": pytest.approx(one, abs=0.2)}
    assert node_needs_of(capsys, *gpus, "--nodes", "2") == {
        "8 trainer": pytest.approx(4 * version + state + own, abs=0.2),
        "8 rollout": pytest.approx(2 * version + 2 * version + 8 * engine + own, abs=0.2),
    }
    less = 4 * version - 2 * version  # nothing through the store, no buffers
    direct = [*gpus, "--set", "weights.transport=nccl", "--set", "placement.device=cuda"]
    assert node_needs_of(capsys, *direct) == {
        "4 trainer 4 rollout": pytest.approx(less + state + 4 * engine + own, abs=0.2)
    }


def test_a_job_that_does_not_fit_its_nodes_host_memory_is_refused_with_sets_that_fit(qwen_7b, capsys):
    gpus = [*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]
    assert run([*gpus, "--node-memory", "256"]) == 0
    assert "of 256.0 GiB: fits" in capsys.readouterr().out.replace("\n", " ")
    assert run([*gpus, "--node-memory", "150"]) == 3
    said = capsys.readouterr()
    assert "4 trainer and 4 rollout need about" in said.err
    assert "of a node's 150.0 GiB" in said.err
    assert run([*gpus, "--node-memory", "150", *hinted(said.err)]) == 0


def test_where_no_settings_fit_the_hosts_more_nodes_are_the_hint(qwen_7b, capsys):
    arguments = [*qwen_7b, "--gpu-memory", "80", "--node-memory", "64"]
    assert run([*arguments, "--gpus", "8"]) == 3
    words = hinted(capsys.readouterr().err)
    assert run([*arguments, *words[words.index("--gpus") :]]) == 0


def test_a_plan_says_what_its_defaults_follow_from(qwen_7b, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([*qwen_7b, "--gpus", "8", "--gpu-memory", "80"]) == 0
    out = capsys.readouterr().out
    assert "model.dtype = bfloat16 (default for cuda)" in out
    assert "placement.start_timeout_s = 900 s (default for 30.5 GB of weights at 100 MB/s)" in out
    assert "checkpoint.timeout_s = 1,210 s (default for 91.4 GB of weights and moments at 100 MB/s)" in out
    assert "trainer.step_timeout_s = " in out
    assert "object store of a local session: 28.6 GiB of shared memory" in out


def test_a_store_that_this_machine_cannot_hold_is_warned_of(qwen_7b, capsys, monkeypatch):
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


def test_a_plan_asks_servers_of_others_only_for_a_run_here(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "key").write_text("a-token-that-others-may-read")
    sets = ["rollout.engine=remote", 'rollout.urls=["http://127.0.0.1:9/", "http://localhost:9"]']
    sets += ["weights.transport=disk", f"rollout.token_file={tmp_path}/key"]
    plan = ["plan", "-p", "base", *(word for text in sets for word in ("--set", text))]
    for mode, code, named in (
        (0o644, 4, ["mode 0644"]),
        (0o600, 3, ["server http://127.0.0.1:9: ", "server http://localhost:9: "]),
    ):
        (tmp_path / "key").chmod(mode)
        assert run(plan) == code
        said = capsys.readouterr()
        assert ("staleness bound" in said.out, "error:" in said.err) == (True, True)
        assert [text in said.err for text in named] == [True] * len(named), said.err
        assert run([*plan, "--gpus", "8"]) == 0
        assert not [text for text in named if text in capsys.readouterr().err]


def test_the_doctor_says_which_model_the_shared_memory_has_room_for(monkeypatch):
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 7_000_000_000 + 2**28)
    )
    assert (
        "enough for two versions of a model of 7.0e9 parameters in bfloat16"
    ) in machine.shared_memory_finding().found


@pytest.fixture
def seven_billion(tmp_path: Path) -> str:
    """6.74e9 parameters: 75 GiB of float32 weights and moments, shared by the ranks, and 25 GiB of float32 in
    each worker."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B), encoding="utf-8")
    return f"model.path={tmp_path}"


def test_what_cannot_fit_on_any_account_is_refused_after_the_plan_with_sets_that_help(seven_billion, capsys):
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


def test_train_and_resume_refuse_what_a_plan_refuses(seven_billion, capsys, monkeypatch, tmp_path):
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
    loaded = load("base", [seven_billion, "trainer.lr=1e-6"])
    resumed = Run(loaded.profile, loaded.origins)
    monkeypatch.setattr(Run, "resume", lambda *given, **named: resumed)
    assert run(["resume", "first"]) == 3
    assert capsys.readouterr().err == refusal.replace("asyncrl plan --gpus 8 ", "")


def test_a_resume_that_does_not_fit_is_told_what_it_may_change(seven_billion, monkeypatch):
    gpus = (cluster.NodeResources(name="local", cpus=8, gpus=4),)
    there = cluster.ClusterResources(nodes=gpus, elastic_cpus=True)
    monkeypatch.setattr(cluster, "local_cluster", lambda: there)
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: 40 * 2**30)
    loaded, hints = load("base", [seven_billion, "trainer.lr=1e-6", "model.dtype=float32"]), []
    for is_resumed in (False, True):
        with pytest.raises(PreflightError) as refused:
            refuse_what_cannot_fit(loaded, is_resumed=is_resumed)
        hints.append(str(refused.value.hint))
    assert "model.dtype=bfloat16" in hints[0]
    sets = hints[1].replace("--set ", "").split()
    refuse_what_cannot_fit(changed(loaded, sets), is_resumed=True)
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: 24 * 2**30)
    with pytest.raises(PreflightError) as refused:
        refuse_what_cannot_fit(loaded, is_resumed=True)
    assert refused.value.hint == "resume it where devices have more memory"


@pytest.mark.slow
def test_on_cpus_the_memory_of_many_workers_is_refused_and_that_of_many_slots_is_not(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(memory_fit, "host_memory_bytes", lambda: 8 * 2**30)
    # 50 processes of Python and torch, of which each takes over 0.3 GiB, however small the model
    command = ["train", "-p", "base", "--set", "rollout.workers=50", "--runs-dir", str(tmp_path / "runs")]
    assert run(command) == 3
    refusal = capsys.readouterr().err
    assert "placement.check_memory=false" in refusal
    assert run([*command, "--dry-run", "--set", "placement.check_memory=false"]) == 0
    assert run([*command, "--dry-run", *hinted(refusal)]) == 0
    # the engine gives the cache of any number of slots half of what is free
    assert run(["plan", "-p", "base", "--set", "rollout.slots=50000"]) == 0
    assert "the engine takes at most half of what is free" in capsys.readouterr().err


def test_options_for_gpus_are_said_to_be_unused_on_cpus(capsys, monkeypatch):
    monkeypatch.setattr(cluster, "usable_cores", lambda: 2)  # on one core there is another warning
    cpus = ["plan", "-p", "base", "--set", "placement.device=cpu", "--json"]
    assert run([*cpus, "--gpus", "8", "--gpu-memory", "80"]) == 0
    said = capsys.readouterr().err
    assert "warning: --gpus 8 is not used: the job runs on CPUs" in said
    assert "warning: --gpu-memory 80 is not used: the job runs on CPUs" in said
    assert run([*cpus, "--gpus", "0"]) == 0
    assert capsys.readouterr().err == ""


def test_this_machines_cores_are_not_held_against_another_machines_job(capsys, monkeypatch):
    monkeypatch.setattr(memory_fit, "known_memory_bytes", lambda device: None)
    assert run(["plan", "-p", "base", "--gpus", "512", "--json"]) == 0
    assert capsys.readouterr().err == ""
    here = ["plan", "-p", "base", "--set", "placement.device=cpu", "--set", "rollout.workers=512", "--json"]
    assert run(here) == 0
    assert "slow each other down" in capsys.readouterr().err


def test_several_nodes_are_planned_without_a_cluster(capsys):
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


def test_a_model_of_the_hub_is_planned_without_an_estimate(capsys):
    arguments = ["plan", "-p", "base", "--set", 'model.path="someone/not-here"']
    assert run([*arguments, "--json"]) == 0
    assert "needs its config.json" in json.loads(capsys.readouterr().out)["memory"]["unknown"]
    assert run(arguments) == 0
    assert "no estimate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "machine", "code"),
    [
        ("promts.jsonl", [], 2),
        ("promts-*.jsonl", [], 2),
        ("prompts.jsonl", [], 0),
        ("prompt*.jsonl", [], 0),
        ("promts.jsonl", ["--gpus", "8"], 0),
    ],
)
def test_a_plan_for_this_machine_ends_with_a_file_that_is_not_there(name, machine, code, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "Which number is even, 1 or 2?", "answer": "2"}', encoding="utf-8"
    )
    source = tmp_path / name
    sets = [f"--set=task.source=jsonl:{source}", "--set=eval.prompts=0"]
    sets += ["--set=model.path=builtin:untaught"]
    assert run(["plan", "-p", "base", *sets, *machine]) == code
    shown = capsys.readouterr()
    assert ("error: task.source:" in shown.err) == (code == 2)
    assert "1 trainer" in shown.out or machine  # the plan comes first


@pytest.mark.parametrize(
    ("sets", "code", "said"),
    [
        (["model.path=./nomodel"], 3, "/nomodel does not exist"),
        (["task.reward=rewards:scor"], 2, "error: task.reward"),
        (["task.curriculum=0.5", "run.train_steps=2"], 2, "so none comes a second time"),
    ],
)
def test_a_plan_and_a_run_end_with_the_same_refusal(sets, code, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(prompt, response, item):\n    return 1.0\n")
    words = ["-p", "base", *(f"--set={one}" for one in sets)]
    assert run(["plan", *words]) == code
    planned = capsys.readouterr()
    assert said in planned.err
    assert planned.out
    assert run(["train", "--dry-run", *words]) == code
    assert capsys.readouterr().err.splitlines()[-2:] == planned.err.splitlines()[-2:]


def test_a_plan_without_a_rehearsal_does_not_read_the_whole_data_file(tmp_path, capsys):
    source = tmp_path / "prompts.jsonl"
    source.write_text(
        '{"prompt": "Which number is even, 1 or 2?", "answer": "2"}\nthe second line is damaged\n',
        encoding="utf-8",
    )
    plan = ["plan", "-p", "base", "--set", f"task.source=jsonl:{source}", "--set", "eval.prompts=0"]
    plan += ["--set", "model.path=builtin:untaught", "--set"]
    assert run([*plan, "task.rehearsal_items=2"]) == 2
    assert "prompts.jsonl:2: not JSON" in capsys.readouterr().err
    assert run([*plan, "task.rehearsal_items=0"]) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            "model.path=builtin:untaught eval.prompts=3",
            "eval.prompts = 3 of them are held out: none are left",
        ),
        ("model.path=builtin:tiny eval.prompts=1", '"builtin:tiny" learns from demonstrations, and jsonl:'),
        ("model.path=builtin:untaught eval.prompts=1", None),
    ],
)
def test_a_plan_rehearses_on_a_files_training_prompts_and_refuses_a_task_as_a_run_would(
    sets, said, tmp_path, capsys
):
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in (10, 20, 30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    given = [f"task.source=jsonl:{tmp_path / 'rows.jsonl'}", "task.rehearsal_items=8", *sets.split()]
    code = run(["plan", "-p", "base", "--json", *(f"--set={value}" for value in given)])
    shown = capsys.readouterr()
    assert code == (0 if said is None else 2)
    if said is None:
        found = json.loads(shown.out)["rehearsal"]
        assert (found["items"], found["reason"]) == (2, "")
    else:
        assert said in shown.err.partition("error: ")[2]


@pytest.mark.parametrize("machine", [[], ["--gpus", "8", "--gpu-memory", "80"]], ids=["cpu", "gpus"])
def test_80_columns_show_the_memory_with_at_most_four_lines_each(machine, capsys, monkeypatch):
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


def test_sets_alone_are_planned_over_base(capsys):
    assert run(["plan", "--set", "async_training.trigger_parameter_sync_step=3", "--json"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["profile"], json.loads(said.out)["schedule"]["window_steps"]) == ("base", 3)
    assert "no --profile given: using base" in said.err
    assert run(["plan", "--set", "rollout.n=1"]) == 2


def test_the_hub_is_asked_for_a_hub_name_only_and_only_if_wanted(seven_billion, capsys, monkeypatch):
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


def test_a_plan_for_machines_elsewhere_writes_nothing_to_the_store(qwen_7b, tmp_path, capsys):
    (tmp_path / "file").touch()
    url = ["--set", "weights.transport=directory", "--set", f"weights.url=file://{tmp_path}/file"]
    assert run([*qwen_7b, "--gpus", "8", "--gpu-memory", "80", *url]) == 0
    assert "was not tried: the job runs elsewhere" in " ".join(capsys.readouterr().err.split())
    assert run([*qwen_7b, *url]) == 3
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


def test_a_governors_target_is_part_of_the_schedule(capsys):
    words = ["plan", "--profile", "partial-rollout"]
    assert run(words) == 0
    assert "KL target" not in capsys.readouterr().out
    assert run([*words, "--set", "async_training.target_kl=0.02"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("KL target"))
    assert row.split()[2:6] == ["0.02", "nats", "per", "token:"]
