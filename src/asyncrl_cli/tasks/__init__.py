"""Prompts and rewards: turns a profile's `task` section into items, and scores responses to them.

    task.load_task(profile) -> Task        items of both splits, the reward's description, demonstrations
        gym.py                             items from a reasoning-gym dataset
        files.py, rows.py, splits.py       items from a jsonl or parquet file: reads it, checks its rows, holds out eval items
        builtin.py                         items of a task that comes with asyncrl: calculation.py, guessing.py
        verifiers_source.py                items from an environment of the package verifiers; verifiers_player.py plays them
        code_choice.py                     chooses the reward (reward_spec.py) and the environment class (tool_class.py)
        code_records.py                    tries out user code (user_code.py) in a child process, and records its file
        item.py                            what an item is; compact prompts with written-out working, for builtin:tiny
    rehearsal.rehearse(profile, task)      tries the reward before a run: references must score, and what is no answer must not
    rewards.RewardPool(task.reward, ...)   awaits rewards without blocking the event loop
        reward_process.py                  the pool's side of a scoring process: starts it, sends requests, watches it
        reward_worker.py                   the process's own side: runs scorers (scoring.py) and agents (agents.py)
        final_answer.py, mathematics.py    where a response's answer is looked for, and whether it is the right one
        reward_functions.py                calls the user's reward functions: ours, TRL's, verl's compute_score
        child.py, zygote.py                how our child processes start, communicate and end; zygote.py forks those of environments
        printed.py                         copies what they print to a log, at a bounded rate

This room does not import ray or torch.
"""
