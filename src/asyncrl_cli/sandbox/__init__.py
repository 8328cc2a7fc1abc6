"""The only room that runs users' code: rewards, agents and environments, in processes of their own.

    parent_processes.py    starts, asks and kills such processes, in a rollout worker or the driver
    parent_rewards.py      RewardPool: several of them compute rewards or play agents, with restarts
    child_host.py          forks them, and ends what is left of one; a process of its own
    child_rewards.py       in a forked process: computes rewards (tasks/reward_functions.py), plays agents
    rehearsal.py           tries a task's reward before a run

What plays a user's environment class in a forked process is tasks/tool_class.py.
"""
