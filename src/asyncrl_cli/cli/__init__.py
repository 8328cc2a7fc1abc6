"""The command line: one module per command: parse, call, print, exit. Heavy imports only inside functions."""
