"""All that knows vLLM."""
