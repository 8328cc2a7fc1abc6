"""Keys of other trainers, and those that stand for them here: the hint of an unknown key, and the tables of docs/coming-from.md.

A key whose last part is the same in both, with the same meaning, is not in the table: the nearest known key is named anyway.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

TABLE = """
[verl]
async_training.trigger_parameter_sync_step | async_training.trigger_parameter_sync_step | the same
async_training.staleness_threshold | async_training.staleness_threshold | the same; max_staleness bounds it strictly, in versions
async_training.require_batches | async_training.require_batches | the same
async_training.partial_rollout | async_training.partial_rollout | refused where staleness_threshold is 0; verl ignores it
async_training.use_rollout_log_probs | async_training.use_rollout_log_probs | an alias of algorithm.old_logprobs
async_training.compute_prox_log_prob | algorithm.old_logprobs | true is "recompute"
rollout.total_rollout_steps | run.total_rollout_steps | groups in both; a multiple of require_batches * ppo_mini_batch_size
rollout.test_freq | eval.every_versions | versions in both: a version is a parameter update
rollout.nnodes | rollout.nnodes | the same; or rollout.workers
rollout.n_gpus_per_node | rollout.n_gpus_per_node | the same
trainer.nnodes | trainer.nnodes | the same; or placement.trainer_workers, or placement.gpus with placement.ratio
trainer.n_gpus_per_node | trainer.n_gpus_per_node | the same
data.train_files | task.source | "parquet:<file>"; several by a pattern, "parquet:train-*.parquet"
data.val_files | eval.sets and task.eval_path | sets by name; or one file in place of the held-out prompts
data.prompt_key | task.prompt_key | the same; text or messages
data.train_batch_size | async_training.trigger_parameter_sync_step | groups per sync: this * require_batches * ppo_mini_batch_size
data.gen_batch_size | - | groups are always admitted one by one
data.max_prompt_length | rollout.max_prompt_tokens | a longer prompt is refused, never cut
data.filter_overlong_prompts | - | a prompt longer than rollout.max_prompt_tokens is refused by name; leave it out of the file
data.truncation | rollout.max_prompt_tokens | a longer prompt is refused, never cut
data.max_response_length | rollout.max_response_tokens | of one turn
data.shuffle | run.seed | every epoch is in an order of its own, which follows from the seed
data.return_raw_chat | - | messages are always rendered by the model's chat template
data.train_max_samples | task.train_prompts | the file's first prompts
data.val_max_samples | eval.prompts
actor_rollout_ref.hybrid_engine | placement.colocate | true there is true here
actor_rollout_ref.async_pipeline | - | generation, training and weight transfer always overlap
actor_rollout_ref.model.path | model.path
actor_rollout_ref.model.enable_gradient_checkpointing | trainer.activation_checkpointing | true is "full"
actor_rollout_ref.model.lora_rank | lora.rank | merged at each sync, or sent alone (`lora.sync`)
actor_rollout_ref.model.lora_alpha | lora.alpha
actor_rollout_ref.model.target_modules | lora.target_modules | a list of names; all-linear is an empty list
actor_rollout_ref.actor.ppo_mini_batch_size | trainer.ppo_mini_batch_size | groups over all ranks in both
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | trainer.max_tokens_per_microbatch | padded tokens of one rank
actor_rollout_ref.actor.ulysses_sequence_parallel_size | trainer.sequence_parallel_size | the same
actor_rollout_ref.actor.fsdp_config.optimizer_offload | trainer.offload_optimizer | moments only; the step is made on the GPU
actor_rollout_ref.actor.use_dynamic_bsz | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
actor_rollout_ref.actor.ppo_epochs | - | every group is trained once
actor_rollout_ref.actor.strategy | - | always FSDP2
actor_rollout_ref.actor.optim.lr_warmup_steps | trainer.warmup_steps | optimizer steps in both
actor_rollout_ref.actor.clip_ratio | algorithm.clip_ratio_low and algorithm.clip_ratio_high | the same value for both
actor_rollout_ref.actor.clip_ratio_high | algorithm.clip_ratio_high | 0.28 if not given, 0.2 in verl
actor_rollout_ref.actor.clip_ratio_c | algorithm.clip_ratio_c | off if not given, 3 in verl
actor_rollout_ref.actor.loss_agg_mode | algorithm.loss_agg_mode | the same values
actor_rollout_ref.actor.policy_loss.loss_mode | algorithm.loss_mode | vanilla, gspo, cispo, dppo, sapo, reinforce
actor_rollout_ref.actor.kl_loss_type | algorithm.kl_loss_type | kl is k1, mse is k2; k1+ and k3+ train as k2
actor_rollout_ref.actor.entropy_coeff | - | no entropy bonus
actor_rollout_ref.ref.log_prob_use_dynamic_bsz | trainer.max_tokens_per_microbatch | it scores the microbatches that are trained
actor_rollout_ref.rollout.n | rollout.n
actor_rollout_ref.rollout.name | rollout.engine | "vllm" or "transformers"
actor_rollout_ref.rollout.mode | - | engines are always asynchronous
actor_rollout_ref.rollout.calculate_log_probs | - | every sampled token carries its logprob and its version
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
actor_rollout_ref.rollout.top_p | rollout.top_p | warned of below 1: the trained distribution is another
actor_rollout_ref.rollout.top_k | rollout.top_k | off is 0 here, -1 there
actor_rollout_ref.rollout.max_num_seqs | rollout.slots | sequences of one worker at once
actor_rollout_ref.rollout.tensor_model_parallel_size | placement.gpus_per_rollout_worker | on CPUs rollout.tensor_parallel_size
actor_rollout_ref.rollout.enable_dual_buffer | weights.dual_buffer | the same
actor_rollout_ref.rollout.enable_param_async | weights.mode | true is "async"; how weights travel is weights.transport
actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb | weights.gather_bucket_size_mb | MiB, 2048 in both
actor_rollout_ref.rollout.param_update_consume_bucket_size_mb | weights.load_bucket_size_mb | MiB, 128 in both; nccl and ipc
actor_rollout_ref.rollout.multi_turn.enable | task.environment | module:Class with tools; or task.agent
actor_rollout_ref.rollout.multi_turn.tool_config_path | task.environment | module:Class; its public methods are the tools
actor_rollout_ref.rollout.multi_turn.max_assistant_turns | env.max_turns
actor_rollout_ref.rollout.val_kwargs.n | eval.samples_per_prompt
actor_rollout_ref.rollout.val_kwargs.temperature | eval.temperature | 1 if not given, 0 in verl
algorithm.adv_estimator | algorithm.adv_estimator | grpo, rloo, REINFORCE++ and gae
algorithm.norm_adv_by_std_in_grpo | algorithm.normalize_advantages
algorithm.filter_groups.enable | algorithm.filter_groups | true or false; groups are replaced one by one
algorithm.filter_groups.metric | - | task.reward is compared, as with verl's "acc"
algorithm.filter_groups.max_num_gen_batches | algorithm.max_num_gen_batches | of R groups, in a row; 10 if not given
algorithm.use_kl_in_reward | algorithm.use_kl_in_reward | with the sampler's logprobs, whatever prox is
algorithm.kl_penalty | algorithm.kl_penalty | kl is k1, mse is k2
algorithm.kl_ctrl.kl_coef | algorithm.kl_coef | fixed: it does not follow a target
algorithm.gamma | algorithm.gamma | gae only
algorithm.rollout_correction.rollout_is | algorithm.rollout_is | also "geometric"
algorithm.rollout_correction.rollout_is_threshold | algorithm.rollout_is_threshold | no limit if not given, 2.0 in verl
algorithm.rollout_correction.rollout_rs | algorithm.rollout_rs | the same rules
algorithm.rollout_correction.bypass_mode | algorithm.old_logprobs | true is "rollout"
critic.strategy | - | always FSDP2
critic.model.path | critic.path | the policy's initial weights if not given
critic.optim.lr | critic.lr | trainer.lr if not given
critic.ppo_mini_batch_size | trainer.ppo_mini_batch_size | policy and critic see the same microbatches
trainer.critic_warmup | critic.head_start_steps | optimizer steps, not train steps
reward_model.enable | reward_model.path | a path switches it on; a task.reward that you name is added
reward_model.model.path | reward_model.path
reward_model.overlong_buffer.len | algorithm.overlong_buffer_tokens
reward_model.overlong_buffer.penalty_factor | algorithm.overlong_penalty_factor
custom_reward_function.path | task.reward | module:function, called with (item, response)
custom_reward_function.name | task.reward | module:function, called with (item, response)
trainer.total_epochs | run.train_steps | no count of epochs: train_steps, or total_rollout_steps in groups (epochs x prompts)
trainer.total_training_steps | run.train_steps | a train step is require_batches optimizer steps
trainer.test_freq | eval.every_versions | in versions, not in steps: divide by trigger_parameter_sync_step
trainer.save_freq | checkpoint.every_steps | train steps in both
trainer.max_actor_ckpt_to_keep | checkpoint.keep
trainer.val_before_train | eval.every_versions | version 0 is always scored
trainer.project_name | logging.wandb_project
trainer.experiment_name | run.name
trainer.logger | logging.wandb | also logging.tensorboard, logging.mlflow_uri; metrics.jsonl is always written
trainer.default_local_dir | - | `--runs-dir`, with the run's directory below it
trainer.resume_mode | - | `asyncrl resume RUN` goes on from the newest checkpoint; `train` always begins a new run
trainer.rollout_data_dir | logging.samples_every_steps | in the run's samples/; `logging.samples_per_step = 0` dumps all
trainer.generate_ahead_steps | async_training.staleness_threshold | the same number if each step syncs; 1: profile one-step-off
trainer.sperated_node_tasks | placement.tasks | train, prox (logp), ref (ref_logp), critic, reward (rm), rollout (generate)
trainer.sperated_node_ratios | placement.ratios | whole numbers, in the order of placement.tasks, like [2, 1, 1]
[SkyRL]
trainer.fully_async.max_staleness_steps | async_training.staleness_threshold | the same number if each step syncs; strict here
trainer.fully_async.num_parallel_generation_workers | rollout.slots | sequences of one worker: groups * rollout.n / workers
trainer.policy_mini_batch_size | trainer.ppo_mini_batch_size | groups in both
trainer.train_batch_size | trainer.ppo_mini_batch_size | groups per train step are require_batches * ppo_mini_batch_size
trainer.critic_mini_batch_size | trainer.ppo_mini_batch_size | policy and critic see the same microbatches
trainer.micro_train_batch_size_per_gpu | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
trainer.micro_forward_batch_size_per_gpu | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
trainer.use_sample_packing | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
trainer.placement.colocate_all | placement.colocate | false if not given, true in SkyRL
trainer.placement.colocate_policy_ref | placement.tasks | true if not given; false: ["ref"] is a list of its own
trainer.placement.policy_num_nodes | trainer.nnodes
trainer.placement.policy_num_gpus_per_node | trainer.n_gpus_per_node
trainer.placement.ref_num_gpus_per_node | placement.ratios | with placement.tasks
trainer.policy.model.lora.rank | lora.rank | merged at each sync, or sent alone (`lora.sync`)
trainer.policy.model.lora.alpha | lora.alpha
trainer.strategy | - | always FSDP2
trainer.policy.sequence_parallel_size | trainer.sequence_parallel_size | the same
trainer.policy.optimizer_config.adam_betas | trainer.betas | [0.9, 0.99] if not given, [0.9, 0.999] in SkyRL
trainer.policy.optimizer_config.max_grad_norm | trainer.grad_clip
trainer.policy.optimizer_config.num_warmup_steps | trainer.warmup_steps | optimizer steps in both
trainer.algorithm.advantage_estimator | algorithm.adv_estimator | reinforce++ is reinforce_plus_plus; the others are the same
trainer.algorithm.policy_loss_type | algorithm.loss_mode | regular is vanilla; dual_clip is vanilla with clip_ratio_c
trainer.algorithm.loss_reduction | algorithm.loss_agg_mode | token_mean is token-mean, sequence_mean seq-mean-token-mean
trainer.algorithm.grpo_norm_by_std | algorithm.normalize_advantages
trainer.algorithm.eps_clip_low | algorithm.clip_ratio_low
trainer.algorithm.eps_clip_high | algorithm.clip_ratio_high | 0.28 if not given, 0.2 in SkyRL
trainer.algorithm.clip_ratio_c | algorithm.clip_ratio_c | off if not given
trainer.algorithm.dynamic_sampling.type | algorithm.filter_groups | filter is true; there is no "replace"
trainer.algorithm.dynamic_sampling.max_sample_batches | algorithm.max_num_gen_batches | of R groups, all in a row
trainer.algorithm.zero_variance_filter | algorithm.filter_groups | the groups left out are replaced
trainer.algorithm.kl_estimator_type | algorithm.kl_loss_type | k3 is the same; low_var_kl has limits
trainer.algorithm.lambd | algorithm.lam
trainer.algorithm.value_clip | critic.cliprange_value | 0.5 if not given, 0.2 in SkyRL
trainer.ref.model.path | ref.path
trainer.critic.model.path | critic.path
trainer.critic.optimizer_config.lr | critic.lr
trainer.algorithm.use_entropy_loss | - | no entropy bonus
trainer.algorithm.off_policy_correction.tis_ratio_type | algorithm.rollout_is
trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high | algorithm.rollout_is_threshold
trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high | algorithm.rollout_is_threshold
trainer.algorithm.off_policy_correction.sequence_mask_metric | algorithm.rollout_rs | geometric is seq_mean_k1, product seq_sum_k1
trainer.epochs | run.train_steps | no count of epochs: train_steps, or total_rollout_steps in groups (epochs x prompts)
trainer.update_epochs_per_batch | - | every group is trained once
trainer.eval_interval | eval.every_versions | in versions, not in steps: divide by trigger_parameter_sync_step
trainer.eval_before_train | eval.every_versions | version 0 is always scored
trainer.eval_batch_size | - | an eval takes the workers' free slots
trainer.ckpt_interval | checkpoint.every_steps | train steps in both
trainer.max_ckpts_to_keep | checkpoint.keep
trainer.ckpt_path | - | `--runs-dir`, with the run's directory below it
trainer.resume_mode | - | `asyncrl resume RUN` goes on from the newest checkpoint; `train` always begins a new run
trainer.max_prompt_length | rollout.max_prompt_tokens | a longer prompt is refused, never left out
trainer.run_name | run.name
generator.n_samples_per_prompt | rollout.n
generator.eval_n_samples_per_prompt | eval.samples_per_prompt
generator.num_inference_engines | rollout.workers
generator.inference_engine_tensor_parallel_size | placement.gpus_per_rollout_worker | on CPUs rollout.tensor_parallel_size
generator.backend | rollout.engine | "vllm" or "transformers"
generator.batched | - | engines always batch continuously
generator.async_engine | - | engines are always asynchronous
generator.weight_sync_backend | weights.transport
generator.max_num_seqs | rollout.slots | sequences of one worker at once
generator.max_input_length | env.max_context_tokens | tokens of an episode, its responses included
generator.sampling_params.max_generate_length | rollout.max_response_tokens | of one turn
generator.zero_reward_on_non_stop | algorithm.mask_truncated | they are left out of the loss instead
data.train_data | task.source | "parquet:<file>"; several by a pattern, "parquet:train-*.parquet"
data.val_data | eval.sets and task.eval_path | sets by name; or one file in place of the held-out prompts
environment.env_class | task.environment
[AReaL]
rollout.max_head_offpolicyness | async_training.staleness_threshold | the same number if each step syncs; strict here
rollout.max_concurrent_rollouts | rollout.slots | sequences of one worker: AReaL counts prompts of all workers
rollout.consumer_batch_size | trainer.ppo_mini_batch_size | groups in both
train_dataset.batch_size | trainer.ppo_mini_batch_size | groups in both
train_dataset.path | task.source
valid_dataset.path | task.eval_path
gconfig.n_samples | rollout.n
gconfig.max_new_tokens | rollout.max_response_tokens
actor.eps_clip | algorithm.clip_ratio_low and algorithm.clip_ratio_high | the same value for both
actor.use_decoupled_loss | algorithm.old_logprobs | true is "recompute"
actor.recompute_logprob | algorithm.old_logprobs | true is "recompute"
actor.prox_logp_method | algorithm.old_logprobs | "loglinear" has its name from here
actor.behav_imp_weight_cap | algorithm.rollout_is_threshold | AReaL masks above it: "0_<cap>"
actor.kl_ctl | algorithm.kl_coef | with algorithm.use_kl_in_reward
actor.mb_spec.max_tokens_per_mb | trainer.max_tokens_per_microbatch
allocation_mode | placement.gpus and placement.ratio | trainer : rollout; t of an engine is gpus_per_rollout_worker
total_train_epochs | run.train_steps | no count of epochs: train_steps, or total_rollout_steps in groups (epochs x prompts)
saver.freq_steps | checkpoint.every_steps
evaluator.freq_steps | eval.every_versions | in versions, not in steps: divide by trigger_parameter_sync_step
[prime-rl]
orchestrator.max_async_level | async_training.staleness_threshold | the same number if each step syncs
orchestrator.max_off_policy_steps | async_training.max_staleness | older rollouts are dropped there, and never made here
orchestrator.batch_size | trainer.ppo_mini_batch_size | groups, not rollouts: divide by rollout.n
orchestrator.rollouts_per_example | rollout.n
orchestrator.max_inflight_rollouts | rollout.slots | sequences of one worker, not of all
orchestrator.oversampling_factor | async_training.staleness_threshold | that factor less 1: the share of a window that is ahead
orchestrator.sampling.max_tokens | rollout.max_response_tokens
orchestrator.seq_len | env.max_context_tokens
orchestrator.env | task.source | "verifiers:<id>"; its args are task.params
orchestrator.eval.interval | eval.every_versions | in versions, not in steps: divide by trigger_parameter_sync_step
orchestrator.eval.num_examples | eval.prompts
orchestrator.eval.rollouts_per_example | eval.samples_per_prompt
orchestrator.weight_broadcast.type | weights.transport | filesystem is "disk"
model.name | model.path
max_steps | run.train_steps
ckpt.interval | checkpoint.every_steps
ckpt.keep_last | checkpoint.keep
trainer.optim.max_norm | trainer.grad_clip
[TRL]
max_staleness | async_training.max_staleness | versions; older samples are dropped there, and never made here
weight_sync_steps | async_training.trigger_parameter_sync_step | train steps in both
max_inflight_tasks | rollout.slots | sequences of one worker at once
queue_maxsize | async_training.staleness_threshold | groups admitted ahead, as a share of a window
num_generations | rollout.n
max_completion_length | rollout.max_response_tokens | of one turn
max_tool_calling_iterations | env.max_turns | responses, one more than calls
per_device_train_batch_size | trainer.ppo_mini_batch_size | groups over all ranks: x accumulation x processes / num_generations
gradient_accumulation_steps | trainer.max_tokens_per_microbatch | microbatches are always packed by tokens
learning_rate | trainer.lr
epsilon | algorithm.clip_ratio_low
epsilon_high | algorithm.clip_ratio_high | 0.28 if not given, 0.2 in TRL
beta | algorithm.kl_loss_coef | with algorithm.use_kl_loss = true
loss_type | algorithm.loss_agg_mode | dapo is token-mean, grpo seq-mean-token-mean, dr_grpo seq-mean-token-sum-norm; sapo: loss_mode
importance_sampling_level | algorithm.loss_mode | sequence is gspo
scale_rewards | algorithm.normalize_advantages | group is true, none is false
mask_truncated_completions | algorithm.mask_truncated
num_iterations | - | every group is trained once
use_vllm | rollout.engine | true is "vllm"
lora_r | lora.rank | merged at each sync, or sent alone (`lora.sync`)
lora_alpha | lora.alpha
lora_target_modules | lora.target_modules | a list of names; all-linear is an empty list
eval_steps | eval.every_versions | in versions, not in steps: divide by trigger_parameter_sync_step
save_steps | checkpoint.every_steps
reward_funcs | task.reward | module:function, one response at a time
environment_factory | task.environment | module:Class, of the same kind
[others]
num_gpus | placement.gpus | of the whole job, divided by placement.ratio
trainer_gpus | placement.trainer_workers | one GPU each; or placement.gpus with placement.ratio
gpus_per_trainer | placement.trainer_workers | one GPU each; or placement.gpus with placement.ratio
rollout_gpus | rollout.workers | each on placement.gpus_per_rollout_worker GPUs; or placement.gpus with placement.ratio
gpus_per_rollout | placement.gpus_per_rollout_worker | how many workers: rollout.workers
gpus_per_worker | placement.gpus_per_rollout_worker | a trainer rank has one GPU
trainer.num_workers | placement.trainer_workers | one GPU each
rollout.num_workers | rollout.workers
[an earlier asyncrl]
task.prompt_column | task.prompt_key
task.answer_column | task.answer_key
algorithm.max_importance_weight | algorithm.rollout_is_threshold | X is now "0_X"
"""
"""[trainer], then `its key | ours | what differs`, or `its key | - | why there is none`."""


OTHERS = "others"
"""The peer of names that no trainer has, and that are tried all the same."""


class Row(NamedTuple):
    """A key of another trainer, our keys in its place, and what differs between them or why there is none."""

    peer: str
    theirs: str
    ours: tuple[str, ...]
    note: str

    @property
    def meaning(self) -> str:
        """The end of an error's message about the key."""
        if self.peer == OTHERS:
            return f"which is {' and '.join(self.ours)} here"
        return (
            f"{self.peer}'s name for {' and '.join(self.ours)}" if self.ours else f"which is {self.peer}'s and has no counterpart"
        )

    @property
    def hint(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"use {' and '.join(self.ours)}{note}" if self.ours else self.note


@cache
def rows() -> tuple[Row, ...]:
    """The rows of TABLE."""
    found: list[Row] = []
    peer = ""
    for line in TABLE.strip().splitlines():
        if line.startswith("["):
            peer = line.strip("[]")
        else:
            theirs, ours, note = [*line.split(" | "), ""][:3]
            found.append(Row(peer, theirs, () if ours == "-" else tuple(ours.split(" and ")), note))
    return tuple(found)


def counterpart(key: str) -> Row | None:
    """The row of a key, which may have fewer parts than in the table (`test_freq`) or more, and Hydra's `+` or dashes. Of several
    rows the one with most parts in common, then the first."""
    parts = key.lstrip("+~-").replace("-", "_").split(".")
    best, most = None, 0
    for row in rows():
        theirs = row.theirs.split(".")
        shared = min(len(theirs), len(parts))
        if shared > most and theirs[-shared:] == parts[-shared:]:
            best, most = row, shared
    return best
