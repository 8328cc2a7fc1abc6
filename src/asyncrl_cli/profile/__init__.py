"""Turns layers of TOML into one frozen, validated `Profile`, and computes the numbers that follow from it."""
