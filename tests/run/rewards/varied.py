"""A reward that differs between the responses to a prompt, so that every step changes the weights, even of a
model that has hardly been taught."""

import zlib


def score(item, response):
    return zlib.crc32(response.encode()) % 11 / 10
