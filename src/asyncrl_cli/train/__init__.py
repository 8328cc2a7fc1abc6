"""The policy trainer: advantages, batches, loss, optimizer steps under FSDP2, gather, trainer state. Does not use Ray.

`asyncrl plan` uses the constants here, too.
"""

LOGITS_CHUNK_ELEMENTS = 2**25
"""How many logits exist at one time (train/chunked_logprobs.py): 128 MiB in float32."""
LOGITS_COPIES = 3
"""How many float32 copies of them are alive at peak: the log-probabilities, and two gradients in the backward pass."""
MOMENTS_SLICE_BYTES = 2**30
"""With `trainer.offload_optimizer`: how many bytes of moments are on the device at a time (train/ranks.py)."""
