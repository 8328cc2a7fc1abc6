"""Inference engines behind one port."""
