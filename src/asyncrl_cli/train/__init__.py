"""The policy trainer: advantages, batches, loss, optimizer steps under FSDP2, gather, trainer state. Knows no Ray."""
