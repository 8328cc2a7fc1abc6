"""Provides a run's initial model: from a directory, from the hub, or `builtin:tiny`, which is built and
trained here.

resolve.resolve_model(profile, task) -> Path     a Hugging Face directory with config, weights and tokenizer
    resolve.py                                   decides which of the three it is; builtin:tiny is built once, then cached
    inspection.py                                checks that the model is complete and can be opened
    tiny.py                                      builtin:tiny's configuration, its character tokenizer, its lessons
    tiny_chat.py                                 its conversation format: chat template, tokens of roles and tool calls
    warm_start.py                                supervised learning on the lessons

attention.choose_attention(model)                sdpa if it equals the model's own attention, else eager
shape.shape_of(path)                             a model's sizes, read without torch and without the network
saved_form.skeleton(directory)                   a model without memory: the names and shapes of its tensors
saved_form.SavedForm                             converts tensors between the names in memory and those in the model's files
"""
