"""Prompts and rewards: turns a profile's `task` section into items, and scores responses to them.

    task.load_task(profile) -> Task        items of both splits, the reward's description, demonstrations
        gym.py                             where items come from: a reasoning-gym dataset,
        files.py, rows.py, splits.py       a jsonl or parquet file, row by row, and what of it is held out,
        builtin.py                         a task that comes with asyncrl: calculation.py, guessing.py
        verifiers_source.py                or an environment of the package verifiers; verifiers_player.py: what plays it
        code_choice.py                     which reward is meant (reward_spec.py), and which class plays (tool_class.py)
        code_records.py                    functions and classes of the user's (user_code.py): tried out in a child, recorded
        item.py                            what an item is; compact prompts with written-out working, for builtin:tiny
    rewards.RewardPool(task.reward, ...)   awaits rewards without blocking the event loop:
        reward_process.py              a process that scores, seen from the pool: started, asked, watched
        reward_worker.py               what runs in it, with scoring.py inside; agents.py: agents run there, too
        child.py                       how our child processes start, talk and end

This room does not import ray or torch.
"""
