"""The policy trainer: advantages, batches, loss, optimizer steps under FSDP2, gather, trainer state. Does not use Ray.

`asyncrl plan` uses the constants here, too.
"""

LOGITS_CHUNK_ELEMENTS = 2**25
"""Logits that exist at a time (train/chunked_logprobs.py): 128 MiB in float32."""
LOGITS_COPIES = 3
"""How many float32 copies of them are alive at the worst moment: log-probabilities, and two gradients on their way back."""
