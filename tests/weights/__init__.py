"""Tests of weights/."""
