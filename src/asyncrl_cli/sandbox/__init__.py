"""The only room that runs users' code: rewards, tools and environments, in child processes."""
