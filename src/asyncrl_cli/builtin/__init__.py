"""What comes with asyncrl for a first run: the toy model, its tasks and their environments.

builtin_tasks.py           tasks by name: parameters, items, demonstrations; the environment of builtin:guess
calculator.py              the environment of builtin:calculator, a class of its own
tiny.py, warm_start.py     builtin:tiny: model, tokenizer and lessons; how it learns them
tiny_models.py             builds it, once, into the cache
"""
