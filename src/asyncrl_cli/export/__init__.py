"""Exports a run's weights as an ordinary Hugging Face directory.

exported.py    `asyncrl export`: from the argument to the finished directory
source.py      which weights are meant, and whether they are whole
tensors.py     reads, converts and writes the tensors; the only module here that imports torch
"""
