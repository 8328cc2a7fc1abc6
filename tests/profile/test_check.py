from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.toml_files import shipped_profiles, shipped_templates

ON_GPUS = ("rollout.engine=vllm", "placement.device=cuda")

# fmt: off
TABLE = (
    ("partial-rollout", 'placement.tasks=[["train"],["ref"],["rollout"]]',
     ["asks for the reference's logprobs"], "use_kl_loss=true"),
    ("partial-rollout", 'placement.tasks=[["train"],["prox"],["rollout"]]',
     ["old_logprobs", "has no such pass"], "old_logprobs=recompute"),
    ("partial-rollout",
     'placement.tasks=[["train"],["prox"],["rollout"]] algorithm.old_logprobs=recompute lora.rank=8 '
     'model.dtype=bfloat16',
     ["lora.rank = 8", "rounding to bfloat16"], "beside train"),
    ("partial-rollout",
     'placement.tasks=[["train"],["prox"],["rollout"]] algorithm.old_logprobs=recompute '
     'rollout.engine=vllm placement.device=cuda weights.transport=nccl',
     ["and nowhere else"], "transport=object-store"),
    ("partial-rollout", 'algorithm.use_kl_loss=true placement.tasks=[["train"],["ref","prox"],["rollout"]]',
     ["only with train"], "each"),
    ("partial-rollout", 'placement.tasks=[["train"],["reward"],["rollout"]]',
     ["no reward model"], "reward_model.path"),
    ("partial-rollout", 'placement.tasks=[["train"],["surprise"],["rollout"]]',
     ["names a task that does not exist"], "there are train, ref,"),
    ("partial-rollout", 'task.scorers={x="m:X"} placement.tasks=[["train","x"],["rollout"]]',
     ["never in the trainer"], '["x"]'),
    ("colocate", 'task.scorers={x="m:X"}',
     ["a scorer of yours needs its own"], "placement.colocate=false"),
    ("partial-rollout", 'reward_model.path=judge placement.tasks=[["train","reward"],["rollout"]]',
     ["needed before groups are taken"], '["reward"]'),
    ("colocate", "reward_model.path=judge",
     ["reward model needs its own", "take turns"], "placement.colocate=false"),
    ("partial-rollout", "task.reward=none", ["nothing gives a reward"], "reward_model.path"),
    ("partial-rollout", 'placement.tasks=[["train"],["critic"],["rollout"]]',
     ["nothing asks for values"], "adv_estimator=gae"),
    ("partial-rollout",
     'placement.tasks=[["train"],["critic"],["rollout"]] algorithm.adv_estimator=gae '
     'algorithm.use_kl_in_reward=true',
     ["the critic's returns need the reference's logprobs"], "a list of its own"),
    ("partial-rollout", 'placement.tasks=[["train","rollout"]]',
     ["only if they take turns"], "placement.colocate=true"),
    ("partial-rollout", 'placement.tasks=[["train"],["train"],["rollout"]]',
     ["names a task more than once"], "each task once"),
    ("partial-rollout", 'placement.tasks=[["train"]]', ["has no rollout"], '["rollout"]'),
    ("partial-rollout", "placement.ratios=[1,1]", ["placement.ratios = [1, 1]"], "placement.ratio"),
    ("partial-rollout", "rollout.workers=2 rollout.slots=6 rollout.min_workers=1",
     ["rollout.slots = 6", "fewer slots than a group needs"], "rollout.min_workers=2, or rollout.slots=8"),
    ("partial-rollout",
     'algorithm.use_kl_loss=true placement.tasks=[["train"],["ref"],["rollout"]] placement.ratios=[1,1]',
     ["placement.ratios = [1, 1]", "each list"], "each list"),
    ("colocate", 'algorithm.use_kl_loss=true placement.tasks=[["train"],["ref"],["rollout"]]',
     ["colocate = true"], "leave one of the two out"),
    ("partial-rollout", "async_training.staleness_threshold=0",
     ["async_training.partial_rollout = true",
     "async_training.staleness_threshold = 0"], "staleness_threshold=0.5"),
    ("partial-rollout", "async_training.staleness_threshold=0.05 trainer.ppo_mini_batch_size=3",
     ["partial_rollout = true", "staleness_threshold = 0.05",
     "floor((1 + 0.05) * W) = W = 12"], "staleness_threshold=0.08334 or more"),
    ("partial-rollout", "async_training.mixed_versions=requeue rollout.interrupt=restart",
     ['async_training.mixed_versions = "requeue"', 'rollout.interrupt = "restart"'],
     "leave one of the two out"),
    ("stale-samples", "async_training.mixed_versions=reject",
     ['async_training.mixed_versions = "reject"', "none has tokens of two versions"], "partial_rollout=true"),
    ("stale-samples", "rollout.interrupt=keep-kv",
     ['rollout.interrupt = "keep-kv"', "async_training.partial_rollout"], "partial_rollout=true"),
    ("colocate", "async_training.staleness_threshold=0.5",
     ["placement.colocate = true", "staleness_threshold = 0.5"], "staleness_threshold=0"),
    ("stale-samples", "async_training.staleness_threshold=1.2 async_training.max_staleness=1",
     ["max_staleness = 1", "ceil(1.2) = 2"], "max_staleness=2"),
    ("base", "async_training.target_kl=0.02",
     ["target_kl = 0.02", "nothing to steer"], "staleness_threshold=1"),
    ("base", "async_training.max_staleness=1",
     ["max_staleness = 1", "staleness_threshold = 0"], "max_staleness=0"),
    ("base", "async_training.on_stale=drop",
     ['on_stale = "drop"', "staleness_threshold = 0"], "on_stale=wait"),
    ("base", "run.train_steps=10 run.total_rollout_steps=320",
     ["run.train_steps = 10", "run.total_rollout_steps = 320", "20 train steps"], "one of the two"),
    ("base", "run.total_rollout_steps=100", ["total_rollout_steps = 100", "R = 16"], "=96 or 112"),
    ("base", "run.total_rollout_steps=15", ["total_rollout_steps = 15", "R = 16"], "total_rollout_steps=16"),
    ("base", "env.max_context_tokens=256",
     ["max_context_tokens = 256", "max_prompt_tokens = 256"], "max_context_tokens=352"),
    ("base", "env.tool_timeout_s=900",
     ["tool_timeout_s = 900", "episode_timeout_s = 600"], "episode_timeout_s=900"),
    ("base", "algorithm.use_kl_loss=true algorithm.kl_target=0.1",
     ["algorithm.kl_target = 0.1", "that of the KL in the loss is fixed"], "use_kl_in_reward=true"),
    ("base", "algorithm.use_kl_in_reward=true algorithm.kl_horizon=100",
     ["algorithm.kl_horizon = 100", "no target to follow"], "algorithm.kl_target=0.1"),
    ("base", "algorithm.use_kl_in_reward=true algorithm.kl_target=0.1 algorithm.kl_coef=0",
     ["algorithm.kl_coef = 0", "remain 0"], "algorithm.kl_coef=0.001"),
    ("base", 'task.reward={"a/b"={use="exact-match"},right={use="math-verify"}}',
     ['"a/b" cannot be the name of a metric'], "such as right"),
    ("base", 'task.reward={get_reward={use="exact-match"},right={use="math-verify"}}',
     ['"get_reward" cannot be the name of a metric'], "get_reward are taken"),
    ("base", 'task.reward={right={use="math-verify"},math-verify=0.5}', ["named twice"], "weight"),
    ("base", "task.curriculum=0.5 rollout.n=1 algorithm.adv_estimator=gae",
     ["task.curriculum = 0.5", "rollout.n = 1"], "rollout.n=8"),
    ("base", "rollout.slots=7", ["rollout.slots = 7", "rollout.n = 8"], "rollout.slots=8"),
    ("base", "rollout.slots=3 rollout.workers=2",
     ["rollout.slots = 3 on 2 workers", "rollout.n = 8"], "rollout.slots=4"),
    ("base", "rollout.slots=4 rollout.workers=2 rollout.placement=group",
     ["rollout.slots = 4 is"], "rollout.slots=8"),
    ("base", "async_training.use_rollout_log_probs=false algorithm.old_logprobs=rollout",
     ["use_rollout_log_probs = false", 'old_logprobs = "rollout"'], "one of the two"),
    ("base", "algorithm.rollout_is_threshold=2",
     ["algorithm.rollout_is_threshold = 2",
     'algorithm.old_logprobs = "rollout"', "every weight is 1"], "old_logprobs=recompute"),
    ("base", "algorithm.rollout_is_threshold=2 async_training.use_rollout_log_probs=true",
     ["algorithm.rollout_is_threshold = 2", 'algorithm.old_logprobs = "rollout"'], "old_logprobs=recompute"),
    ("base",
     "algorithm.adv_estimator=gae critic.head_start_steps=12 run.train_steps=4 "
     "async_training.require_batches=3",
     ["critic.head_start_steps = 12", "12 optimizer steps", "never trained"], "critic.head_start_steps"),
    ("base", "algorithm.rollout_is=geometric",
     ['algorithm.rollout_is = "geometric"', 'algorithm.old_logprobs = "rollout"',
     "every weight is 1"], "old_logprobs=recompute"),
    ("base", "algorithm.rollout_is_batch_normalize=true algorithm.old_logprobs=loglinear",
     ["rollout_is_batch_normalize = true",
     'old_logprobs = "loglinear"', "before the first loss"], "old_logprobs=recompute"),
    ("base",
     "algorithm.rollout_is_batch_normalize=true algorithm.old_logprobs=recompute "
     "algorithm.loss_mode=reinforce",
     ["rollout_is_batch_normalize = true", 'loss_mode = "reinforce"'], "loss_mode=vanilla"),
    ("base", "algorithm.rollout_rs=token_k1", ['rollout_rs = "token_k1"', "needs a threshold"], '"0.5_2.0"'),
    ("base", "algorithm.rollout_rs=seq_mean_k1 algorithm.rollout_rs_threshold=0.01",
     ['rollout_rs = "seq_mean_k1" with', "rollout_rs_threshold = 0.01",
     "must be above 1"], "rollout_rs_threshold=2.0"),
    ("base", "algorithm.rollout_rs_threshold=2",
     ["rollout_rs_threshold = 2", "no rule uses the threshold"], "seq_mean_k3"),
    ("base", "algorithm.rollout_rs=seq_max_k2 algorithm.rollout_rs_threshold=0.5_2.0",
     ['rollout_rs = "seq_max_k2"', 'rollout_rs_threshold = "0.5_2.0"',
     "only have an upper bound"], "rollout_rs_threshold=0.01"),
    ("base", "algorithm.clip_ratio_c=3 algorithm.loss_mode=gspo",
     ["clip_ratio_c = 3", '"gspo"'], "loss_mode=vanilla"),
    ("base", "critic.lr=1e-5", ["critic.lr = 1e-05", 'adv_estimator = "grpo"'], "adv_estimator=gae"),
    ("base", "algorithm.bootstrap_truncated=true",
     ["bootstrap_truncated = true", 'adv_estimator = "grpo"'], "adv_estimator=gae"),
    ("base", "algorithm.adv_estimator=gae algorithm.bootstrap_truncated=true algorithm.mask_truncated=true",
     ["bootstrap_truncated = true", "mask_truncated = true"], "leave one of the two out"),
    ("base", "algorithm.lam=0.9",
     ["algorithm.lam = 0.9", 'adv_estimator = "grpo"'], "leave algorithm.lam out"),
    ("base", "algorithm.kl_loss_coef=0.1", ["kl_loss_coef = 0.1", "use_kl_loss = false"], "use_kl_loss=true"),
    ("base", "algorithm.kl_coef=0.1", ["kl_coef = 0.1", "use_kl_in_reward = false"], "use_kl_in_reward=true"),
    ("base", "ref.path=/a/model",
     ["ref.path", "use_kl_loss = false", "use_kl_in_reward = false"], "kl_loss_coef=0"),
    ("base", "algorithm.adv_estimator=none",
     ['adv_estimator = "none"', "no teacher.path", "nor a teacher"], "adv_estimator=grpo"),
    ("base", "algorithm.adv_estimator=none teacher.path=/a/model algorithm.filter_groups=true",
     ["filter_groups = true", 'adv_estimator = "none"'], "leave algorithm.filter_groups out"),
    ("base", "algorithm.adv_estimator=none teacher.path=/a/model algorithm.distill_coef=0",
     ['adv_estimator = "none"', "distill_coef = 0"], "distill_coef=1"),
    ("base", "algorithm.distill_loss=full", ['distill_loss = "full"', "no teacher.path"], "teacher.path="),
    ("base",
     'algorithm.distill_loss=full teacher.path=/a placement.tasks=[["train"],["teacher"],["rollout"]]',
     ["not sent between processes"], "distill_loss=sampled"),
    ("base", "algorithm.distill_loss=full teacher.path=/a trainer.sequence_parallel_size=2 "
     "rollout.engine=vllm placement.device=cuda", ["share no distributions"], "sequence_parallel_size=1"),
    ("base", "algorithm.distill_coef=0.5", ["distill_coef = 0.5", "no teacher.path"], "teacher.path="),
    ("base", 'teacher.path={math="/a",code="/b"}',
     ["teacher.path = {", "no teacher.column"], "teacher.column="),
    ("base", "teacher.path=/a teacher.column=kind",
     ['teacher.column = "kind"', 'teacher.path = "/a"', "one of several"], "leave teacher.column out"),
    ("base", 'placement.tasks=[["train"],["teacher"],["rollout"]]',
     ["placement.tasks", "there is no teacher"], "leave teacher out"),
    ("base", "algorithm.use_kl_in_reward=true algorithm.mask_truncated=true",
     ["use_kl_in_reward = true", "mask_truncated = true", "have no KL"], "use_kl_loss=true"),
    ("base", "rollout.n=1", ['adv_estimator = "grpo"', "rollout.n = 1"], "adv_estimator=gae"),
    ("base", "algorithm.filter_groups=true rollout.n=1",
     ["filter_groups = true", "rollout.n = 1"], "rollout.n=8"),
    ("base", "algorithm.overlong_buffer_tokens=5000",
     ["overlong_buffer_tokens = 5000", "rollout.max_response_tokens"], "overlong_buffer_tokens="),
    ("base", "rollout.engine=vllm weights.dual_buffer=false",
     ["weights.dual_buffer = false", 'rollout.engine = "vllm"'], "weights.dual_buffer=true"),
    ("base", "rollout.engine=vllm rollout.engine_args={max_num_seqs=4}",
     ["engine_args.max_num_seqs"], "rollout.slots"),
    ("base",
     "rollout.engine=vllm weights.probe_sequences=4 rollout.max_prompt_tokens=8 "
     "rollout.max_response_tokens=8 rollout.max_model_len=16",
     ["rollout.max_model_len = 16", "a probe"], "rollout.max_model_len=33"),
    ("base", "weights.transport=directory", ['transport = "directory"', "there is no URL"], "weights.url=s3://"),
    ("base", "weights.url=s3://bucket/path",
     ['url = "s3://bucket/path"', 'transport = "object-store"'], "--set weights.transport=directory"),
    ("base", "weights.transport=directory weights.url=file:///x weights.dual_buffer=false",
     ["weights.dual_buffer = false", 'transport = "directory"'], "weights.transport=object-store"),
    ("base", "weights.transport=directory weights.url=/local/path",
     ['weights.url = "/local/path" is not a URL'], "file:///path"),
    ("base", "weights.transport=directory weights.url=memory://x",
     ["it lies in one process"], "file:///path"),
    ("base", "rollout.engine=remote weights.transport=disk", ["needs rollout.urls"], "asyncrl serve"),
    ("base", 'rollout.engine=remote rollout.urls=["http://me:pw@host:1"] weights.transport=disk',
     ['rollout.urls: "host:1" is not of the form'], "http://host:8000"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a:8000/v1"] weights.transport=disk',
     ['rollout.urls: "http://a:8000/v1" is not of the form http://HOST:PORT'], "no path"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a","http://a"] weights.transport=disk',
     ["rollout.urls: http://a is there 2 times"], "each server once"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a:2/","http://a:2"] weights.transport=disk',
     ["rollout.urls: http://a:2 is there 2 times"], "each server once"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a:1"]',
     ['weights.transport = "object-store"', "from files"], "weights.transport=directory"),
    ("colocate", 'rollout.engine=remote rollout.urls=["http://a:1"] weights.transport=disk',
     ["placement.colocate", "resources of its own"], "leave placement.colocate out"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a:1"] weights.transport=disk rollout.workers=2',
     ["rollout.workers", "each server is a worker"], "leave rollout.workers out"),
    ("base", 'rollout.urls=["http://a:1"]',
     ['rollout.urls = ["http://a:1"]', 'rollout.engine = "transformers"'], "rollout.engine=remote"),
    ("base", 'rollout.engine=remote rollout.urls=["http://a:1"] weights.transport=disk rollout.top_p=0.9',
     ['rollout.engine = "remote" does not return the tokens'], "rollout.sampling_mask=false"),
    ("base", "weights.transport=disk weights.dual_buffer=false",
     ["weights.dual_buffer = false", 'weights.transport = "disk"'], "weights.transport=object-store"),
    ("base", "lora.sync=adapter", ['lora.sync = "adapter"', "lora.rank = 0"], "lora.rank=8"),
    ("base", "lora.rank=600 lora.sync=adapter rollout.engine=vllm",
     ["lora.rank = 600", "ranks up to 512"], "rollout.engine_args={enable_lora=false}"),
    ("base", "lora.rank=8 lora.sync=adapter rollout.engine=vllm rollout.engine_args={max_lora_rank=4}",
     ["rollout.engine_args.max_lora_rank is set by asyncrl"], "--set lora.rank=..."),
    ("base", "lora.rank=8 lora.sync=adapter weights.keep_versions=2",
     ['lora.sync = "adapter"', "weights.keep_versions = 2"], "lora.sync=merged"),
    ("base", "weights.transport=disk weights.encoding=delta",
     ['weights.encoding = "delta"', 'weights.transport = "disk"'], "weights.encoding=auto"),
    ("base", "weights.encoding=delta weights.transport=directory weights.url=file:///versions "
     'rollout.engine=remote rollout.urls=["http://a:1"]',
     ['weights.encoding = "delta"', 'rollout.engine = "remote"', "whole versions"], "weights.encoding=full"),
    ("base", "weights.transport=nccl placement.device=cuda",
     ['transport = "nccl"', 'engine = "transformers"'], "engine=vllm"),
    ("base", "weights.transport=nccl rollout.engine=vllm",
     ['transport = "nccl"',
     'device = "auto"'], "--set placement.device=cuda, or --set weights.transport=object-store"),
    ("colocate", "weights.transport=ipc rollout.engine=vllm placement.device=cpu",
     ['transport = "ipc"', 'device = "cpu"'], "--set placement.device=cuda"),
    ("colocate", "weights.transport=nccl rollout.engine=vllm placement.device=cuda",
     ['transport = "nccl"', "placement.colocate = true", "share one"], "--set weights.transport=ipc"),
    ("base", "eval.samples_per_prompt=4 eval.temperature=0",
     ["eval.samples_per_prompt = 4", "are the same"], "--set eval.samples_per_prompt=1"),
    ("base", "weights.transport=ipc rollout.engine=vllm placement.device=cuda",
     ['transport = "ipc"', "placement.colocate = false"], "--set weights.transport=nccl"),
    ("base", "weights.transport=nccl weights.dual_buffer=false rollout.engine=vllm placement.device=cuda",
     ["weights.dual_buffer = false",
     'transport = "nccl"', "no second buffer"], "--set weights.dual_buffer=true"),
    ("colocate", "weights.transport=ipc weights.probe_sequences=0 rollout.engine=vllm placement.device=cuda",
     ["weights.probe_sequences = 0",
     'transport = "ipc"', "fingerprints are not compared"], "--set weights.probe_sequences=4"),
    ("base", "rollout.enforce_eager=true",
     ["rollout.enforce_eager = true with rollout.engine"], "rollout.engine=vllm"),
    ("base", "rollout.engine_args={block_size=32}",
     ["rollout.engine_args = {block_size = 32} with"], "rollout.engine=vllm"),
    ("base", "rollout.engine=vllm rollout.max_model_len=100",
     ["rollout.max_model_len = 100"], "max_model_len=352"),
    ("base", "rollout.engine=vllm rollout.top_p=0.9 rollout.sampling_mask=false rollout.temperature=0.7",
     ["rollout.temperature = 0.7"], "transformers"),
    ("base", "rollout.engine=vllm rollout.top_k=9 rollout.sampling_mask=false eval.temperature=0.7",
     ["eval.temperature = 0.7"], "transformers"),
    ("base", "rollout.engine=vllm rollout.top_p=0.9",
     ["rollout.top_k = 0", "lists only the most likely tokens"], "--set rollout.top_k=64"),
    ("base", "rollout.engine=vllm rollout.top_k=65",
     ["rollout.top_k = 65", "a top_k of 1 to 64"], "sampling_mask=false"),
)
# fmt: on
CONFLICTS = [(profile, sets.split(), parts, hint) for profile, sets, parts, hint in TABLE]
"""(profile, keys, parts of the message, a part of the hint)"""


@pytest.mark.parametrize(("reference", "sets", "parts", "hint"), CONFLICTS)
def test_a_combination_that_makes_no_sense_is_refused_with_numbers_and_a_fix(
    reference: str, sets: list[str], parts: list[str], hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(reference, sets, environ={})
    assert caught.value.exit_code == 2
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("reference", "transport"), [("partial-rollout", "nccl"), ("stale-samples", "nccl"), ("colocate", "ipc")]
)
def test_weights_may_go_from_gpu_to_gpu_where_vllm_computes_on_gpus(reference: str, transport: str) -> None:
    loaded = load(reference, [f"weights.transport={transport}", *ON_GPUS], environ={})
    assert loaded.profile.weights.transport == transport


def test_a_run_without_a_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[rollout]\nn = 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="the run has no length") as caught:
        load(str(path), environ={})
    assert "run.train_steps" in caught.value.hint


def test_several_conflicts_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("partial-rollout", ["async_training.staleness_threshold=0", "rollout.slots=4"], environ={})
    assert caught.value.message.count("\n  - ") == 2


def test_what_is_shipped_warns_of_nothing_and_profiles_say_their_purpose() -> None:
    of_templates = [str(path) for place in shipped_templates().values() for path in place.glob("*.toml")]
    loaded = {name: load(name, environ={}) for name in (*shipped_profiles(), *of_templates)}
    assert not [name for name, one in loaded.items() if one.warnings]
    for name in shipped_profiles():
        assert loaded[name].profile.name == name
        assert loaded[name].profile.purpose


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rollout.sampling_mask=false rollout.top_p=0.9", "top_p = 0.9"),
        ("rollout.sampling_mask=false rollout.top_k=20", "top_k = 20"),
        ("rollout.sampling_mask=false rollout.min_p=0.1", "min_p = 0.1"),
        ("trainer.lr=0.1", "trainer.lr = 0.1 is a doubtful value, more than 0.01: AdamW moves"),
        ("trainer.ppo_epochs=50", "trainer.ppo_epochs = 50 is a doubtful value"),
        ("task.train_prompts=8", "R = 16"),
        ("trainer.warmup_steps=200", "110 optimizer steps"),
        ("run.stall_timeout_s=600.0", "rollout.call_timeout_s = 600"),
        ("async_training.staleness_threshold=0.06", "no group is generated ahead"),
    ],
)
def test_what_is_allowed_but_odd_is_a_warning(text: str, part: str) -> None:
    (warning,) = load("base", text.split(), environ={}).warnings
    assert part in warning


@pytest.mark.parametrize(
    ("reference", "sets"),
    [
        ("partial-rollout", ["rollout.interrupt=recompute-kv"]),
        ("stale-samples", ["async_training.max_staleness=5", "async_training.on_stale=requeue"]),
        ("stale-samples", ["algorithm.old_logprobs=recompute"]),
        ("base", ["run.train_steps=20", "run.total_rollout_steps=320"]),
        ("base", ["rollout.engine=vllm", "rollout.temperature=0.7", "rollout.engine_args={block_size=32}"]),
        ("base", ["rollout.engine=vllm", "rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=64"]),
        ("base", ["rollout.temperature=0.7", "rollout.min_p=0.1", "rollout.top_p=0.9"]),
        ("base", ["rollout.sampling_mask=false"]),
        ("base", ["async_training.use_rollout_log_probs=true", "algorithm.old_logprobs=rollout"]),
        ("base", ["algorithm.rollout_is_threshold=2", "async_training.use_rollout_log_probs=false"]),
    ],
)
def test_combinations_that_make_sense_pass(reference: str, sets: list[str]) -> None:
    assert load(reference, sets, environ={}).warnings == ()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("trainer.lr=[1", "--set trainer.lr: [1 is not a valid value: unclosed array", "quoted"),
        ("lora.target_modules=[q_proj]", "--set lora.target_modules: [q_proj] is not a valid", '["a", "b"]'),
        ('task.source="x', '"x is not a valid value: unterminated string', "quoted"),
        ('task.reward={a={use="b:c", wieght=2}}', 'table of "a" has an unknown key wieght', "{use = "),
        ("task.reward={a={weight=2}}", 'the table of "a" lacks use', "{use = "),
        ('task.reward={a={use="b:c", weight="2"}}', 'weight in the table of "a": input should be', "{use = "),
    ],
)
def test_what_is_no_toml_or_no_table_of_a_reward_is_said_of_the_value_itself(text, message, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        load("base", [text], environ={})
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.hint) < 120  # no description of all that the key may be


def test_a_file_with_a_value_in_quotes_that_is_no_toml_is_refused_by_its_type(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text("[trainer]\nlr = '[1'\n")
    with pytest.raises(ConfigError, match="expected a number above 0"):
        load(str(tmp_path / "mine.toml"), environ={})


@pytest.mark.parametrize(
    "url", ["sftp://me:hunter2@host/path", "https://host/path?signature=hunter2", "https://hunter2@host/path"]
)
@pytest.mark.parametrize("transport", ["directory", "object-store"])
def test_a_url_with_credentials_is_refused_and_never_shown(url, transport):
    sets = [f"weights.transport={transport}", f"weights.url={url}"]
    with pytest.raises(ConfigError, match=r"weights\.url holds credentials") as refused:
        load("base", sets, environ={})
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"
    assert "AWS_ACCESS_KEY_ID" in refused.value.hint
