"""Exports a run's weights as an ordinary Hugging Face directory."""
