"""Prompts and rewards: from a profile's `task` section to items and their rewards.

    task.load_task(profile) -> Task        items of both splits, the reward's description, demonstrations
        gym.py                             where items come from: a reasoning-gym dataset,
        files.py                           or a jsonl or parquet file
        reward_choice.py                   which reward it is, tried in a child process; where a user's function lies
        item.py                            what an item is; compact prompts with worked answers, for builtin:tiny
    rewards.RewardPool(task.reward, ...)   awaits rewards, beside the event loop:
        reward_process.py              a process that scores: started, asked, watched
        reward_worker.py               what runs in it, with scoring.py inside
        child.py                       how our child processes start, talk and end

This room knows nothing of ray and torch.
"""
