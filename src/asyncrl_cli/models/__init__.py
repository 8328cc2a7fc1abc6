"""Where a run's first model comes from: a directory, the hub, or `builtin:tiny`, built and taught here.

resolve.resolve_model(profile, task) -> Path     a Hugging Face directory with config, weights and tokenizer
    resolve.py                                   which of the three it is; builtin:tiny is built once, then found again
    inspection.py                                whether it is whole, and could be opened
    tiny.py                                      builtin:tiny's configuration, its tokenizer of characters, its lessons
    warm_start.py                                supervised learning on them

attention.choose_attention(model)                which attention function computes what the model means
saved_form.skeleton(directory)                   a model without memory: the names and shapes of its tensors
saved_form.SavedForm                             those names and shapes as the model's own files have them
"""
