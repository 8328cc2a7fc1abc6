"""Inference engines: the port that rollout workers use, and the engines `transformers` and `vllm` behind
it."""
