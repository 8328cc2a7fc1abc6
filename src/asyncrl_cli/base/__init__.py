"""What every room may use; it imports none of the others.

errors.py           the errors that a user can act on, words for messages, `timeout`
child_process.py    children for foreign code: command line, environment, one call, how they end
daemon_threads.py   blocking calls in threads for which nothing waits
storage.py          writes files, directories and links atomically; errors of the disk in users' words
safe_files.py       reads untrusted files: regular ones up to a size, JSON of a declared type
paths.py            names and paths that users give
named_code.py       code that a profile names: built-in, of packages, or the user's
"""
