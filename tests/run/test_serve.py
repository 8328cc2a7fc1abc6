"""`asyncrl serve` as its users have it: AsyncRL's requests by curl, the trainer of docs/serve.md, ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl_cli.builtin.tiny_models import built_untaught
from asyncrl_cli.cli.app import run as asyncrl
from asyncrl_cli.profile.schema import ModelSection, Profile
from tests.run.commands import finish, start

pytestmark = pytest.mark.slow
SIZES = ("rollout.slots=32", "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=32")
SETS = (*SIZES, "model.dtype=float32")  # with matrix units the default is bfloat16
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """Random weights, and a token per character."""
    untaught = Profile(model=ModelSection(path="builtin:untaught"))
    return built_untaught(untaught, tmp_path_factory.mktemp("models"))


class Server:
    def __init__(self, directory: Path, model_dir: Path, *words: str) -> None:
        self.directory = directory
        words = ("--model", str(model_dir), "--port", "0", *words)
        self.process = start(directory, "serve", *words, sets=SETS)
        line = ""
        while "serving" not in line:
            line = self.process.stderr.readline()
            assert line, self.process.wait()
        self.url = re.search(r"http://[\d.:]+", line)[0]
        self.token = (directory / "serve.token").read_text().strip()

    def curl(self, path: str, body: object = None, token: str | None = None) -> tuple[int, object]:
        header = ["-H", f"Authorization: Bearer {self.token if token is None else token}"]
        data = [] if body is None else ["-d", json.dumps(body)]
        command = ["curl", "-s", "-m", "60", "-w", "\n%{http_code}", *header, *data, self.url + path]
        answer, _, status = subprocess.run(command, capture_output=True, text=True).stdout.rpartition("\n")
        return int(status), json.loads(answer) if answer.startswith("{") else answer


def changed(model_dir: Path, target: Path, factor: float) -> dict[str, torch.Tensor]:
    """The model's weights, multiplied, in a directory of their own."""
    weights = {name: one * factor for name, one in load_file(model_dir / "model.safetensors").items()}
    target.mkdir()
    save_file(weights, target / "model.safetensors")
    return weights


def reference_logprobs(model_dir: Path, weights: dict[str, torch.Tensor], ids: list[int]) -> list[float]:
    """By transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def check_answers(server: Server, model_dir: Path, weights: dict[str, torch.Tensor], version: int) -> None:
    ask = {"prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, "temperature": 1.0}
    status, answer = server.curl("/v1/completions", ask)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert set(choice["weight_versions"]) == {version}
    expected = reference_logprobs(model_dir, weights, [5, 6, 7, *choice["token_ids"]])[2:]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_the_recipes_four_requests_by_curl_and_then_the_trainer_of_the_page_trains_against_the_server(
    tmp_path, model_dir
):
    server = Server(tmp_path, model_dir)
    assert (tmp_path / "serve.token").stat().st_mode & 0o777 == 0o600
    paths = ["/v1/completions", "/version", "/metrics", "/async_rl/update_weights", "/abort"]
    assert {
        server.curl(path, {} if "v1" in path or "_" in path else None, "no")[0] for path in paths[:4]
    } == {401}
    check_answers(server, model_dir, load_file(model_dir / "model.safetensors"), 0)

    weights = changed(model_dir, tmp_path / "theirs", 1.1)
    status, answer = server.curl("/async_rl/update_weights", {"model_path": str(tmp_path / "theirs")})
    assert (status, answer["version"]) == (200, 1), answer
    check_answers(server, model_dir, weights, 1)

    weights = changed(model_dir, tmp_path / "others", 0.9)
    script = tmp_path / "rank_zero.py"
    script.write_text(RANK_ZERO)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank_zero = subprocess.Popen([sys.executable, str(script), str(tmp_path / "others"), str(port)])
    name = {"group_name": "async_rl_weight_update"}
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    status, answer = server.curl("/async_rl/init_nccl_group", {**group, "backend": "gloo", **name})
    assert status == 200, answer
    assert server.curl("/async_rl/update_weights_nccl", name)[0] == 409  # nothing is announced
    names = sorted(weights)
    meta = {
        "names": names,
        "dtypes": ["torch.float32"] * len(names),
        "shapes": [[*weights[n].shape] for n in names],
    }
    assert (
        server.curl("/async_rl/set_weight_meta", {**meta, "shapes": [[2**40]] * len(names), **name})[0] == 400
    )
    assert server.curl("/async_rl/set_weight_meta", {**meta, **name})[0] == 200
    status, answer = server.curl("/async_rl/update_weights_nccl", {**name, "version": 7})
    assert (status, answer["version"]) == (200, 7), answer
    assert rank_zero.wait(60) == 0
    check_answers(server, model_dir, weights, 7)
    _, again = server.curl("/async_rl/update_weights", {"model_path": str(tmp_path / "others")})
    assert (again["version"], again["fingerprint"]) == (8, answer["fingerprint"])

    status, answer = server.curl("/v1/completions", {"prompt": "3é4é"})
    assert (status, answer["error"]["message"]) == (400, "the model's vocabulary lacks the characters 'é'")
    talk = {"messages": [{"role": "user", "content": "3é"}]}
    assert server.curl("/v1/chat/completions", talk)[0] == 400
    status, text = server.curl("/metrics")
    assert (status, "asyncrl_version 8\n" in text) == (200, True)
    the_trainer_of_the_page_trains(tmp_path, server, model_dir, 8)
    server.process.send_signal(signal.SIGTERM)
    code, _, err = finish(server.process, 60)
    assert (code, "leaked" in err) == (0, False), err


RANK_ZERO = """
import sys
import urllib.request
from datetime import timedelta
import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
weights = load_file(f"{sys.argv[1]}/model.safetensors")
limit, name = timedelta(seconds=60), "async_rl_weight_update"
store = TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=True, timeout=limit)
group, _ = _new_process_group_helper(2, 0, [], Backend("gloo"), PrefixStore(name, store), name, timeout=limit)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
for name in sorted(weights):
    torch.distributed.broadcast(weights[name], 0, group=group)
"""


def the_trainer_of_the_page_trains(tmp_path: Path, server: Server, model_dir: Path, version: int) -> None:
    """`version`: what the server has when it begins."""
    (code,) = re.findall("```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    (tmp_path / "trainer.py").write_text(code)
    words = [sys.executable, "trainer.py", server.url, str(model_dir), "30"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["version"] for line in lines] == list(range(version + 1, version + 31))
    assert [line["sampled_by"] for line in lines] == list(range(version, version + 30))
    first, last = (sum(line["reward"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last > first + 0.2, (first, last)


def test_a_taken_port_an_open_token_file_and_a_missing_model_are_one_error_each(
    tmp_path, model_dir, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = asyncrl(["serve", "--model", str(model_dir), "--port", port])
    err = " ".join(capsys.readouterr().err.split())
    assert (code, err.count("error:")) == (3, 1)
    assert f"127.0.0.1:{port} cannot be used: Address already in use" in err
    (tmp_path / "serve.token").write_text("x" * 40)
    (tmp_path / "serve.token").chmod(0o644)
    code = asyncrl(["serve", "--model", str(model_dir), "--port", "0"])
    err = " ".join(capsys.readouterr().err.split())
    assert (code, "serve.token is refused: mode 0644" in err) == (4, True)
    (tmp_path / "serve.token").unlink()
    code = asyncrl(["serve", "--model", "./nowhere", "--port", "0", "--set", "rollout.slots=4"])
    err = " ".join(capsys.readouterr().err.split())
    assert (code, f"directory {tmp_path / 'nowhere'} does not exist" in err) == (3, True)
