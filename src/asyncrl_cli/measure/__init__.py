"""Typed values, the states of executors, meters, bands and intervals: what is measured, and how it is
reduced."""
