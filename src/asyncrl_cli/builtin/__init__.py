"""What comes with asyncrl for a first run: the toy model, its tasks and their environments."""
