"""What every room may use: errors, storage, safe files, paths, plug-ins and child processes. It imports none
of the others."""
