"""The policy trainer: advantages, batches, loss, optimizer steps under FSDP2, gather, trainer state. Does not use Ray."""
