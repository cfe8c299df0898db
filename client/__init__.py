"""The site's program: attends, checks its own policy and data, trains in a child process, sends only sums' shares."""
