"""A run's initial model: a directory, a GGUF file, a name on the hub or builtin:tiny; its sizes, attention
and tensors.

model_directory.resolve_model(profile, task)   a Hugging Face directory with config, weights and tokenizer
model_files.check_model(profile, directory)    whether the model is complete and can be opened
gguf_file.converted(file, cache, progress)     a directory made of a GGUF file
shape.shape_of(path)                           a model's sizes, read without torch and without the network
saved_form.skeleton(directory)                 a model without memory: the names and shapes of its tensors
saved_form.SavedForm                           converts tensors between their names in memory and in files
attention.choose_attention(model)              sdpa if it equals the model's own attention, else eager
"""
