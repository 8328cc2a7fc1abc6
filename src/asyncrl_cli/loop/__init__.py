"""The asynchronous RL loop: admission, ledger, batching, sync. Knows no hardware: Ray, torch and engines are
behind ports."""
