"""Sources of items: from a profile's `task` section to the items of both splits, and what judges them.

    task.load_task(profile) -> Task    both splits, the reward's description, demonstrations; the items of an
                                       environment of the package verifiers
        files.py, rows.py              items of a jsonl or parquet file, both splits; one row
        gym.py                         items of a reasoning-gym dataset; the worked form of one
        (builtin/)                     items of a task that comes with asyncrl
        code_choice.py                 chooses the reward and the environment class; tries out user code

What sandbox/ runs in processes of their own:

    reward_functions.py                rewards, ours and users'
        final_answer.py                where a response's answer is looked for
        mathematics.py                 whether it is the right one
    players.py                         agents and environments of verifiers, which play an item themselves
    tool_class.py                      a user's environment class: its description, and its player

This room imports neither ray nor torch.
"""
