"""Coroutines as tests, on the virtual clock."""

from __future__ import annotations

import functools

from asyncrl_cli.simulate.world import run_virtual


def virtual(test):
    @functools.wraps(test)
    def run(*arguments, **keywords):
        run_virtual(test(*arguments, **keywords))

    return run
