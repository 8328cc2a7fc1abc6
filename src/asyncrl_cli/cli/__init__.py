"""The command line. Each module holds one or more related commands: parse, call, print, exit. Heavy imports
go into functions."""
