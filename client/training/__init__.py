"""Training at a site: a child process that alone imports torch, and the agent's end of the pipe to it."""
