"""Where a run's first model comes from: a directory, the hub, or `builtin:tiny`, built and taught here.

resolve.resolve_model(profile, task) -> Path     a Hugging Face directory with config, weights and tokenizer
    resolve.py                                   which of the three it is, and whether it is whole
    build.py                                     builtin:tiny: built once per content hash, then found again
        tiny.py                                  its configuration and its character tokenizer
        lessons.py                               the demonstrations it learns from, some of them wrong
        warm_start.py                            supervised learning on them
            muon.py                              by an optimizer that computes in float32

attention.choose_attention(model)                which attention function computes what the model means
saved_form.skeleton(directory)                   a model without memory: the names and shapes of its tensors
saved_form.SavedForm                             those names and shapes as the model's own files have them
"""
