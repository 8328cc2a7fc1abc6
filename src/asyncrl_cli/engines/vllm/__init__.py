"""The engine `vllm`. All code that depends on vLLM is in this folder."""
