from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.keys import keys, sections, unknown_key
from asyncrl_cli.profile.loaded import DEFAULT, load


def write(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_each_layer_overrides_the_ones_below_it(tmp_path: Path) -> None:
    own = write(tmp_path, "own.toml", 'extends = "base"\n[run]\nseed = 1\n[rollout]\nn = 4\nslots = 32\n')
    environ = {"ASYNCRL_RUN__SEED": "2", "ASYNCRL_ROLLOUT__N": "5", "PATH": "x"}

    def seed(sets: list[str], flags: dict[str, object], environ: dict[str, str]) -> int:
        return load(own, sets, flags, environ).profile.run.seed

    assert load("base", environ={}).profile.run.seed == 0
    assert seed([], {}, {}) == 1
    assert seed([], {}, environ) == 2
    assert seed(["run.seed=2", "run.seed=3"], {}, environ) == 3
    assert seed(["run.seed=3"], {"run.seed": 4}, environ) == 4


def test_the_origin_of_every_value_is_kept(tmp_path: Path) -> None:
    own = write(tmp_path, "own.toml", 'extends = "base"\n[rollout]\nslots = 32\n')
    loaded = load(own, ["run.seed=3"], {"run.name": "x"}, {"ASYNCRL_ROLLOUT__N": "5"})
    assert set(loaded.origins) == {*keys(), "name", "purpose"}
    assert loaded.origins["rollout.slots"] == f"profile own ({own})"
    assert loaded.origins["run.train_steps"].startswith("profile base (")
    assert loaded.origins["rollout.n"] == "environment ASYNCRL_ROLLOUT__N"
    assert loaded.origins["run.seed"] == "--set"
    assert loaded.origins["run.name"] == "flag"
    assert loaded.origins["weights.probe_sequences"] == DEFAULT


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[run]\nseed = 1\nname = 'a'\nseed = 2\n", "4: run.seed is given twice", "keep one of them"),
        (
            "[run]\nseed = 1\n[rollout]\nstop = ['a',\n'b']\nstop = []",
            "6: rollout.stop is given twice",
            "keep",
        ),
        ("[run]\nseed = 1\n[run]\nname = 'a'\n", "3: [run] is there twice", "into one"),
        ("[run]\n[rollout\nn = 2\n", "2: [rollout lacks its closing bracket", "line of its own: [run]"),
        ("[run]\nseed = True\n", "2: invalid value (column 8)", "booleans are true and false"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_the_key_and_a_hint_that_fits(
    text: str, message: str, hint: str, tmp_path: Path
) -> None:
    own = write(tmp_path, "own.toml", text)
    with pytest.raises(ConfigError) as caught:
        load(own, environ={})
    assert caught.value.message == f"{own}:{message}"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.name=first", "first"),
        ('run.name="7"', "7"),
        ("task.prompt_key=a=b", "a=b"),
        ("task.prompt_key=", ""),
        ('task.params.names=["a", "b"]', ["a", "b"]),
        ("task.params.low=0.5", 0.5),
        ("task.params.low=-3", -3),
        ("task.params.on=true", True),
        ("task.params.text=1.2.3", "1.2.3"),
        ("async_training.staleness_threshold=0.1", Decimal("0.1")),
        ("rollout.stop=['</s>']", ("</s>",)),
    ],
)
def test_a_set_value_is_toml_and_else_a_string(text: str, value: object) -> None:
    profile = load("base", [text], environ={}).profile
    section, key, *entry = text.partition("=")[0].split(".")
    found = getattr(getattr(profile, section), key)
    assert (found[entry[0]] if entry else found) == value


def test_decimals_stay_with_eta_and_every_other_number_is_a_plain_float() -> None:
    profile = load("base", ["trainer.lr=1e-5", "task.params.deep={a=[0.5]}"], environ={}).profile
    assert type(profile.trainer.lr) is float
    assert type(profile.task.params["deep"]["a"][0]) is float
    assert type(profile.async_training.staleness_threshold) is Decimal


def test_a_new_task_source_starts_without_the_parameters_of_the_old_one(tmp_path: Path) -> None:
    low = write(tmp_path, "low.toml", 'extends = "base"\n[task.params]\nmax_value = 9\n')
    high = write(tmp_path, "high.toml", 'extends = "low.toml"\n[task]\nsource = "reasoning-gym:count_bits"\n')
    assert load(low, environ={}).profile.task.params == {"max_value": 9}
    both = load(low, ["task.params.min_value=1"], environ={}).profile.task.params
    assert both == {"max_value": 9, "min_value": 1}
    assert load(high, environ={}).profile.task.params == {}


def test_the_length_of_a_higher_layer_replaces_that_of_a_lower_one_in_either_unit() -> None:
    run = load("base", ["run.total_rollout_steps=320"], environ={}).profile.run
    assert (run.train_steps, run.total_rollout_steps) == (None, 320)


@pytest.mark.parametrize(("alias", "name"), [("true", "rollout"), ("false", "recompute")])
def test_verls_name_for_the_old_logprobs_decides_them(alias: str, name: str) -> None:
    loaded = load("base", [f"async_training.use_rollout_log_probs={alias}"], environ={})
    assert loaded.profile.algorithm.old_logprobs == name
    assert loaded.origins["algorithm.old_logprobs"] == "async_training.use_rollout_log_probs (--set)"


def test_relative_paths_are_relative_to_the_profile_that_says_them(tmp_path: Path) -> None:
    text = (
        'extends = "base"\n[task]\nsource = "jsonl:data.jsonl"\n[model]\npath = '
        '"./m"\n[reward_model]\npath = "./judge"\n'
    )
    text += '[eval]\nsets = {aime = "parquet:a.parquet"}\n[rollout]\nengine = "remote"\n'
    text += 'urls = ["http://a"]\ntoken_file = "key"\n[weights]\ntransport = "disk"\n'
    profile = load(write(tmp_path, "own.toml", text), environ={}).profile
    assert profile.task.source == f"jsonl:{tmp_path}/data.jsonl"
    assert profile.eval.sets == {"aime": f"parquet:{tmp_path}/a.parquet"}
    assert profile.model.path == str(tmp_path / "m")
    assert profile.reward_model.path == str(tmp_path / "judge")
    assert profile.rollout.token_file == str(tmp_path / "key")


def test_hub_names_and_built_in_models_are_no_paths() -> None:
    for name in ("Qwen/Qwen3-0.6B", "builtin:tiny"):
        assert load("base", [f"model.path={name}"], environ={}).profile.model.path == name


def refusal(
    reference: str = "base", sets: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(reference, sets, environ=environ or {})
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("run.train_step=3", "unknown key run.train_step", "did you mean run.train_steps?"),
        ("partial_rollout=true", "unknown key partial_rollout", "mean async_training.partial_rollout?"),
        ("weights.transport=disc", 'weights.transport = "disc"', 'did you mean "disk"?'),
        ("trainer.slots=3", "unknown key trainer.slots", "did you mean rollout.slots?"),
        ("run.train_steps", "expected section.key=value", "--set run.train_steps=20"),
        ("run=3", "run is a section", "run.<key>"),
        ("run.train_steps=ten", '"ten" (--set): expected an integer of at least 1', "train steps"),
        ("run.train_steps='3'", "expected an integer", "remove the quotes: run.train_steps = 3"),
        ("run.train_steps=1.5", "run.train_steps = 1.5 (--set): expected an integer", "train steps"),
        ("run.train_steps=true", "run.train_steps = true (--set): expected an integer", "train steps"),
        ("run.name=7", "expected a string", "quote it: --set 'run.name=\"7\"'"),
        ("async_training.staleness_threshold=-0.5", "expected a number of at least 0", "eta"),
        ("async_training.staleness_threshold=nan", "expected a number", "eta"),
        ("async_training.partial_rollout=1", "expected true or false", "Freeze"),
        ("rollout.engine=transformer", '"transformer" is not known', "known: remote, transformers, vllm;"),
        ("trainer.betas=[0.9]", "expected 2 numbers", "betas"),
        ("trainer.betas=[0.9, 1.0]", "expected 2 numbers, each a number of at least 0 and below 1", "betas"),
        ("rollout.stop='x'", "expected an array, each entry a string", "Strings"),
        ("rollout.stop=['x', '']", "each entry a string of at least 1 character", "Strings"),
        ("lora.target_modules=['']", "each entry a string of at least 1 character", "adapter"),
        ("model.path=''", "expected a string", "directory"),
        ("placement.ratios=[1.5]", "expected an array, each entry an integer of at least 1", "share"),
        ("placement.tasks=['train']", "each entry an array, each entry a string", "share"),
        ("placement.ratio=0:1", 'expected a string like "1:1"', "trainer:rollout"),
        (
            "weights.keep_versions=some",
            'integer of at least 0 and at most 1,000,000,000 or "all"',
            "versions",
        ),
    ],
)
def test_a_wrong_set_says_key_value_and_what_is_expected(text: str, message: str, hint: str) -> None:
    error = refusal(sets=(text,))
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("sets", [("task.params=5", "task.params.x=1"), ("task.params.x=1", "task.params=5")])
def test_parameters_beside_a_table_of_them_that_is_none_are_refused(sets: tuple[str, str]) -> None:
    assert "task.params = 5 (--set): expected a table" in refusal(sets=sets).message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ASYNCRL_RUN__TRAIN_STEP", "did you mean ASYNCRL_RUN__TRAIN_STEPS?"),
        ("ASYNCRL_RUN_TRAIN_STEPS", "ASYNCRL_RUN__TRAIN_STEPS"),
        ("ASYNCRL_WHATEVER", "ASYNCRL_SECTION__KEY"),
        ("asyncrl_rollout__slot", "did you mean ASYNCRL_ROLLOUT__SLOTS?"),
    ],
)
def test_an_unknown_environment_name_is_an_error(name: str, hint: str) -> None:
    error = refusal(environ={name: "3"})
    assert name in error.message
    assert hint in error.hint


def test_the_servers_token_in_the_environment_is_no_key_of_a_profile() -> None:
    environ = {"ASYNCRL_REMOTE_TOKEN": "a-secret", "ASYNCRL_RUN__SEED": "5"}
    assert load("base", environ=environ) == load("base", environ={"ASYNCRL_RUN__SEED": "5"})


def test_environment_values_are_toml_too_and_their_errors_name_the_variable() -> None:
    environ = {"ASYNCRL_ROLLOUT__STOP": '["x"]', "ASYNCRL_TASK__PARAMS__LOW": "3"}
    profile = load("base", environ=environ).profile
    assert profile.rollout.stop == ("x",)
    assert profile.task.params == {"low": 3}
    origins = load("base", environ={"ASYNCRL_TASK__PARAMS": "{low = 3}"}).origins
    assert origins["task.params.low"] == "environment ASYNCRL_TASK__PARAMS"
    assert "(environment ASYNCRL_RUN__SEED)" in refusal(environ={"ASYNCRL_RUN__SEED": "x"}).message


def test_parameters_in_the_environment_are_put_together_unless_they_are_given_twice() -> None:
    given = {"ASYNCRL_TASK__PARAMS__B__C": "2", "ASYNCRL_TASK__PARAMS__B__D": "x"}
    assert load("base", environ=given).profile.task.params == {"b": {"c": 2, "d": "x"}}
    beside = {"ASYNCRL_TASK__PARAMS": "{a = 1}", "ASYNCRL_TASK__PARAMS__X": "1"}
    assert "ASYNCRL_TASK__PARAMS is given beside ASYNCRL_TASK__PARAMS__X" in refusal(environ=beside).message


def test_all_problems_are_listed_with_all_hints() -> None:
    error = refusal(sets=("run.seed=x", "rollout.n=0", "trainer.lr=0"))
    assert error.message.startswith("3 problems in the configuration:")
    assert all(key in error.message for key in ("run.seed", "rollout.n", "trainer.lr"))
    assert "Seed" in error.hint
    assert len(error.hint.splitlines()) == 3


def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    own = write(tmp_path, "own.toml", 'extends = "base"\n[rollout]\nslot = 3\n[rolout]\nn = 4\n')
    error = refusal(own)
    assert f"{own}: unknown key rollout.slot" in error.message
    assert f"{own}: unknown section rolout" in error.message
    assert error.hint == "did you mean rollout.slots?\ndid you mean rollout?"
    # the same words in its own section, rather than the same name in another
    assert refusal(sets=("async_training.kl_target=0.1",)).hint == "did you mean async_training.target_kl?"


@pytest.mark.parametrize(
    ("table", "unknown", "hints"),
    [
        ("[async]\npartial_rollot = true\non_stale = 'drop'", ["async", "async_training.partial_rollot"], 2),
        ("[rollouts.sampling]\nslots = 8", ["rollouts", "rollout.sampling"], 2),
        ("[mine]\nrequire_batches = 2\non_stale = 'drop'", ["mine"], 1),
    ],
)
def test_the_keys_of_an_unknown_section_are_judged_by_the_section_that_was_meant(
    table: str, unknown: list[str], hints: int, tmp_path: Path
) -> None:
    error = refusal(write(tmp_path, "own.toml", f'extends = "base"\n{table}\n'))
    assert all(f"unknown {'key' if '.' in name else 'section'} {name}" in error.message for name in unknown)
    assert len(error.hint.splitlines()) == hints
    assert any(hint.endswith(("async_training?", " rollout?")) for hint in error.hint.splitlines())


def test_a_key_without_its_section_is_named_with_every_section_that_has_it() -> None:
    assert unknown_key("lr", "profiles keys", [*sections(), *keys()]).hint == (
        "did you mean critic.lr or trainer.lr?"
    )
    assert unknown_key("slots", "profiles keys", [*sections(), *keys()]).hint == "did you mean rollout.slots?"


def test_a_key_that_resembles_none_is_refused_with_those_of_its_section() -> None:
    assert "max_turns" in refusal(sets=("env.qqq=1",)).hint.removeprefix("keys of [env]: ").split(", ")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("placement.rollout.label", "placement.rollout_labels"),
        ("placement.trainer.workers", "placement.trainer_workers"),
        ("placement.rollout.strategy", "placement.rollout_strategy"),
    ],
)
def test_a_dot_in_the_place_of_an_underscore_is_guessed(key: str, meant: str) -> None:
    error = refusal(sets=(f"{key}=x",))
    assert f"unknown key {key}" in error.message
    assert error.hint == f"did you mean {meant}?"


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    own = write(tmp_path, "own.toml", 'extends = "base"\n[run]\ntrain_steps = twenty\n')
    error = refusal(own)
    assert error.message.startswith(f"{own}:3: ")
    assert "train_steps = twenty" in error.hint


def test_one_profile_lies_over_another_and_what_both_extend_stays_below(tmp_path: Path) -> None:
    own = 'extends = "base"\npurpose = "Mine."\n[rollout]\nslots = 32\n[trainer]\nlr = 1e-5\n'
    write(tmp_path, "own.toml", own)
    write(tmp_path, "over.toml", 'extends = "partial-rollout"\n[trainer]\nlr = 2e-5\n')
    loaded = load(f"{tmp_path}/own.toml+{tmp_path}/over.toml", environ={})
    profile, origins = loaded.profile, loaded.origins
    assert (profile.rollout.slots, profile.trainer.lr) == (32, 2e-5)
    assert profile.async_training.partial_rollout
    assert (profile.name, profile.purpose) == ("own+over", "Mine.")
    assert "over.toml" in origins["trainer.lr"]
    assert "base.toml" in origins["rollout.n"]
    with pytest.raises(ConfigError, match="no profile 'stale'"):
        load("base+stale", environ={})


def test_a_cycle_of_extends_names_the_whole_chain(tmp_path: Path) -> None:
    for name, above in (("a", "b.toml"), ("b", "c.toml"), ("c", "a.toml")):
        write(tmp_path, f"{name}.toml", f'extends = "{above}"\n')
    message = refusal(str(tmp_path / "a.toml")).message
    assert " -> ".join(str(tmp_path / f"{name}.toml") for name in "abca") in message


def test_a_profile_may_have_the_name_of_the_one_it_extends(tmp_path: Path) -> None:
    own = write(tmp_path, "base.toml", 'extends = "base"\n[run]\nseed = 5\n')
    profile = load(own, environ={}).profile
    above = load("base", environ={}).profile.run
    assert (profile.run.seed, profile.run.train_steps) == (5, above.train_steps)


def test_a_missing_profile_names_the_nearest_one_and_who_wanted_it(tmp_path: Path) -> None:
    assert "did you mean `partial-rollout`?" in refusal("partial-rolout").hint
    assert "does not exist" in refusal(str(tmp_path / "none.toml")).message
    write(tmp_path, "tiny.toml", "")
    assert refusal(str(tmp_path / "tinyy.toml")).hint == f"did you mean {tmp_path}/tiny.toml?"
    assert refusal(str(tmp_path / "partial-rolout.toml")).hint == "asyncrl has a profile `partial-rollout`"
    own = write(tmp_path, "own.toml", 'extends = "bass"\n')
    error = refusal(own)
    assert error.message.startswith(f'{own}: extends = "bass"')
    assert "did you mean `base`?" in error.hint


@pytest.mark.parametrize("content", [b"\xff\xfe", b"extends = 3\n"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    assert str(path) in refusal(str(path)).message


def test_a_directory_is_no_profile(tmp_path: Path) -> None:
    assert "is a directory" in refusal(f"{tmp_path}/").message
    (tmp_path / "my.toml").touch()
    assert refusal(f"{tmp_path}").hint == f"a profile is a TOML file, such as {tmp_path}/my.toml"


def test_a_file_without_its_ending_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert refusal("my").hint == "did you mean my.toml?"
    assert refusal("/nowhere.toml").hint == "`asyncrl profiles` lists the profiles by name"


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a/base.toml with its reward, c/my.toml that extends it, and an empty working directory."""
    for name in ("a", "c", "here"):
        (tmp_path / name).mkdir()
    write(tmp_path / "a", "base.toml", 'extends = "base"\n[task]\nreward = "rewards:score"\n')
    write(tmp_path / "a", "rewards.py", "")
    write(tmp_path / "c", "my.toml", 'extends = "../a/base.toml"\n')
    write(tmp_path / "c", "my_env.py", "")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_modules_are_beside_the_file_of_the_chain_that_names_them(projects: Path) -> None:
    loaded = load(str(projects / "c" / "my.toml"), environ={})
    assert loaded.profile.task.import_path == str(projects / "a")
    assert loaded.origins["task.import_path"] == f"profile base ({projects}/a/base.toml)"


def test_a_chain_whose_modules_are_in_two_directories_is_refused_unless_one_is_named(projects: Path) -> None:
    with (projects / "c" / "my.toml").open("a") as file:
        file.write('[task]\nenvironment = "my_env:E"\n')
    reference = str(projects / "c" / "my.toml")
    with pytest.raises(ConfigError) as refused:
        load(reference, environ={})
    assert refused.value.message == (
        f'task.reward = "rewards:score" names a module in {projects}/a, but task.environment = "my_env:E" '
        f"one in {projects}/c: task.import_path is one directory"
    )
    assert "task.import_path=DIR" in refused.value.hint
    chosen = load(reference, [f"task.import_path={projects}/c"], environ={}).profile
    assert chosen.task.import_path == str(projects / "c")


def test_a_module_of_a_set_or_the_environment_is_one_of_the_working_directory(projects: Path) -> None:
    def import_path(*sets: str, **environ: str) -> str | None:
        return load(str(projects / "c" / "my.toml"), sets, environ=environ).profile.task.import_path

    assert import_path("task.reward=rewards:score") is None
    assert import_path(ASYNCRL_TASK__REWARD="rewards:score") is None
    assert import_path("task.environment=mine:E") == str(projects / "a")
    with pytest.raises(ConfigError, match=f'but task.environment = "rewards:E" one in {projects}/here:'):
        import_path("task.environment=rewards:E")


def test_declarations_of_a_set_are_found_again_from_elsewhere(projects: Path) -> None:
    write(projects / "here", "my_fields.py", "")
    loaded = load("base", ["task.fields=my_fields:FIELDS"], environ={})
    assert loaded.profile.task.import_path == str(projects / "here")
    assert loaded.origins["task.import_path"] == "--set"
    assert load("base", ["task.fields=installed:FIELDS"], environ={}).profile.task.import_path is None


def test_a_file_of_another_kind_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo.yaml").write_text("trainer:\n  lr: 1e-6\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a profile: the name of a TOML file ends in"):
        load("grpo.yaml", environ={})
