"""The policy trainer: advantages, batches, loss, optimizer steps under FSDP2, gather, trainer state. Does not
use Ray.

`asyncrl plan` uses the constants here, too.
"""

LOGITS_CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""How many logits exist at one time, by device (train/logprobs.py): 128 MiB and 1 GiB in float32.
Each chunk adds a matrix of the head's size to the head's gradient: by arithmetic 10 to 15% of a 7B model's
step on a GPU with 2^25."""
LOGITS_COPIES = 3
"""How many float32 copies of them are alive at peak: the log-probabilities, and two gradients in the backward
pass."""
MOMENTS_SLICE_BYTES = 2**30
"""With `trainer.offload_optimizer`: how many bytes of moments are on the device at a time
(train/optimizer.py)."""
LARGEST_SHARE = 0.9
"""Responses share prefixes (train/prefix_trees.py) if this leaves at most this share of the positions, else
it is not worth its overhead in attention."""
WHOLE_GRADIENTS_SHARE = 1 / 8
"""Whole gradients are kept until an optimizer step's last microbatch if they take at most this share of a
GPU's memory."""


def keeps_whole_gradients(
    setting: bool | None, *, ranks: int, parameters: int, device_bytes: int | None
) -> bool:
    """Whether ranks on GPUs sum gradients once per optimizer step, instead of after each microbatch.
    `setting`: `trainer.whole_gradients`; `parameters`: those that are trained; `device_bytes`: of a GPU, None
    if unknown."""
    if setting is None:
        setting = device_bytes is not None and 4 * parameters <= WHOLE_GRADIENTS_SHARE * device_bytes
    return setting and ranks > 1
