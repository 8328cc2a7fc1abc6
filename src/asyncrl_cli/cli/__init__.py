"""The command line. Each module holds a command or related ones: parse, call, print, exit. Heavy imports only inside functions."""
