"""A reward for runs that only go on while their test waits for something else: they leave the processors to
others."""

import time


def score(item, response):
    time.sleep(0.03)
    return float(len(response) % 2)
